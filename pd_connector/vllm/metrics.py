"""The connector's statistics in vLLM's classes, and as metrics on vLLM's Prometheus endpoint."""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pd_connector.stats import COUNTERS, GAUGES, GAUGES_OF_RANKS, HOST_COPIES, LABELLED, LABELS, PHASES, nothing


class ConnectorStats(KVConnectorStats):
    """Statistics since the last report. Plain numbers in the form of ``stats.nothing``, readable in any process."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or nothing())

    def reset(self) -> None:
        """Clear all statistics."""
        self.data = nothing()

    def is_empty(self) -> bool:
        """Return whether nothing was recorded."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the statistics of another rank or interval."""
        for name, number in other.data["counts"].items():
            self.data["counts"][name] = self.data["counts"].get(name, 0) + number
        for phase, durations in other.data["seconds"].items():
            self.data["seconds"].setdefault(phase, []).extend(durations)
        for name, number in other.data["gauges"].items():
            before = self.data["gauges"].get(name, 0.0) if name in GAUGES_OF_RANKS else number
            self.data["gauges"][name] = max(before, number)
        for call, seconds in other.data["calls"].items():
            self.data["calls"][call] = max(seconds, self.data["calls"].get(call, 0.0))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a number for each name, for vLLM's log line."""
        reduced: dict[str, int | float] = dict(self.data["counts"])
        for phase, durations in self.data["seconds"].items():
            reduced[f"{phase} mean (ms)"] = round(1e3 * sum(durations) / len(durations), 3)
        return reduced or self.data["gauges"] | self.data["calls"]  # before 0.33, vLLM logs a line also of nothing


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Exports the statistics on vLLM's ``/metrics``, as names that start with ``vllm:pd_``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        texts = {name: (text, labelnames) for name, text in COUNTERS.items()}
        texts |= {name: (text, [*labelnames, label]) for name, (label, text) in LABELLED.items()}
        self._counters = {
            name: metric_types[Counter](name=f"vllm:pd_{name}", documentation=text, labelnames=names)
            for name, (text, names) in texts.items()
        }
        self._phases = metric_types[Histogram](
            name="vllm:pd_pull_seconds",
            documentation="Duration of a pull on one rank, by phase.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
            labelnames=[*labelnames, "phase"],
        )
        self._host_copies = metric_types[Histogram](
            name="vllm:pd_host_copy_seconds",
            documentation="From the order of a copy between the device and host memory to its end, on one rank, by "
            "kind. On a device, the end is noticed in the step after it.",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
            labelnames=[*labelnames, "kind"],
        )
        self._gauges = {
            name: metric_types[Gauge](
                name=f"vllm:pd_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in (GAUGES | GAUGES_OF_RANKS).items()
        }
        self._calls = metric_types[Gauge](
            name="vllm:pd_connector_call_seconds_max",
            documentation="Longest time that vLLM's scheduler or model thread spent in each connector call.",
            multiprocess_mode="max",
            labelnames=[*labelnames, "call"],
        )
        self._longest: dict[tuple[int, str], float] = {}
        for values in per_engine_labelvalues.values():
            for name in COUNTERS:
                self._counters[name].labels(*values)  # exported as 0 before the first event
            for name in GAUGES_OF_RANKS:
                self._gauges[name].labels(*values)
            for name, labels in LABELS.items():
                for label in labels:
                    self._counters[name].labels(*values, label)
            for phase in PHASES:
                self._phases.labels(*values, phase)
            for kind in HOST_COPIES:
                self._host_copies.labels(*values, kind)

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
