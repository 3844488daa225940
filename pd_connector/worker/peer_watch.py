"""Tells reads whose peer cannot be reached any more, long before the transfer engine notices that nothing comes."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable
from transfer.control.messages import ErrorCode, Renew, Renewed
from transfer.engine.interface import GivenUp
from transfer.peers import Address

#: Between two questions, and before a read asks its first one: most take less, and ask nothing.
_ASK_EVERY_S = 0.5


class PeerWatch:
    """Asks the control port of an engine whether it is there, for all reads from it together. Any thread.

    Reads take longest where many share P's network: each by itself would ask P's scheduler most when that is busy.

    An engine that is slow to answer, or stopped, is no reason to give up: only one that cannot be reached (see
    ``ClientSettings.silent_s``), or that has been replaced.
    """

    def __init__(
        self, client: ControlClient, engine_id: str, at: Address, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """``timeout_s``: as long as a read may take."""
        self._client = client
        self._engine_id, self._at = engine_id, at
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._answer: Future[Renewed] | None = None
        self._asked_at = -math.inf
        self._lost_at, self._why = -math.inf, ""  # when the question was asked that said so

    def of_read(self) -> GivenUp:
        """Return what tells why a read that begins now, or the link for it, is to end; empty if it is not.

        Cheap, and never waits.
        """
        began = self._clock()
        return lambda: self._look(began) if self._clock() >= began + _ASK_EVERY_S else ""

    def _look(self, began: float) -> str:
        with self._lock:
            if self._answer is not None and self._answer.done():
                error = self._answer.exception()
                self._answer = None
                is_replaced = isinstance(error, PeerRefused) and error.code == ErrorCode.UNKNOWN_ENGINE
                if is_replaced or isinstance(error, PeerUnreachable):
                    self._lost_at, self._why = self._asked_at, f"its engine was given up: {error}"
            # What was asked for earlier reads says nothing: the engine may have come back.
            if self._lost_at >= began:
                return self._why
            if self._answer is None and self._clock() >= self._asked_at + _ASK_EVERY_S:
                self._asked_at = self._clock()
                renews_nothing = Renew(self._engine_id, ())
                self._answer = self._client.request(self._at.host, self._at.port, renews_nothing, self._timeout_s)
            return ""
