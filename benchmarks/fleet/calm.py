"""Measures while nobody else takes the machine's cores, as far as that can be had.

A machine that is lent shares its hardware. The kernel counts for how long the hypervisor has kept cores from it that it
wanted (``steal`` in proc(5)), so what was measured meanwhile can be told from the rest, without a look at the result.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import psutil

_T = TypeVar("_T")

#: Of the time for which cores were wanted: what is measured counts if no larger share was taken.
MOST_STOLEN = 0.03


class Processor(NamedTuple):
    """Seconds of all cores since the machine has started."""

    used: float
    stolen: float


def processor() -> Processor:
    """Return for how long cores were used, and taken. Nothing is taken where the platform does not count it."""
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    stolen: float = getattr(times, "steal", 0.0)
    # Guests are part of what users use.
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return Processor(everything - waiting - stolen, stolen)


def calmest(
    measure: Callable[[], _T], times: int = 1, tries: int | None = None, clock: Callable[[], Processor] = processor
) -> list[tuple[_T, float]]:
    """Return what was measured and the share that was taken meanwhile, 0 to 1, in the order of time.

    Args:
        measure: measures once.
        times: how many results to return.
        tries: how often to measure at most, until that many count; None: twice as often. The results of which least was
            taken are returned, whether they count or not.
        clock: returns what cores have done so far.
    """
    found: list[tuple[_T, float]] = []
    for _ in range(2 * times if tries is None else tries):
        before = clock()
        result = measure()
        used, stolen = (now - then for now, then in zip(clock(), before, strict=True))
        found.append((result, stolen / (used + stolen) if stolen else 0.0))
        if sum(share <= MOST_STOLEN for _, share in found) >= times:
            break
    kept = sorted(range(len(found)), key=lambda number: found[number][1])[:times]
    return [found[number] for number in sorted(kept)]
