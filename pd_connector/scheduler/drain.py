"""How long a prefill engine that was told to stop stays for the decode engines that have yet to read from it.

Decides only. vLLM stops its workers, and with them the memory that is read from, before it tells the connector; until
then it steps as long as the connector says that there is work.
"""

import math
import time
from collections.abc import Callable

from pd_connector.vllm_compat import init_logger

logger = init_logger(__name__)

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
        """``timeout_s``: how long to stay at most. ``engine_timeout_s``: after how long vLLM kills the engine."""
        self._timeout_s = max(min(timeout_s, engine_timeout_s - _TEARDOWN_S), 0.0)
        self._is_stopping = is_stopping
        self._clock = clock
        self._deadline = math.inf  # known once the engine was seen stopping
        self._announced = False

    def must_stay(self, leases: int) -> bool:
        """Whether to keep stepping for ``leases`` leases that have not ended. To be asked in every step."""
        if not self._is_stopping():
            return False
        now = self._clock()
        if self._deadline == math.inf:
            self._deadline = now + self._timeout_s
        if not leases or now >= self._deadline:
            return False
        if not self._announced:
            self._announced = True
            logger.info(
                "PDConnector: told to stop; staying up to %.1f s for decode engines that hold %d leases",
                self._deadline - now, leases,
            )  # fmt: skip
        return True
