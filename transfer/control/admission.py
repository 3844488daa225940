"""Decides who may be connected to a control server: counts connections, aborts those above limits, admits clients.

libzmq accepts every connection. Its events carry the file descriptor of each, through which this module aborts those
that libzmq would keep.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from transfer.control.connections import (
    CHECK_INTERVAL_S,
    Connection,
    UnreadBytes,
    bytes_acknowledged_by,
    bytes_received_by,
    connection_of,
    over_limit,
)
from transfer.control.keys import ControlKeys
from transfer.control.limits import ServerLimits, ThrottledWarnings
from transfer.control.polling import SocketMonitor

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks, see ZeroMQ's RFC 27
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_SECRET_MISMATCH = (zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, zmq.PROTOCOL_ERROR_ZMTP_KEY_EXCHANGE)


class AdmissionCounters(msgspec.Struct):
    """Connections since the start, and now. Changed by the server's thread, read by any."""

    connections: int = 0  # open now
    connections_refused: int = 0  # above the limit
    connections_cut: int = 0  # for a message of too many frames, or too many bytes that we have not read
    authentication_failures: int = 0  # the secrets differ, or only one side has one
    #: Other failed handshakes: not ZeroMQ, too slow, or left early, as do clients that notice a different secret first.
    handshake_failures: int = 0


_SECOND_LOOK_S = 0.05
#: What a connection may be sent and not take before further replies are dropped, so that one of any size may always be.
UNREAD_REPLY_BYTES = 4 * 2**20


@dataclass(slots=True)
class _Connection:
    host: str  # empty if it was gone before we looked
    unread: UnreadBytes
    sent: int = 0  # bytes of replies, those of waiting requests aside
    acknowledged: int = 0  # bytes of anything, when we last looked
    is_cut: bool = False  # but libzmq has not noticed yet


class Admission:
    """Owns the record of a server socket's connections. Once made, belongs to the server's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        keys: ControlKeys | None,
        limits: ServerLimits,
        counters: AdmissionCounters,
        warnings: ThrottledWarnings,
    ) -> None:
        """Watch ``socket``, which is not bound yet."""
        self.port = 0  # set it once the socket is bound
        self.counters = counters
        self._keys = keys
        self._limits = limits
        self._warnings = warnings
        self._connections: dict[int, _Connection] = {}  # by libzmq's descriptor
        self._failure: str | None = None  # of the handshake of the connection that the next event is about
        self._check_at = 0.0
        self._over_limit: set[int] = set()  # descriptors, at the last look
        self._zap: zmq.Socket[bytes] | None = None
        if keys is not None:
            self._zap = context.socket(zmq.ROUTER)  # a REP would be stuck for ever after a reply lost to a bug
            self._zap.bind(_ZAP_ENDPOINT)
            keys.secure_server(socket)
        self._monitor = SocketMonitor(context, socket, "connections", _EVENTS)

    def register(self, poller: zmq.Poller) -> None:
        """Make ``poller`` wake up when ``serve`` has something to do."""
        poller.register(self._monitor.socket, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)

    @property
    def timeout_ms(self) -> int | None:
        """How long a poll may take; None, without limit, if nobody is connected."""
        interval_s = _SECOND_LOOK_S if self._over_limit else CHECK_INTERVAL_S
        return int(interval_s * 1000) if self._connections else None

    def serve(self) -> None:
        """Do what is due: admit clients, count connections, abort those above their number."""
        for event, value in self._monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected(value)
            else:
                self._failure = self._authentication_failure(event, value)
        self._answer_zap()

    def cut_floods(self) -> None:
        """Abort, if a look is due, who sends faster than is read. Call this when what had arrived has been read.

        Otherwise it would be the fault of peers that this process was busy while they all sent something. libzmq's
        thread may have been, too: who sends too much is looked at again soon, and aborted if that has not changed.
        """
        now = time.monotonic()
        if now >= self._check_at:
            self._cut_over_unread_limit()
            self._check_at = now + (_SECOND_LOOK_S if self._over_limit else CHECK_INTERVAL_S)

    def message_received(self, frames: Sequence[zmq.Frame]) -> None:
        """Record that a message of these frames has been read."""
        connection = self._connections.get(_descriptor(frames[0]))
        if connection is not None:
            connection.unread.add_read(frames)

    def takes_reply(self, frame: zmq.Frame) -> bool:
        """Return whether the sender of ``frame`` reads its replies, so that it may be sent one more."""
        connection = self._connections.get(descriptor := _descriptor(frame))
        if connection is None or connection.sent - connection.acknowledged <= UNREAD_REPLY_BYTES:
            return True
        connection.acknowledged = bytes_acknowledged_by(descriptor)
        connection.sent = max(connection.sent, connection.acknowledged)
        # 0: the system does not tell
        return not 0 < connection.acknowledged < connection.sent - UNREAD_REPLY_BYTES

    def reply_sent(self, frame: zmq.Frame, size: int) -> None:
        """Record that the sender of ``frame`` is sent a reply. Not of one that was dropped: it is never acknowledged.

        The sender may have left, and its number be that of another connection.
        """
        connection = self._connections.get(_descriptor(frame))
        if connection is not None:
            connection.sent += size

    def cut_sender(self, frame: zmq.Frame, reason: str) -> None:
        """Cut the connection that sent ``frame``, a part of a message that no well-behaved client sends."""
        descriptor = _descriptor(frame)
        if descriptor in self._connections:
            self._cut(descriptor, reason)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the count agrees with the known connections."""
        assert self.counters.connections == len(self._connections), "the counter of connections is wrong"

    def unwatch(self) -> None:
        """Stop monitoring. Call this before the watched socket is closed."""
        self._monitor.close()

    def close(self) -> None:
        """Stop admitting clients. Call this after the watched socket is closed."""
        if self._zap is not None:
            self._zap.close(linger=0)

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        host = ""
        with connection_of(descriptor, local_port=self.port) as connection:
            if connection is not None:
                host = connection.host
                self._refuse_above_limit(connection)
        self._connections[descriptor] = _Connection(host, UnreadBytes(self._keys is not None))
        self.counters.connections = len(self._connections)

    def _refuse_above_limit(self, connection: Connection) -> None:
        if len(self._connections) < self._limits.max_connections:
            return
        connection.abort()
        self.counters.connections_refused += 1
        reason = f"there are already {self._limits.max_connections}, the maximum"
        self._warnings.warn("connections", f"refused a control connection from {connection.host}: {reason}")

    def _disconnected(self, descriptor: int) -> None:
        host = self._forget(descriptor) or "an unknown address"
        failure, self._failure = self._failure, None
        if failure:
            self.counters.authentication_failures += 1
            text = f"authentication of a control connection from {host} failed: {failure}"
            self._warnings.warn("authentication", text)
        elif failure is not None:
            self.counters.handshake_failures += 1
            text = (
                f"a connection from {host} to the control channel ended in its handshake: who opened it looks whether "
                "the port is open (health checks: ask vLLM's /health), speaks another protocol, has another secret, or "
                "is too slow"
            )
            self._warnings.warn("handshake", text)

    def _forget(self, descriptor: int) -> str:
        """Remove a connection from the record and return its host."""
        self._over_limit.discard(descriptor)
        gone = self._connections.pop(descriptor, None)
        if gone is None:
            return ""
        self.counters.connections = len(self._connections)
        return gone.host

    def _authentication_failure(self, event: int, value: int) -> str:
        """Return how the secrets made a handshake fail; empty if it failed for another reason, as far as we know."""
        is_protocol = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or (is_protocol and value in _SECRET_MISMATCH):
            return "its secret differs from this engine's"
        if is_protocol and value == _MECHANISM_MISMATCH:
            return "it has a secret and this engine has none" if self._keys is None else "it has no secret"
        return ""

    def _answer_zap(self) -> None:
        if self._zap is None or self._keys is None:
            return
        with suppress(zmq.Again):
            while True:
                sender, _, _, request_id, _, _, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
                admitted = mechanism == b"CURVE" and len(credentials) == 1 and self._keys.admits(credentials[0])
                status = (b"200", b"OK", b"peer", b"") if admitted else (b"400", b"unknown key", b"", b"")
                self._zap.send_multipart([sender, b"", b"1.0", request_id, *status])

    def _cut_over_unread_limit(self) -> None:
        """Cut the connections that have sent too many bytes that were not read as complete messages."""
        unread = {each: known.unread.update(bytes_received_by(each)) for each, known in self._connections.items()}
        over = dict(over_limit(unread, self._limits.unread_bytes))
        for descriptor in over.keys() & self._over_limit:
            held = over.pop(descriptor)
            self._cut(descriptor, f"it sent {held} bytes without a complete message, or faster than they are read")
        self._over_limit = set(over)

    def _cut(self, descriptor: int, reason: str) -> None:
        known = self._connections[descriptor]
        with connection_of(descriptor, local_port=self.port) as connection:
            if connection is None:  # it is gone, and its number may be another's
                return
            connection.abort()
        if not known.is_cut:
            known.is_cut = True
            self.counters.connections_cut += 1
            self._warnings.warn("cut", f"closed the control connection from {known.host}: {reason}")


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1
