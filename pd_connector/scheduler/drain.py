"""How long a prefill engine that was told to stop stays for the decode engines that have yet to read from it.

Decides only. vLLM stops its workers, and with them the memory that is read from, before it tells the connector; until
then it steps as long as the connector says that there is work.
"""

import logging
import math
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: What is left of vLLM's own shutdown timeout for it to stop its workers; after that it kills what is left of itself.
_TEARDOWN_S = 3.0


class Drain:
    """Says whether to stay. Belongs to the scheduler's thread."""

    def __init__(
        self,
        timeout_s: float,
        engine_timeout_s: float,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout_s``: how long to stay after the last request. ``engine_timeout_s``: when vLLM kills the engine."""
        self._timeout_s = timeout_s
        self._engine_timeout_s = max(engine_timeout_s - _TEARDOWN_S, 0.0)
        self._is_stopping = is_stopping
        self._clock = clock
        self._limit = math.inf  # known once the engine was seen stopping
        self._deadline = math.inf
        self._announced = False

    def must_stay(self, leases: int, *, busy: bool = False) -> bool:
        """Whether to keep stepping for ``leases`` leases that have not ended. To be asked in every step.

        ``busy``: the step works on requests, whose leases are still to come.
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
