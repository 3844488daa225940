"""Decides how long a prefill engine that was told to stop stays up for decode engines that have yet to read from it.

vLLM stops its workers, whose memory is read, before it shuts the connector down. Until then it keeps stepping as long
as the connector says that there is work.
"""

import logging
import math
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Part of vLLM's shutdown timeout that is left for stopping its workers. At its end, vLLM kills them.
_TEARDOWN_S = 3.0


class Drain:
    """Decides whether to stay up. Belongs to the scheduler's thread."""

    def __init__(
        self,
        timeout_s: float,
        engine_timeout_s: float,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stay for ``timeout_s`` after the last request. vLLM kills a stopping engine after ``engine_timeout_s``."""
        self._timeout_s = timeout_s
        self._engine_timeout_s = max(engine_timeout_s - _TEARDOWN_S, 0.0)
        self._is_stopping = is_stopping
        self._clock = clock
        self._limit = math.inf  # set when the engine is first seen stopping
        self._deadline = math.inf
        self._announced = False

    def must_stay(self, leases: int, *, busy: bool = False) -> bool:
        """Return whether to keep stepping for ``leases`` active leases. Call it in every step.

        ``busy`` says that the step works on requests, whose leases are yet to come.
        """
        if not self._is_stopping():
            return False
        now = self._clock()
        if self._limit == math.inf:
            self._limit = now + self._engine_timeout_s
        if busy or self._deadline == math.inf:
            self._deadline = min(now + self._timeout_s, self._limit)
        if not leases or now >= self._deadline:
            return False
        if not self._announced:
            self._announced = True
            logger.info(
                "PDConnector: told to stop; staying up to %.1f s for decode engines that hold %d leases",
                self._deadline - now, leases,
            )  # fmt: skip
        return True
