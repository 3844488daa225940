"""How fast this engine computes prompts, as its steps show: the measure of what is worth waiting for."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Steps of fewer tokens say little of how fast prompts are computed.
_LEAST_TOKENS = 256
#: Weight of a step that is slower than those before: it may have ended long before that was noticed.
_WEIGHT = 0.1
_UNKNOWN_S, _LEAST_S, _MOST_S = 1.0, 0.05, 10.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that may still be under way."""

    tokens: int
    prompts: frozenset[str]  # requests of which it computes a large part of the prompt, or what follows one
    scheduled_at: float


class ComputeRate:
    """The tokens a second of the engine's steps. Belongs to the scheduler's thread.

    vLLM schedules steps before those ahead of them have ended, and none behind the last request. So a step has ended
    when as many as can be under way have been scheduled behind it, or when a request whose prompt it computes has.
    """

    def __init__(self, steps_in_flight: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet.

        Args:
            steps_in_flight: how many steps are scheduled at most before the first of them has ended.
            clock: monotonic, in seconds.
        """
        self._in_flight = steps_in_flight
        self._clock = clock
        self._per_second = 0.0
        self._steps: deque[_Step] = deque()  # the oldest first
        self._free_at = clock()  # since when the device works on the oldest, if it was scheduled by then

    def step(self, scheduled: Mapping[str, int]) -> None:
        """Note that a step is scheduled that computes so many tokens of each request."""
        before = self._steps[-1].prompts if self._steps else ()
        prompts = frozenset(
            request_id
            for request_id, tokens in scheduled.items()
            if tokens >= _LEAST_TOKENS or (tokens > 1 and request_id in before)
        )
        self._steps.append(_Step(sum(scheduled.values()), prompts, self._clock()))
        if len(self._steps) > self._in_flight:
            self._end(1)

    def answered(self, request_id: str) -> None:
        """Note that a request has ended with an answer: what computes its prompt has ended."""
        last = max((number for number, step in enumerate(self._steps, 1) if request_id in step.prompts), default=0)
        if last:
            self._end(last)

    def seconds_for(self, tokens: int) -> float:
        """Return how long computing ``tokens`` takes, about: between 0.05 and 10 s, and 1 s if that is not known."""
        if not self._per_second:
            return _UNKNOWN_S
        return min(max(tokens / self._per_second, _LEAST_S), _MOST_S)

    def _end(self, number: int) -> None:
        """Note that the first ``number`` steps have ended."""
        ended = [self._steps.popleft() for _ in range(number)]
        now, free_at = self._clock(), self._free_at
        self._free_at = now
        tokens = sum(step.tokens for step in ended)
        if tokens < _LEAST_TOKENS:
            return
        took = now - max(free_at, next(step.scheduled_at for step in ended if step.tokens))
        if took <= 0:
            return
        new = tokens / took
        self._per_second = max(new, (1 - _WEIGHT) * self._per_second + _WEIGHT * new)
