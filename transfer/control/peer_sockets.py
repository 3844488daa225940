"""The client's sockets: one DEALER per peer address, made on demand.

Opens, connects, evicts and closes sockets, contacts only allowed hosts, and detects handshakes that cannot succeed and
peers that send without end. ``client_loop`` decides what is sent over the sockets, ``look_ups`` finds out where a host
is.
"""

import errno
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from transfer.control.connections import CHECK_INTERVAL_S, FRAMES_READ, UnreadBytes, connection_of, over_limit, receive
from transfer.control.failures import AuthenticationFailed, TooManyPeers
from transfer.control.keys import ControlKeys
from transfer.control.look_ups import HostLookUps, Resolved
from transfer.control.messages import MAX_FRAME_BYTES, MalformedMessage
from transfer.control.polling import SocketMonitor, start_threads
from transfer.errors import TransferError
from transfer.peers import Address, AllowedPeers, no_route, parse_ip

_QUEUED_REQUESTS = 64  # per peer, in libzmq
_SOCKETS_PER_PEER = 3  # its own and the two ends of its monitor
_HEARTBEAT_S = 0.5  # how often a connection is probed, so that it has something to be acknowledged
_STALLED_S = 9.0  # a connection whose probes the peer's process does not answer for this long is made again
_LINGER_S = 0.1  # how long ``close`` lets the last requests leave
#: How long closing the client waits for its thread, which gives look-ups half of that time.
CLOSE_TIMEOUT_S = 5.0
# What all peers may have sent and this client not read: one reply always may. Frames of 2 bytes take 64 of memory.
_UNREAD_BYTES = MAX_FRAME_BYTES + 2**23

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
# A server closes the connection of a client with a different secret without an error, and may do so before its error
# reaches a client without a secret. But so do machines that are starting and servers with too many connections. So a
# mismatch is assumed only after this many handshakes over this long.
_ENDED_HANDSHAKES = 3
_SECRET_MISMATCH_S = 2.0
_ENDED_BY_PEER = (errno.ECONNRESET, errno.EPIPE)  # EAGAIN is our own HANDSHAKE_IVL: the peer sent nothing at all
_KEYS_HINT = "give both engines the same secret (secret_file or PD_CONNECTOR_SECRET)"

#: Of a peer to which there is a route.
_WHY_SILENT = (
    "is its network cut, the port closed, or the setting host there an address that only others reach, as behind NAT?"
)


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for how a client retries requests and keeps its peers. All times are in seconds."""

    retry_s: float = 0.5  # first wait for an answer before a request is resent; the waits double up to retry_cap_s
    retry_cap_s: float = 2.0
    idle_s: float = 300.0  # a peer's socket is closed when it was not used for this long
    max_peers: int = 1024  # sockets at a time, one for each engine: a data-parallel rank is one
    max_silent: int = 128  # of these, of one host without a connection, so that wrong ports leave room for others
    max_resolvers: int = 16  # concurrent look-ups of host names, for which others wait; numeric hosts may need none
    connect_timeout_s: float = 3.0
    #: How long a peer with requests pending may be without a connection, or its system without acknowledging anything.
    #: That of a process that is stopped or busy does both. On a fast network, TCP sends for the last time within it
    #: after 3.2 s, so that a cut of 2 s is survived. The times to the next probe and the next check come on top.
    silent_s: float = 3.75


@dataclass(slots=True, eq=False)
class PeerSocket:
    """One peer address: its socket, once the host is resolved, and its pending requests."""

    address: Address
    used_at: float  # monotonic seconds
    ip: str = ""  # of the host, once it is resolved
    socket: zmq.Socket[bytes] | None = None
    monitor: SocketMonitor | None = None
    descriptor: int = -1  # libzmq's, of the connection; -1 while there is none
    unread: UnreadBytes = field(default_factory=UnreadBytes)  # of that connection
    acknowledged: int | None = None  # bytes, when more were outstanding at the last check
    silent_checks: int = 0  # in a row, without a connection or an acknowledgement
    ended_handshakes: int = 0  # in a row, ended by the peer
    ended_since: float = math.inf  # monotonic seconds: when the first of these ended
    has_connected: bool = False  # a handshake has succeeded, so a later failure does not mean a different secret
    is_another: bool = False  # another engine answers than was asked for: the name may have another address by now
    failure: TransferError | str = ""  # why the peer is given up: an exception to raise, or a reason
    unanswered: set[int] = field(default_factory=set)  # message ids; the peer is kept while there are any
    unsent: deque[int] = field(default_factory=deque)  # those of them that wait for the connection to accept them
    watchers: list[Future[None]] = field(default_factory=list)  # that get a result when the connection ends

    def tell_watchers(self) -> None:
        """Tell who waits for it that the connection has ended."""
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            if watcher.set_running_or_notify_cancel():
                watcher.set_result(None)


class ClientCounters(msgspec.Struct):
    """What the client's thread has done so far. Changed by that thread, read by any."""

    requests: int = 0  # taken from the inbox
    sent: int = 0  # frames handed to a connection, including resends
    answered: int = 0
    malformed_replies: int = 0  # ignored: not a message of this protocol, or of the wrong type for the request
    late_replies: int = 0  # ignored: the request was already answered, cancelled or timed out
    peers_opened: int = 0  # sockets made
    peers_closed: int = 0


class PeerPool:
    """Owns the client's peers and their sockets. Belongs to the client's thread.

    ``report`` is called with the result of each look-up, on another thread; the owner passes it to ``resolved``.
    """

    def __init__(
        self,
        settings: ClientSettings,
        counters: ClientCounters,
        keys: ControlKeys | None,
        allowed: AllowedPeers,
        wakeup_fileno: int,
        report: Callable[[Resolved], object],
    ) -> None:
        self.sweep_at = math.inf  # monotonic seconds: when to call close_idle next
        self.check_at = math.inf  # monotonic seconds: when to call lost next
        self._settings = settings
        self._counters = counters
        self._keys = keys
        self._allowed = allowed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Closed ones count until libzmq has reaped them.
        self._context.set(zmq.MAX_SOCKETS, 2 * _SOCKETS_PER_PEER * settings.max_peers + 8)
        start_threads(self._context)
        self._poller = zmq.Poller()
        self._poller.register(wakeup_fileno, zmq.POLLIN)
        self._peers: dict[Address, PeerSocket] = {}
        self._by_socket: dict[zmq.Socket[bytes], PeerSocket] = {}
        self._look_ups = HostLookUps(settings.max_resolvers, allowed, report)

    def poll(self, timeout_s: float) -> Iterator[tuple[PeerSocket, int]]:
        """Wait for any socket or the wake-up, then yield the ready peers that are still held, with their ZeroMQ events.

        A peer whose handshake has failed for good is yielded without events, with its ``failure`` set.
        """
        timeout_ms = -1 if timeout_s == math.inf else max(0, math.ceil(timeout_s * 1000))
        for socket, events in self._poller.poll(timeout_ms):
            peer = self._by_socket.get(socket) if isinstance(socket, zmq.Socket) else None
            if peer is None:
                continue
            self._take_events(peer)  # first, so that what is read counts for the connection that brought it
            if socket is peer.socket:
                yield peer, events
            elif peer.failure:
                yield peer, 0

    def find(self, address: Address) -> PeerSocket | None:
        """Return the peer at ``address``, None if it is not held."""
        return self._peers.get(address)

    def get(self, address: Address) -> PeerSocket:
        """Return the peer at ``address``, made if it is new. Its socket may be None until ``resolved``.

        Raises:
            TooManyPeers: no other peer can be dropped to make room, or the system has no thread for a look-up.
            PeerNotAllowed: the host may not be contacted.
            zmq.ZMQError: the operating system provides no socket.
        """
        self.check_at = min(self.check_at, time.monotonic() + CHECK_INTERVAL_S)
        peer = self._peers.get(address)
        if peer is not None and _may_have_moved(peer):
            self.drop(peer)
        elif peer is not None:
            return peer
        host = address.host
        look_up = parse_ip(host) is None or self._allowed.needs_lookup(host)
        if not look_up:
            self._allowed.check(host, host)
        self._make_room_at(host)
        self._make_room()
        peer = PeerSocket(address, time.monotonic())
        if look_up:
            self._look_ups.begin(host)
        else:
            self._connect(peer, host)
        self._peers[address] = peer
        self.sweep_at = min(self.sweep_at, peer.used_at + self._settings.idle_s)
        return peer

    def resolved(self, found: Resolved) -> Iterator[PeerSocket]:
        """Connect the peers whose host name was looked up, and yield each; its ``failure`` is set if that failed."""
        for each in (found, *self._look_ups.ended(found.host)):
            unresolved = (peer for peer in self._peers.values() if peer.socket is None)
            for peer in [peer for peer in unresolved if peer.address.host == each.host]:
                peer.failure = each.failure
                if not peer.failure:
                    try:
                        self._connect(peer, each.ip)
                    except zmq.ZMQError as error:
                        peer.failure = f"no socket: {error}"
                yield peer

    @property
    def unanswered(self) -> set[int]:
        """Ids of the messages that no peer has answered yet."""
        return {message_id for peer in self._peers.values() for message_id in peer.unanswered}

    def watch(self, peer: PeerSocket, *, writable: bool) -> None:
        """Poll the peer's socket for replies and, if ``writable``, also for room to send."""
        if peer.socket is not None:
            self._poller.register(peer.socket, zmq.POLLIN | zmq.POLLOUT if writable else zmq.POLLIN)

    def add_watcher(self, address: Address, watcher: Future[None]) -> None:
        """Give ``watcher`` a result when the connection to ``address`` ends, or now if there is none."""
        peer = self._peers.get(address) or PeerSocket(address, 0.0)
        peer.watchers = [each for each in peer.watchers if not each.done()] + [watcher]
        if peer.descriptor < 0:
            peer.tell_watchers()

    def drop(self, peer: PeerSocket, linger_s: float = 0.0) -> None:
        """Forget the peer and close its socket; sent messages have ``linger_s`` seconds to leave."""
        del self._peers[peer.address]
        if peer.socket is None and all(other.address.host != peer.address.host for other in self._peers.values()):
            self._look_ups.withdraw(peer.address.host)
        peer.tell_watchers()
        if peer.monitor is not None:
            self._poller.unregister(peer.monitor.socket)
            del self._by_socket[peer.monitor.socket]
            peer.monitor.close()
        if peer.socket is not None:
            self._poller.unregister(peer.socket)
            del self._by_socket[peer.socket]
            peer.socket.close(linger=int(linger_s * 1000))
            self._counters.peers_closed += 1

    def receive(self, peer: PeerSocket) -> bytes | None:
        """Return the next message of a peer, None if there is none or the message is endless: then sets ``failure``.

        Raises:
            MalformedMessage: the message has several frames.
        """
        assert peer.socket is not None
        try:
            frames = receive(peer.socket)
        except zmq.Again:
            return None
        peer.unread.add_read(frames)
        if frames[-1].more:
            peer.failure = f"it sent a message of {FRAMES_READ} or more frames; a message is one frame"
            return None
        if len(frames) > 1:
            raise MalformedMessage(f"{len(frames)} frames; a message is one frame")
        return frames[0].bytes

    def lost(self) -> Iterator[PeerSocket]:
        """Yield peers that send too many bytes that are not read, or cannot be reached, with their ``failure`` set.

        Cheap if called too early.
        """
        now = time.monotonic()
        if now < self.check_at:
            return
        peers = list(self._peers.values())
        self.check_at = (
            now + CHECK_INTERVAL_S if any(peer.descriptor >= 0 or _waits(peer) for peer in peers) else math.inf
        )
        unread: dict[Address, int] = {}
        for peer in peers:
            is_silent, unread[peer.address] = _look_at(peer)
            peer.silent_checks = peer.silent_checks + 1 if is_silent and _waits(peer) else 0
            # Not by a clock: this process may have been stopped.
            if peer.silent_checks * CHECK_INTERVAL_S >= self._settings.silent_s:
                what = "its system acknowledges nothing" if peer.descriptor >= 0 else "there is no connection"
                why = no_route(peer.ip) or _WHY_SILENT
                peer.failure = f"{what}, for {self._settings.silent_s:g} s: {why}"
                del unread[peer.address]
                yield peer
        for address, held in over_limit(unread, _UNREAD_BYTES):
            failure = f"it sent {held} bytes without a complete reply, or faster than they are read"
            self._peers[address].failure = failure
            yield self._peers[address]

    def close_idle(self) -> None:
        """Drop the peers that were not used for ``idle_s``, and that nobody watches. Cheap if called too early."""
        now = time.monotonic()
        if now < self.sweep_at:
            return
        for peer in list(self._peers.values()):
            is_watched = not all(watcher.done() for watcher in peer.watchers)
            if not (peer.unanswered or is_watched) and now - peer.used_at >= self._settings.idle_s:
                self.drop(peer)
        self.sweep_at = now + self._settings.idle_s / 2 if self._peers else math.inf

    def check_integrity(self) -> None:
        """Raise AssertionError unless every polled socket belongs to one peer that is held."""
        sockets = {each for peer in self._peers.values() if peer.monitor for each in (peer.socket, peer.monitor.socket)}
        assert sockets == self._by_socket.keys(), "a socket is polled for no peer, or a peer's is not polled"
        is_open = self._counters.peers_opened - self._counters.peers_closed
        assert is_open == len(sockets) // 2, "the socket counters are wrong"

    def close(self) -> None:
        """Drop every peer, terminate the ZeroMQ context, and wait for running look-ups."""
        for peer in list(self._peers.values()):
            self.drop(peer, _LINGER_S)
        self._context.term()
        self._look_ups.close(CLOSE_TIMEOUT_S / 2)

    def _make_room_at(self, host: str) -> None:
        silent = [peer for peer in self._peers.values() if peer.address.host == host and peer.descriptor < 0]
        if len(silent) < self._settings.max_silent:
            return
        unused = [peer for peer in silent if not peer.unanswered]
        if not unused:
            raise TooManyPeers(
                f"requests wait for {len(silent)} addresses of {host} to which there is no connection, which is the "
                "maximum: find out who names these ports, or why these engines do not run"
            )
        self.drop(min(unused, key=lambda peer: peer.used_at))

    def _make_room(self) -> None:
        if len(self._peers) < self._settings.max_peers:
            return
        unused = [peer for peer in self._peers.values() if not peer.unanswered]
        if not unused:
            raise TooManyPeers(
                f"requests wait for {len(self._peers)} engines, which is the maximum at a time: find out why these do "
                "not answer"
            )
        self.drop(min(unused, key=lambda peer: peer.used_at))

    def _connect(self, peer: PeerSocket, ip: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            self._set_options(socket)
            socket.setsockopt(zmq.IPV6, ":" in ip)
            monitor = SocketMonitor(self._context, socket, str(self._counters.peers_opened), _EVENTS)
            socket.connect(Address(ip, peer.address.port).endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        peer.ip, peer.socket, peer.monitor = ip, socket, monitor
        for each in (socket, monitor.socket):
            self._by_socket[each] = peer
            self._poller.register(each, zmq.POLLIN)
        self._counters.peers_opened += 1

    def _take_events(self, peer: PeerSocket) -> None:
        """Process the monitor's events. Sets the peer's ``failure`` if its handshakes cannot succeed."""
        assert peer.monitor is not None
        for event, value in peer.monitor.take():
            if event == zmq.EVENT_CONNECTED:
                peer.descriptor, peer.unread = value, UnreadBytes(self._keys is not None)
                self.check_at = min(self.check_at, time.monotonic() + CHECK_INTERVAL_S)
            elif event == zmq.EVENT_DISCONNECTED:
                peer.descriptor = -1
                peer.tell_watchers()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.ended_handshakes, peer.ended_since, peer.has_connected = 0, math.inf, True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                if value in _ENDED_BY_PEER:
                    self._handshake_ended(peer)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value != _MECHANISM_MISMATCH:
                # libzmq does not retry after this.
                peer.failure = f"what listens there does not speak ZeroMQ's protocol as an engine does ({value:#x})"
            else:
                peer.failure = AuthenticationFailed(
                    f"authentication with {peer.address} failed: {self._secret_mismatch(event)}: {_KEYS_HINT}"
                )

    def _handshake_ended(self, peer: PeerSocket) -> None:
        """Count a handshake that the peer has ended without an error. Sets ``failure`` if the secrets must differ."""
        now = time.monotonic()
        peer.ended_handshakes += 1
        peer.ended_since = min(peer.ended_since, now)
        ended_s = now - peer.ended_since
        if peer.has_connected or peer.ended_handshakes < _ENDED_HANDSHAKES or ended_s <= _SECRET_MISMATCH_S:
            return
        if self._keys is None:
            why = "that engine has a secret and this one has none"
        else:
            why = "the secrets of the two engines differ or that one has none"
        peer.failure = AuthenticationFailed(
            f"authentication with {peer.address} failed: it ended the handshake {peer.ended_handshakes} times in "
            f"{ended_s:.1f} s, because it has too many connections (its log then says that it refused some) or, more "
            f"likely, because {why}: {_KEYS_HINT}. If its log says nothing, something else may be listening there"
        )

    def _secret_mismatch(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the secrets of the two engines differ"
        if self._keys is None:
            return "that engine has a secret and this one has none"
        return "this engine has a secret and that one has none"

    def _set_options(self, socket: zmq.Socket[bytes]) -> None:
        if self._keys is not None:
            self._keys.secure_client(socket)
        connect_timeout_ms = int(self._settings.connect_timeout_s * 1000)
        for option, value in {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: _QUEUED_REQUESTS,
            # No limit, as the server's: libzmq may abort the process. ``lost`` ends who sends more than is read.
            zmq.RCVHWM: 0,
            # Frames are queued only after a finished handshake: none pile up for a peer that is down, and POLLOUT
            # tells when it is up.
            zmq.IMMEDIATE: 1,
            zmq.CONNECT_TIMEOUT: connect_timeout_ms,
            zmq.HANDSHAKE_IVL: connect_timeout_ms,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.HEARTBEAT_IVL: int(_HEARTBEAT_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(_STALLED_S * 1000),
            zmq.HEARTBEAT_TTL: int(_STALLED_S * 1333),  # after this much silence the peer drops it
        }.items():
            socket.setsockopt(option, value)


def _waits(peer: PeerSocket) -> bool:
    """Return whether requests wait for a peer whose host is known."""
    return bool(peer.unanswered) and peer.socket is not None


def _may_have_moved(peer: PeerSocket) -> bool:
    """Return whether a peer's connection is lost or another engine's, and its name may have another address by now.

    It is not another engine's if somebody watches it, who reads from the engine that is there.
    """
    is_another = peer.is_another and all(watcher.done() for watcher in peer.watchers)
    is_lost = peer.socket is not None and (peer.descriptor < 0 or is_another)
    return is_lost and not peer.unanswered and parse_ip(peer.address.host) is None


def _look_at(peer: PeerSocket) -> tuple[bool, int]:
    """Return whether a peer is silent, and how many bytes it has sent that were not read as complete messages.

    It is silent without a connection, or if it has acknowledged nothing since the last check though it should.
    """
    if peer.descriptor < 0:
        return True, 0
    with connection_of(peer.descriptor, remote_port=peer.address.port) as connection:
        if connection is None:
            return False, 0
        before, peer.acknowledged = peer.acknowledged, connection.bytes_acknowledged
        is_silent = peer.acknowledged is not None and peer.acknowledged == before
        return is_silent, peer.unread.update(connection.bytes_received)
