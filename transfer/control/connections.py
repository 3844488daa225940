"""The TCP connections under ZeroMQ's sockets: how much each has received, and how to abort one that sends too much.

libzmq buffers a multipart message until it is complete, however large it gets, and then every frame must be read before
any other message. It limits neither. Its monitor events tell which connections exist; callers set the limits.
"""

import os
import socket as sockets
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import zmq

CHECK_INTERVAL_S = 0.25  # between two checks a connection may send without limit
#: The most frames of a message that are read before it counts as endless. Ours have one, those of a REQ socket two.
FRAMES_READ = 16

_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER
# Of a frame in ZMTP. Exact: for frames of 2 bytes, a larger one lets a flood pass for what has been read.
_SHORT_BYTES, _SHORT_HEADER_BYTES, _HEADER_BYTES, _CURVE_BYTES = 256, 2, 9, 33
_KEEPALIVE_BYTES = 64  # an idle connection may send this much between two checks
# In Linux's struct tcp_info, since 4.1: tcpi_unacked, tcpi_bytes_acked, tcpi_bytes_received.
_SEGMENTS, _BYTES = struct.Struct("=I"), struct.Struct("=Q")
_UNACKNOWLEDGED_AT, _BYTES_ACKNOWLEDGED_AT, _BYTES_RECEIVED_AT = 24, 120, 128
# tcpi_snd_mss, tcpi_notsent_bytes and, since 5.4, tcpi_snd_wnd: what the peer has room for.
_LARGEST_SEGMENT_AT, _UNSENT_AT, _ROOM_AT = 16, 144, 228
_DISCARD_CHUNK_BYTES = 1 << 16

_Key = TypeVar("_Key", bound=Hashable)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the next message, or only its first ``FRAMES_READ`` frames: then ``more`` of the last one is set.

    Raises:
        zmq.Again: there is no message.
    """
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more and len(frames) < FRAMES_READ:
        frames.append(socket.recv(copy=False))
    return frames


@dataclass(slots=True)
class UnreadBytes:
    """Counts the bytes that a connection has received and that were not read as parts of complete messages."""

    is_encrypted: bool = False
    _read: int = 0  # since the last update
    _read_until: int = 0

    def add_read(self, frames: Sequence[Sized]) -> None:
        """Record that these frames of a message have been read."""
        for frame in frames:
            size = len(frame) + _CURVE_BYTES * self.is_encrypted
            self._read += size + (_SHORT_HEADER_BYTES if size < _SHORT_BYTES else _HEADER_BYTES)

    def update(self, received: int) -> int:
        """Return the count, given all bytes ``received`` so far. Call this every ``CHECK_INTERVAL_S``."""
        self._read_until = min(received, self._read_until + self._read + _KEEPALIVE_BYTES)
        self._read = 0
        return received - self._read_until


def over_limit(unread: Mapping[_Key, int], most: int) -> Iterator[tuple[_Key, int]]:
    """Yield the keys and bytes to drop, the largest first, so that the sum of the rest does not exceed ``most``."""
    left = sum(unread.values())
    if left <= most:  # as always, but for attacks: nothing is sorted
        return
    for key, held in sorted(unread.items(), key=lambda item: -item[1]):
        if left <= most:
            return
        left -= held
        yield key, held


@dataclass(frozen=True, slots=True)
class Connection:
    """A duplicate of one of libzmq's connections."""

    host: str  # of the peer
    _socket: sockets.socket

    def abort(self) -> None:
        """Make libzmq see the peer leave, and discard what has arrived: libzmq gets no more, the kernel keeps none."""
        with suppress(OSError):
            self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
            self._socket.shutdown(sockets.SHUT_RDWR)
            discarded = bytearray(_DISCARD_CHUNK_BYTES)
            while self._socket.recv_into(discarded, 0, sockets.MSG_DONTWAIT | sockets.MSG_TRUNC):
                pass

    @property
    def bytes_received(self) -> int:
        """Bytes received since the connection was made; 0 if the system does not tell."""
        return _count(self._socket, _BYTES_RECEIVED_AT)

    @property
    def bytes_acknowledged(self) -> int | None:
        """Bytes that the peer's system has acknowledged; None if nothing is outstanding, or the system does not tell.

        A process that is stopped or busy does not matter: its system acknowledges, until it has no more room. What
        this machine's own firewall keeps from leaving is outstanding: it was not sent, although the peer has room.
        """
        info = _info(self._socket)
        if len(info) < _BYTES_RECEIVED_AT or not (_SEGMENTS.unpack_from(info, _UNACKNOWLEDGED_AT)[0] or _is_held(info)):
            return None
        return int(_BYTES.unpack_from(info, _BYTES_ACKNOWLEDGED_AT)[0])


def bytes_received_by(descriptor: int) -> int:
    """Return the bytes that a file descriptor's connection has received; 0 if it has none, or the system does not tell.

    Much cheaper than ``connection_of``, for thousands of connections. It may be anybody's: before anything is done
    about it, ``connection_of`` must say whose it is.
    """
    return _count_by(descriptor, _BYTES_RECEIVED_AT)


def bytes_acknowledged_by(descriptor: int) -> int:
    """Return the bytes that the peer of a file descriptor's connection has acknowledged; else as for those received."""
    return _count_by(descriptor, _BYTES_ACKNOWLEDGED_AT)


def _count_by(descriptor: int, at: int) -> int:
    try:  # of a kind that makes Python neither ask nor set anything
        looked_at = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK, 0, fileno=descriptor)
    except OSError:
        return 0
    try:
        return _count(looked_at, at)
    finally:
        looked_at.detach()  # libzmq closes it


def _count(connection: sockets.socket, at: int) -> int:
    info = _info(connection)
    return int(_BYTES.unpack_from(info, at)[0]) if len(info) >= at + _BYTES.size else 0


def _info(connection: sockets.socket) -> bytes:
    """Return what the system tells of a connection, less or nothing if it does not."""
    try:
        return connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
    except OSError:  # no connection, or a sandbox that has no such call
        return b""


def _is_held(info: bytes) -> bool:
    """Return whether bytes wait here that the peer has room for; False if the system does not tell."""
    if len(info) < _ROOM_AT + _SEGMENTS.size:
        return False
    unsent, largest, room = (_SEGMENTS.unpack_from(info, at)[0] for at in (_UNSENT_AT, _LARGEST_SEGMENT_AT, _ROOM_AT))
    return bool(0 < min(unsent, largest) <= room)


@contextmanager
def connection_of(descriptor: int, *, local_port: int = 0, remote_port: int = 0) -> Iterator[Connection | None]:
    """Yield the connection of a file descriptor, None if it is gone or has another local or remote port.

    libzmq may have closed the descriptor and the OS may have reused its number, so the ports are checked first.
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
        host = _peer_host(found, local_port, remote_port)
        yield Connection(host, found) if host else None


def _peer_host(connection: sockets.socket, local_port: int, remote_port: int) -> str:
    """Return the host that is connected; empty if there is none, or the ports differ."""
    if connection.type != sockets.SOCK_STREAM or connection.family not in (sockets.AF_INET, sockets.AF_INET6):
        return ""
    try:
        here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return ""
    return str(there[0]) if here[1] == (local_port or here[1]) and there[1] == (remote_port or there[1]) else ""
