"""A worker's pulls: hands orders to the sessions of their peers and collects what has settled.

Everything except ``settle`` runs on the thread that vLLM calls the connector on, and none of it waits.
"""

import queue
import time
from collections.abc import Callable

from pd_connector.metadata import PullOrder, RefuseOrder
from pd_connector.vllm_compat import init_logger
from pd_connector.worker.peer import PeerSession, PullContext, Settled

logger = init_logger(__name__)

#: How long a shutdown waits for reads under way. The process's end stops them in any case.
_CLOSE_TIMEOUT_S = 5.0


class PullService:
    """Owns the sessions with prefill engines, one per engine id and address.

    Both come from a client: a wrong address must not divert the pulls of requests that name the right one.
    """

    def __init__(self, make_context: Callable[[Callable[[Settled], None]], PullContext], peer_idle_s: float) -> None:
        self._settled: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        self._context = make_context(self._settled.put)
        self._peer_idle_s = peer_idle_s
        self._sessions: dict[tuple[str, str, int], PeerSession] = {}
        self._closing: list[PeerSession] = []
        self._outstanding: set[str] = set()

    def submit(self, order: PullOrder) -> None:
        """Start a pull; ``take_settled`` reports its end."""
        self._outstanding.add(order.request_id)
        peer = (order.remote.remote_engine_id, order.remote.remote_host, order.remote.remote_port)
        session = self._sessions.get(peer)
        if session is None:
            self._close_idle_sessions()
            session = self._sessions[peer] = PeerSession(self._context, *peer)
        session.submit(order)

    def refuse(self, order: RefuseOrder) -> None:
        """Settle a request that cannot be pulled as failed."""
        self._outstanding.add(order.request_id)
        self._settled.put(Settled(order.request_id, "params", order.reason))

    def take_settled(self) -> list[Settled]:
        """The pulls that have ended since the last call, each exactly once."""
        settled = []
        while not self._settled.empty():
            end = self._settled.get_nowait()
            if end.request_id not in self._outstanding:
                # vLLM's scheduler dies of an id that it does not hold; better one lost line than a lost engine.
                logger.error("PDConnector: request %s settled twice, which is a bug; ignored", end.request_id)
                continue
            self._outstanding.discard(end.request_id)
            settled.append(end)
        return settled

    def close(self) -> None:
        """End all sessions and join their threads."""
        sessions = [*self._sessions.values(), *self._closing]
        self._sessions.clear()
        for session in sessions:
            session.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        stuck = [session for session in sessions if not session.join(max(deadline - time.monotonic(), 0.0))]
        if stuck:
            logger.warning("PDConnector: %d reads were still under way at shutdown", len(stuck))

    def _close_idle_sessions(self) -> None:
        now = time.monotonic()
        for peer, session in list(self._sessions.items()):
            if session.idle and now - session.last_used > self._peer_idle_s:
                session.close()
                self._closing.append(self._sessions.pop(peer))
        self._closing = [session for session in self._closing if not session.join(0.0)]
