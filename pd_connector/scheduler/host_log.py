"""The line of log that says what transfers did with host memory: leases by place, moves and landings."""

import logging
import math
from collections import Counter
from collections.abc import Callable
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
        self._moves: Counter[str] = Counter()  # that the lines before have told of, as are landings
        self._landings: Counter[str] = Counter()

    def write(self, moves: LeaseMoves | None, landings: Landings | None) -> None:
        """Write what these roles have counted since the last line, if that is long enough ago. None: there is none."""
        now = self._clock()
        if now < self._next_at:
            return
        moved = moves.totals - self._moves if moves is not None else Counter[str]()
        landed = landings.totals - self._landings if landings is not None else Counter[str]()
        if not (moved or landed):
            return
        said = []
        if moves is not None:
            said.append(self._of_leases(moved))
            self._moves = moves.totals.copy()
        if landings is not None:
            said.append(_of_landings(landed, landings.under_way))
            self._landings = landings.totals.copy()
        self._next_at = now + INTERVAL_S
        logger.info("PDConnector: host memory, since the last such line: %s", "; ".join(said))

    def _of_leases(self, new: Counter[str]) -> str:
        active, in_host = self._leases.active, self._leases.in_host_memory  # leases may end meanwhile
        return (
            f"{new['copied'] + new['present']} blocks of {_sum(new, _MOVED)} leases have moved there "
            f"({_each(new, _MOVED)}; {new['copied']} copied, {new['present']} present), {_sum(new, _STAYED)} moves "
            f"came to nothing ({_each(new, _STAYED)}), now {active - in_host} leases lie on the device and {in_host} "
            "in host memory"
        )


def _of_landings(new: Counter[str], under_way: int) -> str:
    reasons = tuple(reason.value for reason in Fallback)
    return (
        f"{new['landed']} prompts have landed there, {new['failed']} failed, {new['left']} left, {under_way} are under "
        f"way, {_sum(new, reasons)} were pulled to the device instead ({_each(new, reasons)})"
    )


def _sum(counts: Counter[str], names: tuple[str, ...]) -> int:
    return sum(counts[name] for name in names)


def _each(counts: Counter[str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in names)
