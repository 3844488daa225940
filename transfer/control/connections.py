"""The connections under ZeroMQ's sockets, seen from outside: what they bring, and the end of one that brings too much.

libzmq holds a message of any number of frames until it is complete, however large that gets, and then each of them must
be read before any other message. It limits neither. Which connections there are, its events tell; what is too much is
the callers' business.
"""

import os
import socket as sockets
import struct
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import zmq

CHECK_INTERVAL_S = 0.25  # what a connection brings meanwhile is held, whatever it is
#: Frames of a message that are read before it is taken for one without end. Ours have one, a REQ socket's have two.
FRAMES_READ = 16

_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER
_KEEPALIVE_BYTES = 64  # that an idle connection brings meanwhile
_BYTES_RECEIVED = struct.Struct("=Q")  # tcpi_bytes_received in Linux' struct tcp_info, since 4.1
_BYTES_RECEIVED_AT = 128
_DISCARDED_AT_ONCE = 1 << 16

_Key = TypeVar("_Key", bound=Hashable)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next message, or its first ``FRAMES_READ`` frames, the last of which tells by ``more`` that there are more.

    Raises:
        zmq.Again: there is none.
    """
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more and len(frames) < FRAMES_READ:
        frames.append(socket.recv(copy=False))
    return frames


@dataclass(slots=True)
class Unread:
    """The bytes that a connection has brought since its last complete message."""

    heard: bool = False  # whether a message of it was complete since the last look; to be set by who reads them
    _read_from: int = 0  # where its latest complete message was seen to have ended

    def look(self, received: int) -> int:
        """How many they are; ``received``: all bytes of the connection. To be called every ``CHECK_INTERVAL_S``."""
        idle = min(received, self._read_from + _KEEPALIVE_BYTES)
        self._read_from = received if self.heard else idle
        self.heard = False
        return received - self._read_from


def hoarders(unread: Mapping[_Key, int], each: int, in_all: int) -> Iterator[tuple[_Key, int]]:
    """Those to end so that none holds more bytes than ``each`` and all no more than ``in_all``; each with its bytes."""
    left = sum(unread.values())
    for key, held in sorted(unread.items(), key=lambda item: -item[1]):
        if held <= each and left <= in_all:
            return
        left -= held
        yield key, held


@dataclass(frozen=True, slots=True)
class Connection:
    """One of libzmq's."""

    host: str  # the other side
    _socket: sockets.socket

    def end(self) -> None:
        """libzmq sees the other side leave, gets no more of what has arrived, and the kernel forgets what it held."""
        with suppress(OSError):
            self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
            self._socket.shutdown(sockets.SHUT_RDWR)
            discarded = bytearray(_DISCARDED_AT_ONCE)
            while self._socket.recv_into(discarded, 0, sockets.MSG_DONTWAIT | sockets.MSG_TRUNC):
                pass

    @property
    def bytes_received(self) -> int:
        """Since it was made; 0 on a system that does not tell."""
        info = self._socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
        if len(info) < _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size:
            return 0
        return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])


@contextmanager
def opened(descriptor: int, *, local_port: int = 0, remote_port: int = 0) -> Iterator[Connection | None]:
    """The connection from ``local_port`` or to ``remote_port`` that ``descriptor`` is; None if it is another, or gone.

    libzmq may have closed it since, and the number may be anybody's: it is asked who it is before it is touched.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        found = sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with found:
        host = _other_side(found, local_port, remote_port)
        yield Connection(host, found) if host else None


def _other_side(connection: sockets.socket, local_port: int, remote_port: int) -> str:
    """Who is connected by it; empty if nobody, or with other ports."""
    if connection.type != sockets.SOCK_STREAM or connection.family not in (sockets.AF_INET, sockets.AF_INET6):
        return ""
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return ""
    return str(there[0]) if here[1] == (local_port or here[1]) and there[1] == (remote_port or there[1]) else ""
