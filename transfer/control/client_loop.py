"""The client's thread: sends requests, resends them, matches replies, and gives up on time-out.

``ClientLoop`` owns the pending requests and timers, ``peer_sockets`` the sockets. Other threads talk to the loop only
through its inbox.
"""

import heapq
import logging
import math
import random
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from transfer.control.failures import ClientClosed, PeerRefused, PeerUnreachable, TooManyPeers
from transfer.control.keys import ControlKeys
from transfer.control.limits import ThrottledWarnings
from transfer.control.look_ups import Resolved
from transfer.control.messages import (
    REPLY_NAMES,
    Error,
    ErrorCode,
    Find,
    Follow,
    Hello,
    Locate,
    MalformedMessage,
    Reply,
    RequestFor,
    decode_reply,
    message_id_of,
)
from transfer.control.peer_sockets import ClientCounters, ClientSettings, PeerPool, PeerSocket
from transfer.control.polling import Wakeup
from transfer.errors import PeerNotAllowed, TransferError
from transfer.peers import Address, AllowedPeers

logger = logging.getLogger(__name__)

_REPLIES_PER_TURN = 64  # of one peer, before the other peers get their turn
#: Replies with checksums (``MAX_SUMS``) and those about leases are smaller. Tables of block ids may not be: a model
#: with 65 cache groups exceeds it with 600,000 tokens.
_LARGE_BYTES = 4 * 2**20
_MAY_BE_LARGE = (Hello, Follow, Locate, Find)
#: Of what a peer says in an error.
_REASON_CHARACTERS = 512
#: A timer that is later: this process was stopped, or had no processor.
_STOPPED_S = 1.0
_LOG_INTERVAL_S = 60.0  # at most one warning per cause in this time


@dataclass(slots=True, eq=False)
class Pending:
    """A request that is not answered yet. Belongs to the loop's thread once it is in the inbox."""

    message_id: int
    address: Address
    request: RequestFor[Any]
    frame: bytes
    future: Future[Any]
    started: float  # monotonic seconds, like all times here
    deadline: float
    attempts: int = 0
    resend_at: float = math.inf  # infinite while it waits to be sent
    not_ready: str = ""  # the peer's text, if its latest answer was NOT_READY

    @property
    def kind(self) -> str:
        """The message type on the wire."""
        return str(self.request.__struct_config__.tag)

    def closed(self) -> ClientClosed:
        """Return the exception for a client that was closed."""
        return ClientClosed(f"the control client was closed before {self.address} answered {self.kind!r}")

    def unreachable(self, reason: str = "") -> PeerUnreachable:
        """Return the exception for a request without an answer."""
        host, port, tried_s = self.address.host, self.address.port, time.monotonic() - self.started
        return PeerUnreachable(
            host=host, port=port, request_type=self.kind, tried_s=tried_s, attempts=self.attempts, reason=reason
        )


class Abandoned(msgspec.Struct, frozen=True):
    """The caller has cancelled the future of this request."""

    message_id: int


class Watched(msgspec.Struct, frozen=True):
    """Somebody wants to know when the connection to a peer ends."""

    address: Address
    watcher: Future[None]


Item = Pending | Abandoned | Resolved | Watched


class Inbox:
    """Holds what other threads pass to the loop. The lock is held for an append, never during I/O."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the inbox accepts nothing more."""
        return self._closed

    def put(self, item: Item) -> bool:
        """Add ``item`` and wake the loop. After ``close``, add nothing and return False."""
        with self._lock:
            if self._closed:
                return False
            self._items.append(item)
        self.wakeup.set()
        return True

    def take(self) -> Item | None:
        """Remove and return the oldest item, None if there is none."""
        with self._lock:
            return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Accept nothing more and wake the loop. Idempotent."""
        with self._lock:
            self._closed = True
        self.wakeup.set()


class ClientLoop:
    """Owns the pending requests: sends, receives, resends and gives up. Runs on the client's thread."""

    def __init__(self, inbox: Inbox, settings: ClientSettings, keys: ControlKeys | None, allowed: AllowedPeers) -> None:
        self.counters = ClientCounters()
        self._settings = settings
        self._inbox = inbox
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)
        self._peers = PeerPool(settings, self.counters, keys, allowed, inbox.wakeup.fileno(), inbox.put)
        self._pending: dict[int, Pending] = {}
        self._timers: list[tuple[float, int]] = []  # heap of (when, message id); stale entries are skipped
        self._random = random.Random()  # noqa: S311  only spreads the load; the process's own may have been seeded

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. For the loop's thread, or after it has ended."""
        assert self._peers.unanswered == self._pending.keys(), "the peers' unanswered requests are not the pending ones"
        timed = {message_id for _, message_id in self._timers}
        assert timed >= self._pending.keys(), "a request has no timer"
        self._peers.check_integrity()

    def run(self) -> None:
        """Run until the inbox is closed."""
        try:
            while not self._inbox.closed:
                next_at = min(self._peers.sweep_at, self._peers.check_at, *(when for when, _ in self._timers[:1]))
                for peer, events in self._peers.poll(next_at - time.monotonic()):
                    if events & zmq.POLLIN:
                        self._receive(peer)
                    if events & zmq.POLLOUT:
                        self._send_waiting(peer)
                    if peer.failure:
                        self._give_up_peer(peer, peer.failure)
                self._inbox.wakeup.clear()
                while (item := self._inbox.take()) is not None:
                    self._take(item)
                self._fire_timers()
                for peer in self._peers.lost():
                    self._give_up_peer(peer, peer.failure)
                self._peers.close_idle()
        except Exception:
            logger.exception("the control client failed and is closed; every request fails from now on")
        finally:
            self._end()

    def _take(self, item: Item) -> None:
        match item:
            case Pending():
                self._begin(item)
            case Abandoned(message_id):
                abandoned = self._pending.get(message_id)
                if abandoned is not None:
                    self._settle(abandoned, None)
            case Watched(address, watcher):
                self._peers.add_watcher(address, watcher)
            case Resolved():
                for peer in self._peers.resolved(item):
                    if peer.failure:
                        self._give_up_peer(peer, peer.failure)
                    else:
                        self._send_waiting(peer)

    def _begin(self, pending: Pending) -> None:
        self.counters.requests += 1
        self._pending[pending.message_id] = pending
        try:
            peer = self._peers.get(pending.address)
        except (PeerNotAllowed, TooManyPeers) as error:
            self._settle(pending, error)
        except zmq.ZMQError as error:
            self._settle(pending, pending.unreachable(f"no socket: {error}"))
        else:
            peer.unanswered.add(pending.message_id)
            peer.unsent.append(pending.message_id)
            heapq.heappush(self._timers, (pending.deadline, pending.message_id))
            self._send_waiting(peer)

    def _settle(self, pending: Pending, outcome: Reply | TransferError | None) -> None:
        """Forget a request and pass the outcome to its future; None if the caller has cancelled it."""
        self._pending.pop(pending.message_id, None)
        peer = self._peers.find(pending.address)
        if peer is not None:
            peer.unanswered.discard(pending.message_id)
            peer.used_at = time.monotonic()
        if not pending.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, TransferError):
            pending.future.set_exception(outcome)
        elif outcome is not None:
            pending.future.set_result(outcome)

    def _fire_timers(self) -> None:
        now = time.monotonic()
        if self._timers and (late_s := now - self._timers[0][0]) > _STOPPED_S:
            self._postpone(late_s)
        while self._timers and self._timers[0][0] <= now:
            _, message_id = heapq.heappop(self._timers)
            pending = self._pending.get(message_id)
            if pending is None:
                continue
            if pending.deadline <= now:
                self._give_up(pending)
            elif pending.resend_at <= now:
                pending.resend_at = math.inf
                peer = self._peers.get(pending.address)
                peer.unsent.append(message_id)
                self._send_waiting(peer)

    def _postpone(self, seconds: float) -> None:
        """Do not count the time in which this process did not run: answers may have come that nobody has read yet."""
        self._timers = [(when + seconds, message_id) for when, message_id in self._timers]  # is a heap as before
        for pending in self._pending.values():
            pending.deadline += seconds
            pending.resend_at += seconds

    def _give_up(self, pending: Pending) -> None:
        if pending.not_ready:
            self._refuse(pending, ErrorCode.NOT_READY, pending.not_ready)
            return
        peer = self._peers.find(pending.address)
        reason = ""
        if peer is not None and peer.socket is None:
            reason = "its host name, or those of allowed_peers, are still being looked up: check DNS"
        elif peer is not None and peer.ended_handshakes and not pending.attempts:
            reason = (
                f"it ended the connection {peer.ended_handshakes} times before it was established: it is not an "
                "engine, has a different secret or none, or refuses connections because it has too many"
            )
        elif peer is not None and pending.attempts and peer.descriptor >= 0 and not peer.has_connected:
            # What begins in no way that it knows, libzmq takes for an engine of ZeroMQ's first version.
            reason = "what listens there takes connections and does not speak ZeroMQ's protocol: it is not an engine"
        self._settle(pending, pending.unreachable(reason))
        if peer is not None and not peer.unanswered:
            self._peers.drop(peer)  # so that the next request makes a new connection, with a new look-up

    def _give_up_peer(self, peer: PeerSocket, failure: TransferError | str) -> None:
        for message_id in list(peer.unanswered):
            pending = self._pending[message_id]
            # Each future gets its own exception, because exceptions keep tracebacks.
            own = type(failure)(str(failure)) if isinstance(failure, TransferError) else pending.unreachable(failure)
            self._settle(pending, own)
        self._peers.drop(peer)

    def _refuse(self, pending: Pending, code: str, reason: str) -> None:
        host, port, said = pending.address.host, pending.address.port, reason[:_REASON_CHARACTERS]
        self._settle(pending, PeerRefused(host=host, port=port, request_type=pending.kind, code=code, reason=said))

    def _send_waiting(self, peer: PeerSocket) -> None:
        """Send what the connection accepts; a poll tells when it accepts more."""
        if peer.socket is None:
            return
        while peer.unsent:
            pending = self._pending.get(peer.unsent[0])
            if pending is not None:
                try:
                    peer.socket.send(pending.frame, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._sent(pending)
            peer.unsent.popleft()
        self._peers.watch(peer, writable=bool(peer.unsent))

    def _sent(self, pending: Pending) -> None:
        self.counters.sent += 1
        wait_s = min(self._settings.retry_cap_s, self._settings.retry_s * 2 ** min(pending.attempts, 30))
        pending.attempts += 1
        pending.resend_at = time.monotonic() + wait_s * self._random.uniform(0.9, 1.1)
        heapq.heappush(self._timers, (pending.resend_at, pending.message_id))

    def _receive(self, peer: PeerSocket) -> None:
        for _ in range(_REPLIES_PER_TURN):
            try:
                frame = self._peers.receive(peer)
            except MalformedMessage as error:
                self._ignore_malformed(peer, str(error))
                continue
            if frame is None:
                return
            self._take_reply(peer, frame)

    def _take_reply(self, peer: PeerSocket, frame: bytes) -> None:
        if len(frame) > _LARGE_BYTES and not self._may_be_large(peer, frame):
            self._ignore_malformed(peer, f"a frame of {len(frame)} bytes, and what it answers has no such replies")
            return
        try:
            message_id, reply = decode_reply(frame)
        except MalformedMessage as error:
            pending = self._pending.get(error.message_id)
            if error.code is ErrorCode.VERSION and pending is not None and pending.address == peer.address:
                self._refuse(pending, ErrorCode.VERSION, str(error))
            else:
                self._ignore_malformed(peer, str(error))
            return
        pending = self._pending.get(message_id)
        if pending is None or pending.address != peer.address:
            self.counters.late_replies += 1
        elif isinstance(reply, Error):
            self._take_error(pending, reply)
        elif type(reply).__name__ != REPLY_NAMES[type(pending.request)]:
            self._ignore_malformed(peer, f"a {reply.__struct_config__.tag!r} does not answer a {pending.kind!r}")
        else:
            self.counters.answered += 1
            self._settle(pending, reply)

    def _may_be_large(self, peer: PeerSocket, frame: bytes) -> bool:
        """Return whether a frame answers what may have large replies. No other is decoded: all threads stand still."""
        pending = self._pending.get(message_id_of(frame))
        return pending is not None and pending.address == peer.address and isinstance(pending.request, _MAY_BE_LARGE)

    def _take_error(self, pending: Pending, error: Error) -> None:
        if error.code == ErrorCode.NOT_READY:
            pending.not_ready = error.message[:_REASON_CHARACTERS] or "the engine is still starting"
        else:
            peer = self._peers.find(pending.address)
            if error.code == ErrorCode.UNKNOWN_ENGINE and peer is not None:
                peer.is_another = True
            self._refuse(pending, error.code, error.message)

    def _ignore_malformed(self, peer: PeerSocket, reason: str) -> None:
        self.counters.malformed_replies += 1
        self._warnings.warn("malformed_reply", f"ignored a control reply from {peer.address}: {reason!r}")

    def _end(self) -> None:
        self._inbox.close()
        while (item := self._inbox.take()) is not None:
            if isinstance(item, Pending):
                self._pending[item.message_id] = item
            elif isinstance(item, Watched):
                self._take(item)
        for pending in list(self._pending.values()):
            self._settle(pending, pending.closed())
        self._peers.close()
