"""Which of a peer's ports takes no connection: found out by plain ones, after Mooncake could not read from it.

Over TCP a peer listens at two: that of its address, for handshakes, and one that moves the data, which its answer to a
handshake names. Of a failed call, Mooncake says neither which of them it was nor why.
"""

import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transfer.peers import Address, parse_address, resolve

#: For a connection, and for an answer: a system sends its first packet again after a second.
_PATIENCE_S = 2.0
_LOOK_MS = 50  # between two looks whether an answer is still wanted

#: Before a handshake's JSON: its size with the type, and the type, here of a question for what the peer serves.
_HEAD, _METADATA = struct.Struct("<QB"), 1
_QUESTION = _HEAD.pack(3, _METADATA) + b"{}"
_MOST_BYTES = 1 << 20  # of an answer, by Mooncake's own rule

_Unwanted = Callable[[], bool]


def closed_port(address: str, *, moves_data: bool, unwanted: _Unwanted) -> str:
    """Return which port of a peer takes no connection and why; empty if those that can be tried do. Takes 4 s at most.

    Args:
        address: of the peer's transfer engine.
        moves_data: whether a second port moves the data.
        unwanted: whether to stop, with any answer.
    """
    peer = parse_address(address)
    try:
        ip = resolve(peer.host)
        with _connected(ip, peer.port, unwanted) as connection:
            data_port = _data_port(connection, unwanted) if moves_data else 0
    except OSError as why:
        return f"its port {peer.port} takes no connection ({why})"
    try:
        if data_port:
            with _connected(ip, data_port, unwanted):
                pass
    except OSError as why:
        data = Address(peer.host, data_port)
        return f"it answers there, but its second port, which moves the data, takes no connection: {data} ({why})"
    return ""


@contextmanager
def _connected(ip: str, port: int, unwanted: _Unwanted) -> Iterator[socket.socket]:
    """Yield a connection that does not block.

    Raises:
        OSError: there is none.
    """
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as connection:
        connection.setblocking(False)
        code = connection.connect_ex((ip, port))
        if code == errno.EINPROGRESS:
            if not _comes(connection, select.POLLOUT, unwanted):
                raise TimeoutError("nothing comes back, as where a firewall drops packets")
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise ConnectionError(os.strerror(code))
        yield connection


def _data_port(connection: socket.socket, unwanted: _Unwanted) -> int:
    """Return the port that a peer names in its answer to a handshake, 0 if it names none in time."""
    answer, size, until = b"", _HEAD.size, time.monotonic() + _PATIENCE_S

    def is_over() -> bool:  # for all of the answer, whose bytes may come one by one
        return unwanted() or time.monotonic() >= until

    try:
        connection.sendall(_QUESTION)
        while len(answer) < size <= _MOST_BYTES and _comes(connection, select.POLLIN, is_over):
            received = connection.recv(_MOST_BYTES)
            if not received:
                break
            answer += received
            if len(answer) >= _HEAD.size:
                size = _HEAD.unpack_from(answer)[0] + _HEAD.size - 1
        port = json.loads(answer[_HEAD.size :])["tcp_data_port"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return port if isinstance(port, int) and 0 < port < 65536 else 0


def _comes(connection: socket.socket, event: int, unwanted: _Unwanted) -> bool:
    """Return whether an event comes in time."""
    poll, until = select.poll(), time.monotonic() + _PATIENCE_S
    poll.register(connection, event)
    while time.monotonic() < until and not unwanted():
        if poll.poll(_LOOK_MS):
            return True
    return False
