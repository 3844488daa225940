"""How fast this engine computes prompts, as its steps show: the measure of what is worth waiting for."""

import time
from collections.abc import Callable

#: Steps of fewer tokens say little of how fast prompts are computed.
_LEAST_TOKENS = 256
#: Weight of a step that is slower than those before: it may have ended long before the next one began.
_WEIGHT = 0.1
_UNKNOWN_S, _LEAST_S, _MOST_S = 1.0, 0.05, 10.0


class ComputeRate:
    """The tokens a second of the engine's steps. Belongs to the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet. ``clock``: monotonic, in seconds."""
        self._clock = clock
        self._per_second = 0.0
        self._last: tuple[int, float] | None = None  # tokens of the last step, and when it was scheduled

    def step(self, tokens: int) -> None:
        """Note that a step of so many tokens is scheduled, and the one before has ended or soon will."""
        now = self._clock()
        if self._last is not None and now > self._last[1]:
            new = self._last[0] / (now - self._last[1])
            self._per_second = max(new, (1 - _WEIGHT) * self._per_second + _WEIGHT * new)
        self._last = (tokens, now) if tokens >= _LEAST_TOKENS else None

    def seconds_for(self, tokens: int) -> float:
        """Return how long computing ``tokens`` takes, about: between 0.05 and 10 s, and 1 s if that is not known."""
        if not self._per_second:
            return _UNKNOWN_S
        return min(max(tokens / self._per_second, _LEAST_S), _MOST_S)
