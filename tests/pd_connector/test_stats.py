"""Statistics: counted in one process, added up over ranks, exported under the documented names.

Covers: pd_connector.vllm.metrics.
"""

import json
import re
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from pd_connector.connector import PDConnector
from pd_connector.orders import Cause
from pd_connector.stats import HOST_COPIES, LABELS, PHASES, StatsRecorder, nothing
from pd_connector.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from tests.support.connector.vllm_calls import as_sent
from tests.support.sources import modules, source_file
from tests.support.waiting import ManualClock


def a_report(pulls: int, seconds: float, call_s: float) -> ConnectorStats:
    recorder = StatsRecorder()
    recorder.count("pulls", pulls)
    recorder.count("pull_failures", pulls, "lease")
    for _ in range(pulls):
        recorder.observe("read", seconds)
    data = recorder.take()
    assert data is not None
    data["calls"]["worker.get_transfer_results"] = call_s
    return ConnectorStats(data)


def test_nothing_recorded_is_no_report() -> None:
    assert StatsRecorder().take() is None


def test_a_report_holds_what_happened_since_the_last_one() -> None:
    recorder = StatsRecorder()
    recorder.count("pulls")
    recorder.count("pulls", 2)
    recorder.count("leases", 3, "granted")
    recorder.observe("read", 0.25)
    recorder.gauge("host_blocks_cached", 7)
    report = recorder.take()
    assert report is not None
    assert report == {
        "counts": {"pulls": 3, "leases:granted": 3},
        "seconds": {"read": [0.25]},
        "gauges": {"host_blocks_cached": 7},
        "calls": {},
    }
    assert recorder.take() is None


def test_a_gauge_that_has_not_changed_is_not_reported_again() -> None:
    recorder = StatsRecorder()
    reported = []
    for number in (0, 0, 5, 5, 0):
        recorder.gauge("host_blocks_cached", number)
        report = recorder.take()
        reported.append(report["gauges"]["host_blocks_cached"] if report else None)
    assert reported == [0, None, 5, None, 0]


def test_a_gauge_of_a_rank_is_reported_as_long_as_it_is_not_zero() -> None:
    recorder = StatsRecorder()
    reported = []
    for number in (0, 5, 5, 0, 0):
        recorder.gauge_of_rank("quarantined_blocks", number)
        report = recorder.take()
        reported.append(report["gauges"]["quarantined_blocks"] if report else None)
    assert reported == [None, 5, 5, 0, None]


def test_a_gauge_of_a_rank_is_the_sum_of_its_owners() -> None:
    recorder = StatsRecorder()
    reported = []
    for one, other in ((40, 0), (40, 7), (0, 7), (0, 0), (0, 0)):
        recorder.gauge_of_rank("quarantined_blocks", one, "landings")
        recorder.gauge_of_rank("quarantined_blocks", other, "pulls")
        report = recorder.take()
        reported.append(report["gauges"]["quarantined_blocks"] if report else None)
    assert reported == [40, 47, 7, 0, None]


def test_an_owner_without_a_share_is_forgotten() -> None:
    """Each sleep makes new ones."""
    recorder = StatsRecorder()
    for number in range(100):
        recorder.gauge_of_rank("quarantined_blocks", 1, number)
        recorder.gauge_of_rank("quarantined_blocks", 0, number)
    assert recorder._shares == {"quarantined_blocks": {}}


@pytest.mark.parametrize("numbers", [(5, 3), (3, 5), (5, 0), (0, 5)])
def test_of_a_gauge_of_ranks_the_largest_counts(numbers: tuple[int, int]) -> None:
    one, other = (ConnectorStats({**nothing(), "gauges": {"quarantined_blocks": number}}) for number in numbers)
    assert one.aggregate(other).data["gauges"] == {"quarantined_blocks": 5}


def test_counting_none_is_no_event() -> None:
    recorder = StatsRecorder()
    recorder.count("pull_bytes", 0)
    assert recorder.take() is None


def test_a_report_is_not_changed_by_what_is_recorded_after_it() -> None:
    recorder = StatsRecorder()
    recorder.count("pulls")
    recorder.observe("read", 1.0)
    report = recorder.take()
    recorder.count("pulls")
    recorder.observe("read", 2.0)
    assert report is not None
    assert report["counts"] == {"pulls": 1}
    assert report["seconds"] == {"read": [1.0]}


def test_only_a_longer_call_than_ever_is_reported() -> None:
    clock = ManualClock()
    recorder = StatsRecorder(clock)
    reported = []
    for seconds in (0.5, 0.25, 0.5, 0.75):
        with recorder.timed("worker.handle"):
            clock.advance(seconds)
        report = recorder.take()
        reported.append(report["calls"]["worker.handle"] if report else None)
    assert reported == [0.5, None, None, 0.75]


def test_a_call_that_raises_is_timed_too() -> None:
    clock = ManualClock()
    recorder = StatsRecorder(clock)

    def call() -> None:
        with recorder.timed("worker.handle"):
            clock.advance(2.0)
            raise KeyError

    with pytest.raises(KeyError):
        call()
    report = recorder.take()
    assert report is not None
    assert report["calls"] == {"worker.handle": 2.0}


def test_ranks_are_added_up_and_the_longest_call_kept() -> None:
    total = a_report(1, 0.1, 0.5).aggregate(a_report(2, 0.4, 0.2))
    assert total.data == {
        "counts": {"pulls": 3, "pull_failures:lease": 3},
        "seconds": {"read": [0.1, 0.4, 0.4]},
        "gauges": {},
        "calls": {"worker.get_transfer_results": 0.5},
    }


def test_adding_up_leaves_the_other_report_alone() -> None:
    empty, other = ConnectorStats(), a_report(1, 0.1, 0.5)
    empty.aggregate(other)
    empty.aggregate(a_report(1, 0.2, 0.6))
    assert other.data == a_report(1, 0.1, 0.5).data


def test_an_empty_report_says_so_and_adds_nothing() -> None:
    assert ConnectorStats().is_empty()
    assert ConnectorStats({}).is_empty()
    report = a_report(1, 0.1, 0.5)
    assert not report.is_empty()
    assert report.aggregate(ConnectorStats()).data == a_report(1, 0.1, 0.5).data
    report.reset()
    assert report.is_empty()


def test_the_log_line_has_one_number_a_name() -> None:
    assert a_report(2, 0.25, 0.5).reduce() == {"pulls": 2, "pull_failures:lease": 2, "read mean (ms)": 250.0}
    assert ConnectorStats().reduce() == {}
    only_gauges = ConnectorStats({**nothing(), "gauges": {"leases_active": 2}})
    assert only_gauges.reduce() == {"leases_active": 2}, "before 0.33, vLLM logs a line of nothing as well"


def test_a_report_travels_between_processes_as_plain_data() -> None:
    report = a_report(2, 0.25, 0.5)
    for travelled in (
        json.loads(json.dumps(as_sent(report))),
        msgspec.msgpack.decode(msgspec.msgpack.encode(as_sent(report))),
    ):
        assert PDConnector.build_kv_connector_stats(travelled) == report
    assert PDConnector.build_kv_connector_stats(None) is None


class _Unregistered:
    """Metric classes of prometheus_client that keep off the process's registry, by the name vLLM asks for."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def types(self) -> dict[Any, Any]:
        return {kind: self._maker(kind) for kind in (Counter, Gauge, Histogram)}

    def _maker(self, kind: Any) -> Any:
        def make(**arguments: Any) -> Any:
            metric = self.made[arguments["name"]] = kind(**arguments, registry=None)
            return metric

        return make

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """By sample name and values of its labels."""
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for metric in self.made.values()
            for family in metric.collect()
            for sample in family.samples
            if not sample.name.endswith(("_created", "_bucket"))
        }


@pytest.fixture
def exported() -> tuple[ConnectorPromMetrics, _Unregistered]:
    vllm_config = type("Config", (), {"kv_transfer_config": None})()
    metrics = _Unregistered()
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    made = PDConnector.build_prom_metrics(vllm_config, metrics.types(), ["model_name", "engine"], engines)
    return made, metrics


def test_the_exported_names_are_these(exported: tuple[ConnectorPromMetrics, _Unregistered]) -> None:
    assert exported[1].made.keys() == {
        "vllm:pd_pulls",
        "vllm:pd_pull_bytes",
        "vllm:pd_pull_descriptors",
        "vllm:pd_pull_tokens",
        "vllm:pd_pulls_ahead",
        "vllm:pd_pull_bytes_ahead",
        "vllm:pd_pull_restarts",
        "vllm:pd_pull_bytes_from_host",
        "vllm:pd_pull_bytes_over_ipc",
        "vllm:pd_landed_bytes",
        "vllm:pd_canaries",
        "vllm:pd_peers_refused",
        "vllm:pd_landings",
        "vllm:pd_landing_fallbacks",
        "vllm:pd_landings_under_way",
        "vllm:pd_lease_moves",
        "vllm:pd_lease_blocks_moved",
        "vllm:pd_leases_in_host",
        "vllm:pd_host_tokens",
        "vllm:pd_host_blocks",
        "vllm:pd_host_bytes",
        "vllm:pd_host_failures",
        "vllm:pd_host_copy_seconds",
        "vllm:pd_host_blocks_cached",
        "vllm:pd_host_blocks_lent",
        "vllm:pd_host_blocks_capacity",
        "vllm:pd_leases_active",
        "vllm:pd_lease_oldest_age_seconds",
        "vllm:pd_leased_blocks",
        "vllm:pd_quarantined_blocks",
        "vllm:pd_pull_failures",
        "vllm:pd_prompts_computed",
        "vllm:pd_transfers",
        "vllm:pd_prefixes",
        "vllm:pd_prefixes_served",
        "vllm:pd_prefix_tokens",
        "vllm:pd_prefix_bytes",
        "vllm:pd_pool_prompts",
        "vllm:pd_pool_tokens",
        "vllm:pd_pool_blocks",
        "vllm:pd_pool_bytes",
        "vllm:pd_pool_failures",
        "vllm:pd_pool_works",
        "vllm:pd_transfers_waiting",
        "vllm:pd_prompts_ahead",
        "vllm:pd_leases",
        "vllm:pd_control_refusals",
        "vllm:pd_pull_seconds",
        "vllm:pd_connector_call_seconds_max",
    }
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("vllm:pd_")]


def test_pulls_are_exported_as_zero_before_the_first(exported: tuple[ConnectorPromMetrics, _Unregistered]) -> None:
    assert exported[1].samples()["vllm:pd_pulls_total", ("m", "1")] == 0


def test_a_pull_that_has_taken_longer_than_a_minute_has_a_bucket(
    exported: tuple[ConnectorPromMetrics, _Unregistered],
) -> None:
    """While the prompt is computed, progress restarts the clock. Beyond the last bucket, no quantile says how long."""
    metrics, prometheus = exported
    metrics.observe(nothing() | {"seconds": {"total": [70.0]}})
    (family,) = prometheus.made["vllm:pd_pull_seconds"].collect()
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket") and sample.value]
    assert bounds == ["120.0", "300.0", "+Inf"]


@pytest.mark.parametrize(
    ("counter", "label"),
    [
        ("pull_failures", "checksum"),
        ("prompts_computed", "transfer"),
        ("prompts_computed", "unusable"),
        ("leases", "granted"),
        ("leases", "expired"),
        ("host_bytes", "loaded"),
        ("host_failures", "store"),
        ("landings", "failed"),
        ("landing_fallbacks", "full"),
        ("lease_moves", "read"),
        ("lease_blocks_moved", "present"),
        ("pool_prompts", "failed"),
        ("pool_blocks", "refused"),
        ("pool_failures", "put"),
    ],
)
def test_what_can_be_counted_by_a_label_is_exported_as_zero_before_it_happens(
    exported: tuple[ConnectorPromMetrics, _Unregistered], counter: str, label: str
) -> None:
    """Or the first failure would raise no alert."""
    assert exported[1].samples()[f"vllm:pd_{counter}_total", ("m", "1", label)] == 0


def test_all_causes_for_which_the_scheduler_side_refuses_a_pull_are_labels_of_computed_prompts() -> None:
    sources = (source_file(module).read_text() for module in modules("pd_connector.scheduler"))
    named = {Cause[name] for source in sources for name in re.findall(r"\bCause\.([A-Z]+)\b", source)}
    assert named - {Cause.NONE} <= set(LABELS["prompts_computed"])


def test_reports_are_exported_for_their_engine(exported: tuple[ConnectorPromMetrics, _Unregistered]) -> None:
    metrics, prometheus = exported
    metrics.observe(as_sent(a_report(2, 0.25, 0.5)), engine_idx=1)
    metrics.observe(as_sent(a_report(1, 0.5, 0.125)), engine_idx=1)
    samples = prometheus.samples()
    assert samples["vllm:pd_pulls_total", ("m", "1")] == 3
    assert samples["vllm:pd_pulls_total", ("m", "0")] == 0
    assert samples["vllm:pd_pull_failures_total", ("m", "1", "lease")] == 3
    assert samples["vllm:pd_pull_seconds_count", ("m", "1", "read")] == 3
    assert samples["vllm:pd_pull_seconds_sum", ("m", "1", "read")] == 1.0
    assert samples["vllm:pd_connector_call_seconds_max", ("m", "1", "worker.get_transfer_results")] == 0.5


def test_durations_are_there_before_the_first_one(exported: tuple[ConnectorPromMetrics, _Unregistered]) -> None:
    """A rate needs a sample from before: what comes between two scrapes would otherwise be lost."""
    samples = exported[1].samples()
    for engine in ("0", "1"):
        for phase in PHASES:
            assert samples["vllm:pd_pull_seconds_count", ("m", engine, phase)] == 0
        for kind in HOST_COPIES:
            assert samples["vllm:pd_host_copy_seconds_count", ("m", engine, kind)] == 0


def test_everything_that_is_counted_can_be_exported(exported: tuple[ConnectorPromMetrics, _Unregistered]) -> None:
    recorder = StatsRecorder()
    for name in (
        "pulls",
        "pull_bytes",
        "pull_descriptors",
        "pull_tokens",
        "pulls_ahead",
        "pull_bytes_ahead",
        "pull_restarts",
    ):
        recorder.count(name, 5)
    for cause in ("unreachable", "refused", "incompatible", "params", "read", "timeout", "lease", "unconfirmed"):
        recorder.count("pull_failures", 1, cause)
    for event in ("granted", "released", "cancelled", "expired"):
        recorder.count("leases", 1, event)
    for event in ("stored", "loaded"):
        recorder.count("host_bytes", 1, event)
    for kind in HOST_COPIES:
        recorder.count("host_failures", 1, kind)
    for phase in (*PHASES, *HOST_COPIES):
        recorder.observe(phase, 0.1)
    recorder.gauge("host_blocks_cached", 3)
    recorder.gauge("host_blocks_capacity", 4)
    report = recorder.take()
    assert report is not None
    exported[0].observe(as_sent(ConnectorStats(report)))
    samples = exported[1].samples()
    assert samples["vllm:pd_leases_total", ("m", "0", "expired")] == 1
    assert samples["vllm:pd_host_blocks_cached", ("m", "0")] == 3
    assert samples["vllm:pd_host_copy_seconds_count", ("m", "0", "load")] == 1
    assert ("vllm:pd_pull_seconds_count", ("m", "0", "load")) not in samples


def test_the_latest_gauge_counts() -> None:
    reports = []
    for number in (3, 9):
        recorder = StatsRecorder()
        recorder.gauge("host_blocks_cached", number)
        reports.append(ConnectorStats(recorder.take()))
    assert reports[0].aggregate(reports[1]).data["gauges"] == {"host_blocks_cached": 9}
