"""The line of log that says what transfers did with host memory: leases by place, moves and landings."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pd_connector.scheduler.decode.landings import Fallback, Landings
from pd_connector.scheduler.prefill.lease_moves import LeaseMoves
from pd_connector.scheduler.prefill.leases import LeaseTable

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
_MOVED, _STAYED = ("short", "share"), ("full", "read", "ended", "failed")


class HostLog:
    """Writes the line when something has moved or landed, at most one in ``INTERVAL_S`` seconds, and no event twice.

    Belongs to the scheduler's thread.
    """

    def __init__(self, leases: LeaseTable[Any], clock: Callable[[], float]) -> None:
        """Write nothing yet. ``clock`` is a monotonic clock, in seconds."""
        self._leases = leases
        self._clock = clock
        self._next_at = -math.inf
        self._new: Counter[tuple[str, str]] = Counter()  # of which no line has told, by metric and label

    def write(self, moves: LeaseMoves | None, landings: Landings | None) -> None:
        """Write what these roles have counted since the last line, if that is long enough ago. None: there is none.

        To be called before their ``update_stats``, which forgets what they have counted, and once for each.
        """
        for role in (moves, landings):
            if role is not None:
                self._new.update(role.counts)
        now = self._clock()
        if not self._new or now < self._next_at:
            return
        said = []
        if moves is not None:
            said.append(self._of_leases())
        if landings is not None:
            said.append(self._of_landings(landings.under_way))
        self._new.clear()
        self._next_at = now + INTERVAL_S
        logger.info("PDConnector: host memory, since the last such line: %s", "; ".join(said))

    def _of_leases(self) -> str:
        active, in_host = self._leases.active, self._leases.in_host_memory  # leases may end meanwhile
        copied, present = (self._new["lease_blocks_moved", label] for label in ("copied", "present"))
        return (
            f"{copied + present} blocks of {self._sum('lease_moves', _MOVED)} leases have moved there "
            f"({self._each('lease_moves', _MOVED)}; {copied} copied, {present} present), "
            f"{self._sum('lease_moves', _STAYED)} moves came to nothing ({self._each('lease_moves', _STAYED)}), now "
            f"{active - in_host} leases lie on the device and {in_host} in host memory"
        )

    def _of_landings(self, under_way: int) -> str:
        landed, failed, left = (self._new["landings", label] for label in ("landed", "failed", "left"))
        return (
            f"{landed} prompts have landed there, {failed} failed, {left} left, {under_way} are under way, "
            f"{self._sum('landing_fallbacks', Fallback)} were pulled to the device instead "
            f"({self._each('landing_fallbacks', Fallback)})"
        )

    def _sum(self, metric: str, labels: Iterable[str]) -> int:
        return sum(self._new[metric, label] for label in labels)

    def _each(self, metric: str, labels: Iterable[str]) -> str:
        return ", ".join(f"{label} {self._new[metric, label]}" for label in labels)
