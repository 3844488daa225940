"""What simulated work shares: the cores of a machine, the links of an engine.

A pool lets so much work go on at full speed. If more wants it, all slow down alike; work that needs several pools goes
as fast as the slowest of them lets it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import simpy

_DONE = 1e-9  # of its seconds; what is left of work that has ended, by rounding


@dataclass(eq=False)
class Pool:
    """Something of which there is only so much."""

    capacity: float
    wanted: float = 0.0  # by all work that is under way

    @property
    def speed(self) -> float:
        """The share of full speed at which work goes on."""
        return min(1.0, self.capacity / self.wanted) if self.wanted else 1.0


@dataclass(eq=False)
class _Work:
    left_s: float
    least_s: float  # as much as counts as nothing
    wants: Mapping[Pool, float]
    done: simpy.Event
    speed: float = field(default=1.0)


class Sharing:
    """All work that is under way. Knows what it wants, not what it is."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._work: list[_Work] = []
        self._last = env.now
        self._version = 0

    def work(self, seconds: float, wants: Mapping[Pool, float]) -> simpy.Event:
        """Return an event that comes when work has been done that takes so long at full speed."""
        done = self._env.event()
        if seconds <= 0:
            return done.succeed()
        self._advance()
        self._work.append(_Work(seconds, seconds * _DONE, wants, done))
        for pool, amount in wants.items():
            pool.wanted += amount
        self._plan_next()
        return done

    def occupy(self, pool: Pool, amount: float) -> None:
        """Want so much more of a pool from now on, without end; a negative amount takes that back."""
        self._advance()
        pool.wanted = max(pool.wanted + amount, 0.0)
        self._plan_next()

    @property
    def under_way(self) -> int:
        """How much work has not ended."""
        return len(self._work)

    def _advance(self) -> None:
        elapsed, self._last = self._env.now - self._last, self._env.now
        for work in self._work:
            work.left_s -= elapsed * work.speed

    def _plan_next(self) -> None:
        self._version += 1
        for work in self._work:
            work.speed = min((pool.speed for pool in work.wants), default=1.0)
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
            for pool, amount in work.wants.items():
                pool.wanted = 0.0 if math.isclose(pool.wanted, amount) else pool.wanted - amount
            work.done.succeed()
        self._plan_next()
