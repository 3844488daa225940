"""Counters and histograms of the connector, through vLLM's KV connector stats and its Prometheus endpoint.

Workers and the scheduler half count in their own process; vLLM carries what they counted in a step to the API server
process, adds it up over the ranks, logs it and exports it.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from pd_connector.metadata import Cause
from pd_connector.scheduler.leases import LeaseEnd
from pd_connector.vllm_compat import KVConnectorPromMetrics, KVConnectorStats
from transfer.control.server import ServerCounters

PHASES = ("queue", "handshake", "plan", "read", "verify", "release", "total")
HOST_COPIES = ("store", "load")

_COUNTERS = {
    "pulls": "Pulls that brought all blocks, counted on every rank.",
    "pull_bytes": "Bytes of KV cache pulled.",
    "pull_descriptors": "Transfer descriptors of all pulls.",
    "pull_tokens": "Prompt tokens whose KV cache was pulled, counted on every rank.",
    "host_tokens": "Prompt tokens whose KV cache was loaded from host memory.",
    "host_blocks": "Blocks stored in host memory.",
}
_LABELLED = {
    "pull_failures": ("cause", "Pulls that failed, by cause."),
    "leases": ("event", "Leases granted and ended on this prefill engine, by event."),
    "host_bytes": ("event", "Bytes copied between the device and host memory on all ranks, by event: stored, loaded."),
    "host_failures": ("event", "Copies to and from host memory that failed on a rank, by event: store, load."),
    "control_refusals": ("cause", "Connections and messages that the control channel refused, by cause."),
}
#: The labels' values. A counter that came into being with its first event would hide that event from rate() and alerts.
_LABELS: dict[str, tuple[str, ...]] = {
    "pull_failures": tuple(cause.value for cause in Cause if cause is not Cause.NONE),
    "leases": ("granted", *(end.value for end in LeaseEnd)),
    "host_bytes": ("stored", "loaded"),
    "host_failures": HOST_COPIES,
    "control_refusals": tuple(ServerCounters().refusals),
}

_GAUGES = {
    "host_blocks_cached": "Blocks in host memory that can be found.",
    "host_blocks_capacity": "Blocks that host memory has room for.",
}


def metric_names() -> list[str]:
    """The names of all metrics, without Prometheus' suffixes."""
    names = [*_COUNTERS, *_LABELLED, *_GAUGES, "pull_seconds", "host_copy_seconds", "connector_call_seconds_max"]
    return [f"vllm:pd_{name}" for name in names]


class ConnectorStats(KVConnectorStats):
    """What happened since the last report: plain numbers, so that any process can read it.

    ``data`` holds ``counts`` (name to number; labelled ones as "name:label"), ``seconds`` (phase of a pull, or kind of
    a host copy, to list of durations), ``gauges`` (name to the latest number) and ``calls`` (connector call to its
    longest duration in seconds, over the whole life of the process).
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or _nothing())

    def reset(self) -> None:
        """Forget everything."""
        self.data = _nothing()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank or interval counted."""
        for name, number in other.data["counts"].items():
            self.data["counts"][name] = self.data["counts"].get(name, 0) + number
        for phase, durations in other.data["seconds"].items():
            self.data["seconds"].setdefault(phase, []).extend(durations)
        self.data["gauges"] |= other.data["gauges"]
        for call, seconds in other.data["calls"].items():
            self.data["calls"][call] = max(seconds, self.data["calls"].get(call, 0.0))
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number a name, for vLLM's log line."""
        reduced: dict[str, int | float] = dict(self.data["counts"])
        for phase, durations in self.data["seconds"].items():
            reduced[f"{phase} mean (ms)"] = round(1e3 * sum(durations) / len(durations), 3)
        return reduced


def _nothing() -> dict[str, Any]:
    return {"counts": {}, "seconds": {}, "gauges": {}, "calls": {}}


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

    def take(self) -> ConnectorStats | None:
        """What was recorded since the last call; None if nothing."""
        if not (self._counts or self._seconds or self._new_gauges or self._new_longest):
            return None
        data: dict[str, Any] = {
            "counts": dict(self._counts),
            "seconds": self._seconds,
            "gauges": self._new_gauges,
            "calls": self._new_longest,
        }
        self._counts, self._seconds, self._new_gauges, self._new_longest = Tally(), {}, {}, {}
        return ConnectorStats(data)


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Exports the statistics on vLLM's ``/metrics``, under names that start with ``vllm:pd_``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._counters = {
            name: metric_types[Counter](name=f"vllm:pd_{name}", documentation=text, labelnames=labelnames)
            for name, text in _COUNTERS.items()
        }
        self._counters |= {
            name: metric_types[Counter](name=f"vllm:pd_{name}", documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in _LABELLED.items()
        }
        self._phases = metric_types[Histogram](
            name="vllm:pd_pull_seconds",
            documentation="Duration of a pull on one rank, by phase.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            labelnames=[*labelnames, "phase"],
        )
        self._host_copies = metric_types[Histogram](
            name="vllm:pd_host_copy_seconds",
            documentation="From the order of a copy between the device and host memory to its end, on one rank, by "
            "kind. The end on a device is seen in the step after it.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
            labelnames=[*labelnames, "kind"],
        )
        self._gauges = {
            name: metric_types[Gauge](
                name=f"vllm:pd_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in _GAUGES.items()
        }
        self._calls = metric_types[Gauge](
            name="vllm:pd_connector_call_seconds_max",
            documentation="Longest time that vLLM's scheduler or model thread spent in a connector call.",
            multiprocess_mode="max",
            labelnames=[*labelnames, "call"],
        )
        self._longest: dict[tuple[int, str], float] = {}
        for values in per_engine_labelvalues.values():
            for name in _COUNTERS:
                self._counters[name].labels(*values)  # exported as 0 before the first pull
            for name, labels in _LABELS.items():
                for label in labels:
                    self._counters[name].labels(*values, label)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report to the metrics."""
        values = self._labels[engine_idx]
        for key, number in transfer_stats_data["counts"].items():
            name, _, label = key.partition(":")
            self._counters[name].labels(*values, *([label] if label else [])).inc(number)
        for phase, durations in transfer_stats_data["seconds"].items():
            histogram = self._host_copies if phase in HOST_COPIES else self._phases
            for seconds in durations:
                histogram.labels(*values, phase).observe(seconds)
        for name, number in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*values).set(number)
        for call, seconds in transfer_stats_data["calls"].items():
            longest = max(seconds, self._longest.get((engine_idx, call), 0.0))
            self._longest[engine_idx, call] = longest
            self._calls.labels(*values, call).set(longest)
