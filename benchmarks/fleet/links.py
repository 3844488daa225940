"""The links of simulated engines: reads that go over one share its rate alike."""

from collections import Counter
from dataclasses import dataclass

import simpy

_DONE = 1e-9  # of its seconds; what is left of a read that has ended, by rounding


class Link:
    """Of one engine."""


@dataclass(eq=False)
class _Read:
    left_s: float
    least_s: float  # as much as counts as nothing
    links: tuple[Link, Link]
    done: simpy.Event
    speed: float = 1.0


class Links:
    """All reads that are under way. Each goes as fast as the busier of its two links lets it."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._reads: list[_Read] = []
        self._last = env.now
        self._version = 0

    def read(self, seconds: float, source: Link, target: Link) -> simpy.Event:
        """Return an event that comes when what takes so long alone has been read over two engines' links."""
        done = self._env.event()
        if seconds <= 0:
            return done.succeed()
        self._advance()
        self._reads.append(_Read(seconds, seconds * _DONE, (source, target), done))
        self._plan_next()
        return done

    def _advance(self) -> None:
        elapsed, self._last = self._env.now - self._last, self._env.now
        for read in self._reads:
            read.left_s -= elapsed * read.speed

    def _plan_next(self) -> None:
        self._version += 1
        used = Counter(link for read in self._reads for link in read.links)
        for read in self._reads:
            read.speed = 1 / max(used[link] for link in read.links)
        if self._reads:
            version = self._version
            due_s = max(min(read.left_s / read.speed for read in self._reads), 0.0)
            timer = self._env.timeout(due_s)
            timer.callbacks.append(lambda _: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # something has changed since, and there is another timer
        self._advance()
        shortest = min(read.left_s for read in self._reads)
        ended = [read for read in self._reads if read.left_s <= max(read.least_s, shortest)]
        self._reads = [read for read in self._reads if read not in ended]
        for read in ended:
            read.done.succeed()
        self._plan_next()
