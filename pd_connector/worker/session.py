"""All pulls of a worker from one prefill engine: several at once, each on a thread with links of its own.

No peer delays another, and long pulls do not hold up short ones: these go first, a lane is kept for them, and reads
from one peer share what may be in flight (``transfer.engine.window``). A pull whose prompt is still being computed
takes a thread only while there is something to read. Every pull ends exactly once, unless the session is closed.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from pd_connector.orders import Cause, PullOrder
from pd_connector.params import EngineAddress
from pd_connector.worker.lease_checksums import Interrupted
from pd_connector.worker.peer import Peer, PullContext, connect_peer
from pd_connector.worker.pull import AnyEnd, Pull
from pd_connector.worker.pull_end import PullFailed
from transfer.control.messages import Followed

logger = logging.getLogger(__name__)

#: Pulls from one engine at once: while one reads, others plan, verify or wait for an answer. Each further lane costs
#: links; over TCP, a link is 3 threads, 10 file descriptors and less than 1 MiB.
LANES = 4

#: A pull of so many tokens, or of no more than so great a share of the longest one under way, may have the last lane.
#: So whatever long pulls do, even if their reads hang, there is a lane for short ones. Those of about equal length lose
#: little by that: they share the network, and three of them plan and confirm while others read.
_SHORT_TOKENS, _SHORT_SHARE = 1024, 0.25

#: After which a pull is the next one, whatever is shorter. Without it, a stream of short ones would starve a long one.
_PATIENCE_S = 1.0

#: How long a lane other than the first keeps its links when there is nothing to do. As often, the first one looks
#: whether its own have become stale: closed soon, they end at the peer too, before a firewall forgets them.
_LANE_IDLE_S = 60.0

#: How long no further lane is opened after one could not open its links.
_REST_S = 10.0


class _Turn(NamedTuple):
    """Of a pull that waits for a lane. Thousands may, and each that gets one is chosen among them all."""

    since: float  # monotonic seconds
    is_later: bool  # behind those whose requests wait for nothing else
    tokens: int  # to be read


class _Lane:
    """A thread of a session, and its links to the prefill engine. Runs one pull at a time."""

    def __init__(self, number: int, work: Callable[["_Lane"], None], name: str) -> None:
        self.number = number
        self.linked_epoch = 0  # of the links, if all were open when the lane last asked; the session's lock guards it
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.peer: Peer | None = None  # the prefill engine with links of this lane
        self.epoch = 0  # of the handshake that ``peer`` is known by

    @property
    def has_stale_links(self) -> bool:
        """Whether there are links that are not read over any more."""
        return self.peer is not None and self.peer.has_stale_links

    def disconnect(self) -> None:
        """Close all links."""
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.close()


class PeerSession:
    """Begins the pulls from one prefill engine, up to ``LANES`` at once: the shortest first, as far as patience goes.

    A pull that has read what the prefill engine has computed so far is parked until it is told more, and then takes
    whichever lane is free. Pulls of complete prompts go before it. The last lane is for short pulls.

    If possible, one lane more is open than there are pulls under way: its links are ready when the next pull comes. A
    lane that has lost links, while another has its own, opens them before it takes a pull. If that is not possible, it
    ends and leaves the pulls to the others. The last lane stays, and fails the pulls that it cannot run.

    ``submit``, ``close`` and ``join`` belong to one thread; the pulls run on the session's own.
    """

    def __init__(self, context: PullContext, report: Callable[[AnyEnd], None], address: EngineAddress) -> None:
        """Start the first lane's thread. ``report`` is called with the end of each pull, on any thread."""
        self.last_used = time.monotonic()
        self._context = context
        self._report = report
        self._address = address
        self._closing = threading.Event()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[Pull, _Turn] = {}  # for a lane, as they came
        self._running: dict[int, int] = {}  # tokens of the pulls that have a lane, by its number
        self._parked: set[Pull] = set()  # for an answer of the prefill engine
        self._lanes: dict[int, _Lane] = {}
        self._idle: set[int] = set()  # the lanes that can take a pull
        self._opening: _Lane | None = None  # it opens its links
        self._rests_until = 0.0  # no lane is opened before
        self._threads: list[threading.Thread] = []  # of all lanes, also of some that have ended
        self._peer: Peer | None = None  # what the last handshake returned
        self._epoch = 0  # its number
        self._must_meet = True  # the next pull begins with a handshake
        self._meeting: _Lane | None = None  # it shakes hands, and no other lane takes a pull meanwhile
        with self._changed:
            self._open_lane()

    @property
    def idle(self) -> bool:
        """Whether no pull waits, for a lane or for the prefill engine, or is being read."""
        with self._changed:
            return not (self._waiting or self._parked or self._running)

    @property
    def has_met(self) -> bool:
        """Whether the prefill engine has answered a hello."""
        with self._changed:
            return self._peer is not None

    def submit(self, order: PullOrder) -> None:
        """Queue a pull. It ends within the pull timeout, and the time for P's answer, or as an ``UnsettledPull``.

        While P computes the prompt, the timeout begins anew with each progress.
        """
        self.last_used = time.monotonic()
        pull = Pull(self._context, order, self._report, self._closing)
        with self._changed:
            self._enqueue(pull)

    def close(self) -> None:
        """Stop after the current reads, without waiting. Queued and parked pulls are dropped and not reported."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after ``close``; return whether they have ended."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the numbers of pulls and lanes are possible and, until ``close``, lanes run."""
        with self._changed:
            assert not self._parked.intersection(self._waiting), "a pull waits for a lane and for an answer"
            assert self._idle <= self._lanes.keys(), "a lane is idle that has ended"
            assert len(self._lanes) <= LANES, "there are too many lanes"
            assert self._running.keys() <= self._lanes.keys() - self._idle, "a pull has a lane that does not run it"
            longs = sum(tokens > self._most_short for tokens in self._running.values())
            assert longs < max(LANES, 2), "long pulls have all lanes"
            assert self._meeting is None or self._must_meet, "a lane shakes hands once more"
            assert self._meeting is None or self._meeting in self._lanes.values(), "nobody shakes hands"
            alive = bool(self._lanes) and all(lane.thread.is_alive() for lane in self._lanes.values())
            assert self._closing.is_set() or alive, "a thread of the session has died"

    # Lanes. What follows until the next heading needs the lock.

    def _open_spare_lane(self) -> None:
        """Open a lane, unless one is idle or being opened, or there can be no more, or nobody has been met yet."""
        if self._must_meet or self._idle or self._opening or len(self._lanes) >= LANES or self._closing.is_set():
            return
        if time.monotonic() >= self._rests_until:
            self._open_lane()

    def _open_lane(self) -> None:
        number = min(set(range(LANES)) - self._lanes.keys())
        lane = _Lane(number, self._run, f"pd-pull-{self._address.engine_id[:8]}")
        try:
            lane.thread.start()  # it waits for the lock
        except RuntimeError:  # the system has no thread left
            if not self._lanes:
                raise
            self._rest("there is no thread for it")
            return
        self._opening = None if self._must_meet else lane
        self._lanes[number] = lane
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [lane.thread]

    def _rest(self, reason: str) -> None:
        self._rests_until = time.monotonic() + _REST_S
        logger.warning("PDConnector: one more pull at once from %s is not possible now: %s", self._address, reason)

    def _can_take(self, lane: _Lane) -> bool:
        """Return whether ``lane`` takes the next pull: the first that is idle, so that the last ones can end."""
        return self._meeting is None and lane.number == min(self._idle) and self._next_pull() is not None

    def _should_open_links(self, lane: _Lane) -> bool:
        """Return whether ``lane`` lacks links while another lane can run the pulls, or will when it has ended one."""
        if self._must_meet or lane.linked_epoch == self._epoch:
            return False
        return any(other.linked_epoch == self._epoch for other in self._lanes.values())

    def _await_turn(self, lane: _Lane) -> bool:
        """Wait until ``lane`` has something to do, or stale links; return False if it is to end."""
        self._running.pop(lane.number, None)
        lane.linked_epoch = lane.epoch if lane.peer is not None and lane.peer.is_linked else 0
        self._opening = None if self._opening is lane else self._opening
        self._idle.add(lane.number)
        self._changed.notify_all()  # whether this lane has links matters to the others
        try:
            while not self._changed.wait_for(lambda: self._closing.is_set() or self._has_turn(lane), _LANE_IDLE_S):
                if lane.number != min(self._lanes):
                    self._remove(lane)
                    return False
                if lane.has_stale_links:
                    break
            return not self._closing.is_set()
        finally:
            self._idle.discard(lane.number)

    def _has_turn(self, lane: _Lane) -> bool:
        return self._can_take(lane) or self._should_open_links(lane)

    def _remove(self, lane: _Lane) -> None:
        if self._lanes.get(lane.number) is lane:
            del self._lanes[lane.number]
            self._running.pop(lane.number, None)

    # The lanes' threads

    def _run(self, lane: _Lane) -> None:
        try:
            if self._peer is None or self._open_links(lane):
                while (pull := self._take(lane)) is not None:
                    answer = self._run_safely(lane, pull)
                    if answer is not None:
                        self._park(pull, answer)
        finally:
            with self._changed:
                self._remove(lane)
            lane.disconnect()

    def _open_links(self, lane: _Lane) -> bool:
        """Open what links a lane lacks; return whether it goes on, which the last lane does anyway."""
        reason = ""
        try:
            peer = self._linked(lane)
            peer.open_links(peer.plans)
        except Exception as error:  # whatever it is: the other lanes carry on, and find out
            reason = str(error) or type(error).__name__
        with self._changed:
            if not reason or len(self._lanes) == 1:
                return True
            self._remove(lane)  # before another lane can decide to end as well
            self._opening = None if self._opening is lane else self._opening
            if not self._closing.is_set():
                self._rest(reason)
        return False

    def _take(self, lane: _Lane) -> Pull | None:
        """Wait for the next pull, with links if possible. Returns None when the lane is to end."""
        while True:
            if lane.peer is not None:
                lane.peer.drop_stale_links()  # without the lock: it takes a while
            with self._changed:
                if not self._await_turn(lane):
                    return None
                if lane.has_stale_links:
                    continue
                if not self._should_open_links(lane):
                    self._meeting = lane if self._must_meet else None
                    self._open_spare_lane()
                    pull = self._next_pull()
                    assert pull is not None, "a lane has its turn and no pull"
                    del self._waiting[pull]
                    self._running[lane.number] = pull.tokens_left
                    self._changed.notify_all()  # the next pull is for another lane
                    return pull
                self._opening = self._opening or lane
                self._changed.notify_all()  # what waits is for another lane
            if not self._open_links(lane):
                return None

    def _next_pull(self) -> Pull | None:
        """Return the pull that gets the next lane, if one may have it. Needs the lock."""
        is_last = 0 < len(self._running) == LANES - 1
        most = self._most_short if is_last else math.inf
        waiting = (each for each in self._waiting.items() if each[1].tokens <= most)
        first = next(waiting, None)
        if first is None:
            return None
        if time.monotonic() - first[1].since >= _PATIENCE_S:
            return first[0]
        return min((first, *waiting), key=lambda each: (each[1].is_later, each[1].tokens))[0]

    @property
    def _most_short(self) -> float:
        """Tokens of a short pull, at most."""
        return max(_SHORT_TOKENS, _SHORT_SHARE * max(self._running.values(), default=0))

    def _park(self, pull: Pull, answer: "Future[Followed]") -> None:
        """Queue a pull again once its question has been answered."""
        with self._changed:
            self._parked.add(pull)
        answer.add_done_callback(lambda _: self._unpark(pull))

    def _unpark(self, pull: Pull) -> None:
        """Queue a pull, unless it has ended while it was parked. Usually called on the control client's thread."""
        with self._changed:
            if pull in self._parked:
                self._parked.remove(pull)
                self._enqueue(pull)

    def _enqueue(self, pull: Pull) -> None:
        """Queue a pull for the next free lane. With the lock held."""
        is_later = pull.is_ahead or pull.order.part > 0
        self._waiting[pull] = _Turn(time.monotonic(), is_later, pull.tokens_left)
        self._open_spare_lane()
        self._changed.notify_all()

    def _run_safely(self, lane: _Lane, pull: Pull) -> "Future[Followed] | None":
        """Return what the pull waits for; None if it has ended, or will without a lane."""
        try:
            return self._run_pull(lane, pull)
        except BaseException as error:  # whatever it is, the request must not wait for ever
            logger.exception("PDConnector: the clean-up of the pull of request %s has failed", pull.order.request_id)
            pull.lose(error)
        finally:
            self._end_meeting(lane)
        return None

    def _run_pull(self, lane: _Lane, pull: Pull) -> "Future[Followed] | None":
        try:
            return pull.run(lambda deadline: self._connect(lane, deadline))
        except PullFailed as error:
            pull.fail(error)
            if error.cause.is_peer_wide:
                self._fail_queued(error)
            if error.cause is Cause.REFUSED:  # by another engine than that whose memory may be mapped
                self._let_go()
        except Exception as error:
            if isinstance(error, Interrupted) and self._closing.is_set():
                return None  # outstanding pulls are not reported
            # A peer's geometry is data from another machine. Whatever it breaks here, the request must end.
            logger.exception("PDConnector: unexpected failure of the pull of request %s", pull.order.request_id)
            self._forget(lane)
            pull.fail(PullFailed(Cause.INTERNAL, f"{type(error).__name__}: {error}"))
        return None

    def _connect(self, lane: _Lane, deadline: float) -> Peer:
        """Return the prefill engine with links of ``lane``, after a handshake unless there was one.

        Raises:
            PullFailed: as ``connect_peer``.
        """
        if self._meeting is lane:
            lane.disconnect()
            lane.peer = connect_peer(self._context, self._address, deadline)
            self._end_meeting(lane, lane.peer)
        return self._linked(lane)

    def _linked(self, lane: _Lane) -> Peer:
        """Return the prefill engine by the last handshake, with links of ``lane``. Closes those by an earlier one."""
        with self._changed:
            known, epoch = self._peer, self._epoch
        assert known is not None, "nobody has shaken hands"
        if lane.epoch != epoch:
            lane.disconnect()
        if lane.peer is None:
            lane.peer, lane.epoch = known.with_own_links(), epoch
        return lane.peer

    def _end_meeting(self, lane: _Lane, met: Peer | None = None) -> None:
        """Let other lanes take pulls, with what the handshake has returned or, if it is None, to try another."""
        with self._changed:
            if self._meeting is lane:
                self._meeting = None
                if met is not None:
                    self._peer, self._epoch, self._must_meet = met, self._epoch + 1, False
                    lane.epoch = lane.linked_epoch = self._epoch
                self._open_spare_lane()
                self._changed.notify_all()

    def _forget(self, lane: _Lane) -> None:
        """Close the lane's links. The next pull starts with a handshake; those under way keep what they know."""
        with self._changed:
            self._must_meet |= lane.epoch == self._epoch
        lane.disconnect()

    def _let_go(self) -> None:
        """Let go of the prefill engine's memory on all lanes."""
        with self._changed:
            peers = [lane.peer for lane in self._lanes.values()]
        for peer in peers:
            if peer is not None:
                peer.let_go()

    def _fail_queued(self, error: PullFailed) -> None:
        """Fail all queued and parked pulls with ``error``, instead of letting each wait for it."""
        with self._changed:
            queued = [*self._waiting, *self._parked]
            self._waiting.clear()
            self._parked.clear()
        for pull in queued:
            try:
                pull.fail(error)
            except Exception as failure:
                pull.lose(failure)
