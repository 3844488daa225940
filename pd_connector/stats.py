"""What the connector counts and measures, by name, and the recorder of one process.

Workers and the scheduler side record in their own process. vLLM carries what they recorded in a step to the API server,
where ``vllm.metrics`` exports it.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pd_connector.orders import Cause, LeaseEnd
from transfer.control.server import ServerCounters

PHASES = ("queue", "handshake", "plan", "read", "verify", "release", "total")
HOST_COPIES = ("store", "load")

COUNTERS = {
    "pulls": "Pulls that brought all blocks, counted on every rank.",
    "pull_bytes": "Bytes of KV cache pulled.",
    "pull_descriptors": "Transfer descriptors of all pulls.",
    "pull_tokens": "Prompt tokens whose KV cache was pulled, counted on every rank.",
    "host_tokens": "Prompt tokens whose KV cache was loaded from host memory.",
    "host_blocks": "Blocks stored in host memory.",
}
LABELLED = {
    "pull_failures": ("cause", "Pulls that failed, by cause."),
    "leases": ("event", "Leases granted and ended on this prefill engine, by event."),
    "host_bytes": ("event", "Bytes copied between the device and host memory on all ranks, by event: stored, loaded."),
    "host_failures": ("event", "Copies to and from host memory that failed on a rank, by event: store, load."),
    "control_refusals": ("cause", "Connections and messages that the control channel refused, by cause."),
}
#: The labels' values. A counter that came into being with its first event would hide that event from rate() and alerts.
LABELS: dict[str, tuple[str, ...]] = {
    "pull_failures": tuple(cause.value for cause in Cause if cause is not Cause.NONE),
    "leases": ("granted", *(end.value for end in LeaseEnd)),
    "host_bytes": ("stored", "loaded"),
    "host_failures": HOST_COPIES,
    "control_refusals": tuple(ServerCounters().refusals),
}

GAUGES = {
    "host_blocks_cached": "Blocks in host memory that can be found.",
    "host_blocks_capacity": "Blocks that host memory has room for.",
}


def metric_names() -> list[str]:
    """The names of all metrics, without Prometheus' suffixes."""
    names = [*COUNTERS, *LABELLED, *GAUGES, "pull_seconds", "host_copy_seconds", "connector_call_seconds_max"]
    return [f"vllm:pd_{name}" for name in names]


class StatsRecorder:
    """Collects one process's statistics between two reports.

    Belongs to the thread that vLLM calls the connector on; other threads hand over their numbers through the queues
    that their results travel in.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counts: Tally[str] = Tally()
        self._seconds: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}
        self._new_gauges: dict[str, float] = {}
        self._longest_calls: dict[str, float] = {}
        self._new_longest: dict[str, float] = {}

    def count(self, name: str, number: int = 1, label: str = "") -> None:
        """Add to a counter; ``label`` is the value of its one label, if it has one."""
        if number:
            self._counts[f"{name}:{label}" if label else name] += number

    def observe(self, phase: str, seconds: float) -> None:
        """Add a duration to the histogram of a pull's phases, or of host copies."""
        self._seconds.setdefault(phase, []).append(seconds)

    def gauge(self, name: str, number: float) -> None:
        """Set a gauge."""
        if self._gauges.get(name) != number:
            self._gauges[name] = self._new_gauges[name] = number

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Measure a connector call's wall time and keep the longest."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            if seconds > self._longest_calls.get(call, 0.0):
                self._longest_calls[call] = self._new_longest[call] = seconds

    def take(self) -> dict[str, Any] | None:
        """Return what was recorded since the last call, see ``nothing``; None if nothing was."""
        if not (self._counts or self._seconds or self._new_gauges or self._new_longest):
            return None
        data = {
            "counts": dict(self._counts),
            "seconds": self._seconds,
            "gauges": self._new_gauges,
            "calls": self._new_longest,
        }
        self._counts, self._seconds, self._new_gauges, self._new_longest = Tally(), {}, {}, {}
        return data


def nothing() -> dict[str, Any]:
    """Return statistics in which nothing happened, in the form in which they travel between processes.

    ``counts`` (name to number; labelled ones as "name:label"), ``seconds`` (phase of a pull, or kind of a host copy, to
    list of durations), ``gauges`` (name to the latest number) and ``calls`` (connector call to its longest duration in
    seconds, over the whole life of the process).
    """
    return {"counts": {}, "seconds": {}, "gauges": {}, "calls": {}}
