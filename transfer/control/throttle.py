"""Warnings about what a peer sends, at a rate that the peer cannot choose."""

import logging
import time
from dataclasses import dataclass


@dataclass(slots=True)
class _Cause:
    last_s: float
    suppressed: int = 0


class ThrottledWarnings:
    """Logs the first warning of a cause at once, then at most one per ``interval_s`` seconds with the number left out.

    Belongs to one thread. ``cause`` must come from a small fixed set, never from a peer's input.
    """

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._causes: dict[str, _Cause] = {}

    def warn(self, cause: str, text: str, *, error: BaseException | None = None) -> None:
        """Log ``text`` (and the traceback of ``error``), or only count it."""
        now = time.monotonic()
        seen = self._causes.get(cause)
        if seen is None:
            self._causes[cause] = _Cause(now)
            self._logger.warning("%s", text, exc_info=error)
        elif now - seen.last_s >= self._interval_s:
            left_out = seen.suppressed
            self._causes[cause] = _Cause(now)
            self._logger.warning("%s (and %d more like it since the last such line)", text, left_out, exc_info=error)
        else:
            seen.suppressed += 1
