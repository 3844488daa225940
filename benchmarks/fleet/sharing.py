"""What simulated work shares: the cores of a machine, the links of an engine.

A pool lets so much work go on at full speed. If more wants it, all slow down: alike, or by their weights. Work that
needs several pools goes as fast as the slowest of them lets it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import simpy

_DONE = 1e-9  # of its seconds; what is left of work that has ended, by rounding


@dataclass(eq=False)
class Pool:
    """Something of which there is only so much."""

    capacity: float
    occupied: float = 0.0  # by what has no end; of weight 1


@dataclass(eq=False)
class _Work:
    left_s: float
    least_s: float  # as much as counts as nothing
    wants: Mapping[Pool, float]
    weight: float
    done: simpy.Event
    speed: float = 1.0


def speeds(capacity: float, wanted: Sequence[tuple[float, float]]) -> list[float]:
    """Return the shares of full speed at which work goes on that wants ``(amount, weight)`` of one pool.

    What is short is divided by weights; what needs less than its share leaves the rest to the others. Nothing is faster
    than 1.
    """
    left, short = capacity, set(range(len(wanted)))
    found = [1.0] * len(wanted)
    while short and sum(wanted[each][0] for each in short) > left:
        each_weight = left / sum(wanted[each][0] * wanted[each][1] for each in short)
        satisfied = {each for each in short if each_weight * wanted[each][1] >= 1.0}
        if not satisfied:
            for each in short:
                found[each] = each_weight * wanted[each][1]
            break
        left -= sum(wanted[each][0] for each in satisfied)
        short -= satisfied
    return found


class Sharing:
    """All work that is under way. Knows what it wants, not what it is."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._work: list[_Work] = []
        self._last = env.now
        self._version = 0

    def work(self, seconds: float, wants: Mapping[Pool, float], weight: float = 1.0) -> simpy.Event:
        """Return an event that comes when work has been done that takes so long at full speed.

        ``weight``: how much of its speed it keeps where a pool is short, beside work of weight 1.
        """
        done = self._env.event()
        if seconds <= 0:
            return done.succeed()
        self._advance()
        self._work.append(_Work(seconds, seconds * _DONE, wants, weight, done))
        self._plan_next()
        return done

    def occupy(self, pool: Pool, amount: float) -> None:
        """Want so much more of a pool from now on, without end; a negative amount takes that back."""
        self._advance()
        pool.occupied = max(pool.occupied + amount, 0.0)
        self._plan_next()

    @property
    def under_way(self) -> int:
        """How much work has not ended."""
        return len(self._work)

    def _advance(self) -> None:
        elapsed, self._last = self._env.now - self._last, self._env.now
        for work in self._work:
            work.left_s -= elapsed * work.speed

    def _divide(self) -> None:
        by_pool: dict[Pool, list[_Work]] = {}
        for work in self._work:
            work.speed = 1.0
            for pool in work.wants:
                by_pool.setdefault(pool, []).append(work)
        for pool, wanting in by_pool.items():
            wanted = [(work.wants[pool], work.weight) for work in wanting]
            for work, speed in zip(wanting, speeds(pool.capacity, [*wanted, (pool.occupied, 1.0)]), strict=False):
                work.speed = min(work.speed, speed)

    def _plan_next(self) -> None:
        self._version += 1
        self._divide()
        if self._work:
            version = self._version
            due_s = max(min(work.left_s / work.speed for work in self._work), 0.0)
            timer = self._env.timeout(due_s)
            timer.callbacks.append(lambda _: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # something has changed since, and there is another timer
        self._advance()
        shortest = min(work.left_s for work in self._work)
        ended = [work for work in self._work if work.left_s <= max(work.least_s, shortest)]
        self._work = [work for work in self._work if work not in ended]
        for work in ended:
            work.done.succeed()
        self._plan_next()
