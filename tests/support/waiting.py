"""Waiting for other threads and processes, and a clock that only moves when it is told to."""

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

#: How long a test waits for what must come: far longer than it takes on a busy machine.
WAIT_S = 30.0

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str | Callable[[], object] = "", *, within_s: float = WAIT_S) -> _T:
    """Wait until ``condition`` returns something true, and return that.

    It is asked often at first, then ever more seldom, at least every 50 ms.

    Args:
        what: What is waited for, for the message, or a function that tells how things stand when it has not come. If
            empty, the message has the source of ``condition``.

    Raises:
        AssertionError: the condition did not hold within ``within_s`` seconds.
    """
    started = time.monotonic()
    while not (result := condition()):
        waited_s = time.monotonic() - started
        if waited_s > within_s:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {within_s:g} s: {said or _source(condition)}")
        time.sleep(min(0.05, 0.001 + waited_s / 20))
    return result


def holds_for(condition: Callable[[], object], seconds: float) -> None:
    """Return when ``condition`` has held for so long; raise AssertionError as soon as it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"held for less than {seconds:g} s: {_source(condition)}"
        time.sleep(0.002)


def _source(condition: Callable[[], object]) -> str:
    name = getattr(condition, "__qualname__", repr(condition))
    if not name.endswith("<lambda>"):
        return str(name)
    try:
        return " ".join(inspect.getsource(condition).split())
    except OSError:  # of code that is in no file
        return name


class ManualClock:
    """A monotonic clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
