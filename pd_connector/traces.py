"""How a pull has passed, as data: for whoever writes traces. Imports no vLLM, and nothing of a tracing library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Lap(NamedTuple):
    """A phase of a pull, once. Times are monotonic seconds."""

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class PullTrace:
    """A pull of one rank that has ended. ``cause`` is empty if it has not failed."""

    request_id: str
    traceparent: str  # of the request's trace
    source: str  # host and port of the prefill engine's control channel
    lease_id: str
    started: float  # monotonic seconds
    laps: tuple[Lap, ...]
    cause: str = ""
    reason: str = ""  # for people
    figures: Mapping[str, int] = field(default_factory=dict)  # what was moved, by name


TracePull = Callable[[PullTrace], None]
