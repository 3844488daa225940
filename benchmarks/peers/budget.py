"""How much of the time that a run may take is left for repeats: starting servers takes most of it."""

import time
from collections.abc import Callable, Iterable

from benchmarks.peers.servers import Shape

START_S = 17.0  # of one server among several that start at once, on two cores; then what it took here


def starts(steps: Iterable[tuple[Shape, Shape]], connectors: int) -> int:
    """Return how many servers are started by having servers of these shapes (P, D), one step after another."""
    count = 0
    before: tuple[Shape | None, Shape | None] = (None, None)
    for step in steps:
        count += connectors * sum(new != old for new, old in zip(step, before, strict=True))
        before = step
    return count


class Budget:
    """Shares out the time of a run among its rounds."""

    def __init__(
        self, seconds: float, starts_left: int, other_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``other_s``: what the parts without repeats take beside the starts of their servers."""
        self._clock = clock
        self._ends = clock() + seconds
        self._starts_left, self._other_s, self._start_s = starts_left, other_s, START_S

    def started(self, servers: int, seconds: float) -> None:
        """Note that so many servers have been started, and how long that took."""
        self._starts_left = max(0, self._starts_left - servers)
        if servers:
            self._start_s = seconds / servers

    def share_s(self, rounds_left: int) -> float:
        """Return what a round may take now, with all that is still to come."""
        left = self._ends - self._clock() - self._starts_left * self._start_s - self._other_s
        return max(0.0, left / max(rounds_left, 1))
