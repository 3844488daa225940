"""Tells a read whose peer cannot be reached any more, long before the transfer engine notices that nothing comes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from pd_connector.params import RemotePrefill
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused, PeerUnreachable
from transfer.control.messages import ErrorCode, Renew, Renewed

#: Between two questions, and before the first one: most reads take less, and ask nothing.
_ASK_EVERY_S = 0.5


class PeerWatch:
    """Asks the control port of the engine that is being read whether it is there. Belongs to the thread that reads.

    An engine that is slow to answer, or stopped, is no reason to give up: only one that cannot be reached (see
    ``ClientSettings.silent_s``), or that has been replaced.
    """

    def __init__(
        self, client: ControlClient, remote: RemotePrefill, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """``timeout_s``: as long as the read may take."""
        self._client = client
        self._remote = remote
        self._timeout_s = timeout_s
        self._clock = clock
        self._answer: Future[Renewed] | None = None
        self._ask_at = clock() + _ASK_EVERY_S

    def __call__(self) -> str:
        """Return why the read is to end, empty if it is not. Cheap, and never waits."""
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer, None
            error = answer.exception()
            is_replaced = isinstance(error, PeerRefused) and error.code == ErrorCode.UNKNOWN_ENGINE
            if is_replaced or isinstance(error, PeerUnreachable):
                return f"its engine was given up: {error}"
        if self._answer is None and self._clock() >= self._ask_at:
            self._ask_at = self._clock() + _ASK_EVERY_S
            remote = self._remote
            renews_nothing = Renew(remote.remote_engine_id, ())
            self._answer = self._client.request(remote.remote_host, remote.remote_port, renews_nothing, self._timeout_s)
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Forget a question that has no answer."""
        if self._answer is not None:
            self._answer.cancel()
