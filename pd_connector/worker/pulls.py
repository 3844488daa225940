"""All pulls of a worker: passes orders to the sessions with prefill engines, and collects how they end."""

import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pd_connector.orders import Cause, Orders, PullOrder, RankEnds, RefuseOrder, Report
from pd_connector.params import EngineAddress
from pd_connector.stats import StatsRecorder
from pd_connector.traces import PullTrace
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pull import AnyEnd
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.quarantine import LostPull, Quarantine, UnsettledPull, UnsettledReadError
from pd_connector.worker.session import PeerSession
from pd_connector.worker.worker_role import WorkerRole

logger = logging.getLogger(__name__)

#: How long a shutdown waits for threads: less than vLLM gives its workers. Closing the engine has ended their reads.
_CLOSE_TIMEOUT_S = 2.0

#: How often sessions are closed that have been idle for long, of engines that may be gone.
_SWEEP_S = 60.0

#: Addresses of one host that have not answered yet. Clients name them: wrong ones must not keep other hosts out.
MOST_UNMET = 128

#: Arguments: the context of all pulls, a callback for the end of each, and the prefill engine.
OpenSession = Callable[[PullContext, Callable[[AnyEnd], None], EngineAddress], PeerSession]


class Pulls(WorkerRole):
    """Owns the sessions with prefill engines, and the pulls in quarantine.

    There is a session for each pair of engine id and address. Both come from clients: a wrong address must not divert
    the pulls of requests that name the right one.

    Requests of vLLM wait for some pulls. How others end goes to the scheduler side with the reports.
    """

    #: The name of these others in a step's ``Orders``, and that of their ends in a ``Report``.
    unawaited: ClassVar[Literal["borders", "landings", "prefixes"]] = "borders"

    def __init__(
        self,
        context: PullContext,
        peer_idle_s: float,
        stats: StatsRecorder | None = None,
        max_peers: int = 1024,
        open_session: OpenSession = PeerSession,
    ) -> None:
        self._ended: queue.SimpleQueue[AnyEnd] = queue.SimpleQueue()
        self._stats = stats or StatsRecorder()
        self._quarantine = Quarantine(self._stats, context.clock)
        self._context = context
        self._open_session = open_session
        self._peer_idle_s = peer_idle_s
        self._sweep_at = 0.0  # monotonic seconds
        self._max_peers = max_peers
        self._sessions: dict[EngineAddress, PeerSession] = {}
        self._retired: list[PeerSession] = []  # that finish their pulls, and get no more
        self._closing: list[PeerSession] = []
        self._outstanding: dict[str, bool] = {}  # whether a request waits for the end, by id
        self._ends: list[PullEnd] = []  # for which requests wait, since the last ``take_ends``
        self._reported: dict[str, RankEnds] = {}  # the others, since the last report

    def execute(self, orders: Orders) -> list[str]:
        """Start the pulls, and fail the requests that cannot be pulled."""
        if orders.model_changes:
            self._forget_peers()
        for refusal in orders.refusals:
            self._outstanding[refusal.request_id] = True
            self._refuse(refusal, is_told=self._context.reader > 0)
        for is_awaited, pulls in ((True, orders.pulls), (False, getattr(orders, self.unawaited))):
            for pull in pulls:
                self._outstanding[pull.request_id] = is_awaited
                self._submit(pull)
        return [order.request_id for order in orders.refusals] + [order.request_id for order in orders.pulls]

    def take_ends(self) -> list[PullEnd]:
        """Return the pulls that requests wait for and that have ended and settled since the last call, each once.

        Raises:
            UnsettledReadError: nothing proves that the reads of a pull write no more.
        """
        self._collect()
        ends, self._ends = self._ends, []
        return ends

    def take_report(self) -> Report:
        """Return the others that have ended and settled since the last call.

        Raises:
            UnsettledReadError: as in ``take_ends``.
        """
        self._collect()
        ends, self._reported = self._reported, {}
        return self._report(ends)

    def abandoned(self) -> Report:
        """Return the others that have not been reported, as failed, after ``join``: nothing is written any more."""
        lost = self._reported.keys() | {each for each, is_awaited in self._outstanding.items() if not is_awaited}
        self._outstanding = {each: True for each, is_awaited in self._outstanding.items() if is_awaited}
        self._reported = {}
        return self._report(dict.fromkeys(lost, RankEnds(1, failed=True)))

    def note(self, end: PullEnd) -> None:
        """Count a pull that has ended and for which no request waits; log if it has failed."""
        end.count_bytes(self._stats)
        if end.failure:  # nothing but later hits depends on it
            logger.warning("PDConnector: states for later prefix hits were not pulled: %s", end.failure)

    def _report(self, ends: Mapping[str, RankEnds]) -> Report:
        named: dict[str, Any] = {self.unawaited: ends}
        return Report(**named)

    def _collect(self) -> None:
        """Take up what has ended and settled."""
        if (now := time.monotonic()) >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._close_idle_sessions(self._peer_idle_s)
        while not self._ended.empty():
            end = self._ended.get_nowait()
            if isinstance(end, UnsettledPull):
                self._quarantine.add(end)
            elif isinstance(end, LostPull):
                raise UnsettledReadError(
                    f"the clean-up of the pull of request {end.request_id} has failed, so nothing proves that its "
                    f"blocks are not written any more; the worker ends: {end.reason}"
                )
            else:
                self._settle(end)
        for end in self._quarantine.take_settled():
            self._settle(end)

    def _settle(self, end: PullEnd) -> None:
        is_awaited = self._outstanding.pop(end.request_id, None)
        if is_awaited is None:  # an id that vLLM's scheduler does not know would crash the engine
            logger.error("PDConnector: ignored that request %s settled twice, which is a bug", end.request_id)
        elif is_awaited:
            self._ends.append(end)
        else:
            self.note(end)
            self._reported[end.request_id] = RankEnds(1, bool(end.failure), end.lacking_states)

    def close(self) -> None:
        """Close all sessions after their current read, without waiting. Outstanding pulls are not reported."""
        self._closing += [*self._sessions.values(), *self._retired]
        self._sessions.clear()
        self._retired.clear()
        for session in self._closing:
            session.close()

    def close_idle(self) -> None:
        """Close the sessions that have nothing to do, without waiting."""
        self._close_idle_sessions(0.0)

    def join(self) -> None:
        """Close the control client, whose answers sessions may wait for, and wait for their threads.

        All pulls of a worker share the client, and end together.
        """
        self._context.client.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        self._closing = [s for s in self._closing if not s.join(max(deadline - time.monotonic(), 0.0))]
        if self._closing:
            logger.warning("PDConnector: %d reads were still under way at shutdown", len(self._closing))
        self._quarantine.close()

    def check_ended(self) -> None:
        """Raise RuntimeError if a session's thread still runs after ``join``: its reads may still write to blocks."""
        if self._closing:
            raise RuntimeError(f"{len(self._closing)} reads from prefill engines did not end; the worker cannot go on")

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance, including those of the sessions."""
        sessions = [*self._sessions.values(), *self._retired, *self._closing]
        assert len({id(session) for session in sessions}) == len(sessions), "a session is open and closing at once"
        assert len(self._sessions) <= self._max_peers, "more engines are pulled from than allowed"
        for session in sessions:
            session.check_integrity()
        self._quarantine.check_integrity()

    def _submit(self, order: PullOrder) -> None:
        try:
            session = self._session(order)
        except RuntimeError as error:  # the system has no thread left
            reason = f"no pull can begin: {error}"
            self._refuse(RefuseOrder(order.request_id, Cause.INTERNAL, reason, order.traceparent))
            return
        if session is None:
            reason = (
                f"{self._max_peers} prefill engines are being pulled from already, or {MOST_UNMET} of this host of "
                "which none has answered yet, which is the maximum at a time"
            )
            self._refuse(RefuseOrder(order.request_id, Cause.UNREACHABLE, reason, order.traceparent))
            return
        session.submit(order)

    def _forget_peers(self) -> None:
        """Compare every prefill engine anew, before the next pull from it. This engine's weights are not known."""
        self._context = replace(self._context, model=self._context.model.with_other_weights())
        self._retired += self._sessions.values()
        self._sessions.clear()

    def _refuse(self, refusal: RefuseOrder, *, is_told: bool = False) -> None:
        """Report a pull as failed that does not begin. ``is_told``: another rank is given the same, and logs it."""
        if self._context.trace is not None and refusal.traceparent:
            now = self._context.clock()
            self._context.trace(
                PullTrace(refusal.request_id, refusal.traceparent, "", "", now, (), refusal.cause, refusal.reason)
            )
        self._ended.put(PullEnd(refusal.request_id, refusal.cause, refusal.reason, is_told=is_told))

    def _session(self, order: PullOrder) -> PeerSession | None:
        """Return the session with an order's prefill engine, opened if need be; None if there are too many."""
        peer = order.remote.engine
        if peer not in self._sessions:
            self._close_idle_sessions(self._peer_idle_s)
            if self._is_full(peer.host):
                self._make_room(peer.host if self._unmet(peer.host) >= MOST_UNMET else None)
            if self._is_full(peer.host):
                return None
            self._sessions[peer] = self._open_session(self._context, self._ended.put, peer)
        return self._sessions[peer]

    def _is_full(self, host: str) -> bool:
        return len(self._sessions) >= self._max_peers or self._unmet(host) >= MOST_UNMET

    def _unmet(self, host: str) -> int:
        """Return how many sessions with a host have met nobody."""
        return sum(each.host == host and not session.has_met for each, session in self._sessions.items())

    def _make_room(self, host: str | None) -> None:
        """Close one idle session: the one used longest ago of those that have met nobody, if there are any.

        ``host``: which has too many of these, so that no others count; None if there are too many sessions.
        """
        idle = [
            (session.has_met, session.last_used, peer)
            for peer, session in self._sessions.items()
            if session.idle and (host is None or (peer.host == host and not session.has_met))
        ]
        if idle:
            self._close_session(min(idle, key=lambda each: each[:2])[2])

    def _close_session(self, peer: EngineAddress) -> None:
        session = self._sessions.pop(peer)
        session.close()
        self._closing.append(session)

    def _close_idle_sessions(self, idle_s: float) -> None:
        now = time.monotonic()
        for peer, session in list(self._sessions.items()):
            if session.idle and now - session.last_used >= idle_s:
                self._close_session(peer)
        for session in [each for each in self._retired if each.idle]:
            session.close()
            self._retired.remove(session)
            self._closing.append(session)
        self._closing = [session for session in self._closing if not session.join(0.0)]
