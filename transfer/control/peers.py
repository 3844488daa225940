"""The client's sockets: one DEALER per peer address, made on demand, and the look-up of host names.

Opens, connects, closes and evicts. What is said over the sockets is ``client_loop``'s business.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from transfer.control.address import Address, numeric, resolve
from transfer.control.errors import TooManyPeers
from transfer.control.messages import MAX_FRAME_BYTES

_QUEUED_FRAMES = 64  # per peer and direction, in libzmq


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How peers are held. See ``ControlClient`` for the meaning of each."""

    idle_s: float
    max_peers: int
    max_resolvers: int
    heartbeat_s: float
    connect_timeout_s: float


@dataclass(slots=True, eq=False)
class Peer:
    """One address: its socket, once the host is numeric, and what was asked of it."""

    address: Address
    used_at: float  # monotonic seconds
    socket: zmq.Socket[bytes] | None = None
    asked: set[int] = field(default_factory=set)  # message ids that were not answered; while any, the peer is kept
    unsent: deque[int] = field(default_factory=deque)  # of those, the ones that wait for the connection to take them


class Resolved(msgspec.Struct, frozen=True):
    """The look-up of a host name has ended: with an IP address, or with why not."""

    host: str
    ip: str
    failure: str = ""


class PeerPool:
    """Every peer that the client holds. Belongs to the client's thread.

    ``report`` is called on a look-up's own thread when that has ended; the owner passes what it gets to ``resolved``.
    """

    def __init__(self, settings: PeerSettings, wakeup_fileno: int, report: Callable[[Resolved], object]) -> None:
        self.opened = 0  # sockets made
        self.closed = 0
        self.sweep_at = math.inf  # monotonic seconds: when to call close_idle next
        self._settings = settings
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * settings.max_peers + 8)  # closed ones count until libzmq has reaped them
        self._poller = zmq.Poller()
        self._poller.register(wakeup_fileno, zmq.POLLIN)
        self._peers: dict[Address, Peer] = {}
        self._by_socket: dict[zmq.Socket[bytes], Peer] = {}
        self._resolvers: dict[str, threading.Thread] = {}  # by host name

    def poll(self, timeout_s: float) -> Iterator[tuple[Peer, int]]:
        """Wait for any socket or the wake-up; yields the peers that are still held, with their ZeroMQ events."""
        timeout_ms = -1 if timeout_s == math.inf else max(0, math.ceil(timeout_s * 1000))
        for socket, events in self._poller.poll(timeout_ms):
            peer = self._by_socket.get(socket) if isinstance(socket, zmq.Socket) else None
            if peer is not None:
                yield peer, events

    def find(self, address: Address) -> Peer | None:
        """The peer at ``address`` if it is held."""
        return self._peers.get(address)

    def get(self, address: Address) -> Peer:
        """The peer at ``address``, made if it is new. Its socket may be None until ``resolved``.

        Raises:
            TooManyPeers: no peer can be dropped for it, or too many names are being looked up.
            zmq.ZMQError: the operating system gives no socket.
        """
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        self._make_room()
        peer = Peer(address, time.monotonic())
        if numeric(address.host) is not None:
            self._connect(peer, address.host)
        else:
            self._look_up(address.host)
        self._peers[address] = peer
        self.sweep_at = min(self.sweep_at, peer.used_at + self._settings.idle_s)
        return peer

    def resolved(self, found: Resolved) -> Iterator[tuple[Peer, str]]:
        """Connect the peers whose host name was looked up; yields each with "" or why it cannot be reached."""
        self._resolvers.pop(found.host).join()
        for peer in [peer for peer in self._peers.values() if peer.address.host == found.host and peer.socket is None]:
            failure = found.failure
            if not failure:
                try:
                    self._connect(peer, found.ip)
                except zmq.ZMQError as error:
                    failure = f"no socket: {error}"
            yield peer, failure

    def watch(self, peer: Peer, *, writable: bool) -> None:
        """Poll the peer's socket for replies and, if ``writable``, for room to send."""
        if peer.socket is not None:
            self._poller.register(peer.socket, zmq.POLLIN | zmq.POLLOUT if writable else zmq.POLLIN)

    def drop(self, peer: Peer, linger_s: float = 0.0) -> None:
        """Forget the peer and close its socket; what was sent has ``linger_s`` seconds to leave."""
        del self._peers[peer.address]
        if peer.socket is not None:
            self._poller.unregister(peer.socket)
            del self._by_socket[peer.socket]
            peer.socket.close(linger=int(linger_s * 1000))
            self.closed += 1

    def close_idle(self) -> None:
        """Drop the peers that were not used for ``idle_s``; cheap when called too early."""
        now = time.monotonic()
        if now < self.sweep_at:
            return
        for peer in list(self._peers.values()):
            if not peer.asked and now - peer.used_at >= self._settings.idle_s:
                self.drop(peer)
        self.sweep_at = now + self._settings.idle_s / 2 if self._peers else math.inf

    def close(self, linger_s: float, resolvers_s: float) -> None:
        """Drop every peer, end the ZeroMQ context, and wait up to ``resolvers_s`` for look-ups that still run."""
        for peer in list(self._peers.values()):
            self.drop(peer, linger_s)
        self._context.term()
        until = time.monotonic() + resolvers_s
        for thread in self._resolvers.values():
            thread.join(max(0.0, until - time.monotonic()))

    def _make_room(self) -> None:
        if len(self._peers) < self._settings.max_peers:
            return
        unused = [peer for peer in self._peers.values() if not peer.asked]
        if not unused:
            raise TooManyPeers(
                f"all {len(self._peers)} control peers that may be held are being asked: find out why they do not "
                f"answer, or raise max_peers={self._settings.max_peers}"
            )
        self.drop(min(unused, key=lambda peer: peer.used_at))

    def _connect(self, peer: Peer, ip: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            self._set_options(socket)
            socket.setsockopt(zmq.IPV6, ":" in ip)
            socket.connect(Address(ip, peer.address.port).endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        peer.socket = socket
        self._by_socket[socket] = peer
        self._poller.register(socket, zmq.POLLIN)
        self.opened += 1

    def _set_options(self, socket: zmq.Socket[bytes]) -> None:
        heartbeat_ms = int(self._settings.heartbeat_s * 1000)
        connect_timeout_ms = int(self._settings.connect_timeout_s * 1000)
        for option, value in {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: _QUEUED_FRAMES,
            zmq.RCVHWM: _QUEUED_FRAMES,
            # Only a finished handshake takes a frame: nothing piles up for a peer that is not there, and POLLOUT
            # tells when it has come.
            zmq.IMMEDIATE: 1,
            zmq.CONNECT_TIMEOUT: connect_timeout_ms,
            zmq.HANDSHAKE_IVL: connect_timeout_ms,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.HEARTBEAT_IVL: heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: 3 * heartbeat_ms,
            zmq.HEARTBEAT_TTL: 4 * heartbeat_ms,  # of silence, then the peer forgets this connection
        }.items():
            socket.setsockopt(option, value)

    def _look_up(self, host: str) -> None:
        # libzmq would look names up on the thread that serves all sockets: a slow name server would stop every peer.
        if host in self._resolvers:
            return
        if len(self._resolvers) >= self._settings.max_resolvers:
            raise TooManyPeers(
                f"{len(self._resolvers)} host names are being looked up already: announce control hosts as IP "
                f"addresses, or raise max_resolvers={self._settings.max_resolvers}"
            )
        thread = threading.Thread(
            target=_look_up, args=(host, self._report), name=f"pd-control-look-up-{host}", daemon=True
        )
        self._resolvers[host] = thread
        thread.start()


def _look_up(host: str, report: Callable[[Resolved], object]) -> None:
    try:
        report(Resolved(host, resolve(host)))
    except OSError as error:
        report(Resolved(host, "", f"the host name could not be looked up: {error}"))
