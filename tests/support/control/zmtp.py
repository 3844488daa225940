"""ZeroMQ's wire protocol (ZMTP 3) by hand: what libzmq would never send."""

import contextlib
import socket
import struct

from tests.support.waiting import WAIT_S

MORE, LARGE, COMMAND = 1, 2, 4  # flags of a frame


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """How both sides begin."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(body: bytes) -> bytes:
    """A short command, e.g. ``ready()``'s."""
    return bytes([COMMAND, len(body)]) + body


def ready() -> bytes:
    """The end of a handshake without security, as a DEALER says it."""
    return command(b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER")


def frame(body: bytes, flags: int = 0, length: int | None = None) -> bytes:
    """A frame of a message, with a length of one's choice."""
    return bytes([flags | LARGE]) + struct.pack(">Q", len(body) if length is None else length) + body


def connect(port: int, host: str = "127.0.0.2") -> socket.socket:
    """A connection from ``host``, an address of this machine, to the server at ``port``.

    A server that refuses it accepts it first: it may have ended before ``connect`` has looked at it.
    """
    connection = socket.socket()
    try:
        connection.settimeout(WAIT_S)
        connection.bind((host, 0))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.connect(("127.0.0.1", port))
    except OSError:
        connection.close()
        raise
    return connection


def await_ready(connection: socket.socket) -> None:
    """Read the other side's handshake, to its end or that of the connection."""
    said = b""
    while b"READY" not in said:
        piece = connection.recv(1 << 16)
        if not piece:
            return
        said += piece


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side ends the connection within its timeout. Reads it empty."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True
