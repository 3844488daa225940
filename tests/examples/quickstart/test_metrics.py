"""What is read out of the servers' metrics."""

import pytest

from examples.quickstart.metrics import Work, parse, work_between

LABELS = 'engine="0",model_name="demo"'


def exposition(**values: float) -> str:
    """The metrics of a decode server of two ranks, as vLLM writes them."""
    get = {"computed": 0.0, "pulled": 0.0, "cached": 0.0, "pulls": 0.0, "failed": 0.0, "requests": 0.0} | values
    return f"""
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{{LABELS},source="local_compute"}} {get["computed"]}
vllm:prompt_tokens_by_source_total{{{LABELS},source="local_cache_hit"}} {get["cached"]}
vllm:prompt_tokens_by_source_total{{{LABELS},source="external_kv_transfer"}} {get["pulled"]}
# HELP vllm:request_success_total Finished requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{{LABELS},finished_reason="stop"}} {get["requests"]}
vllm:request_success_total{{{LABELS},finished_reason="length"}} 1.0
# HELP vllm:request_decode_time_seconds Decode time.
# TYPE vllm:request_decode_time_seconds histogram
vllm:request_decode_time_seconds_bucket{{{LABELS},le="+Inf"}} {get["requests"]}
vllm:request_decode_time_seconds_count{{{LABELS}}} {get["requests"]}
vllm:request_decode_time_seconds_sum{{{LABELS}}} {get["requests"] * 0.5}
# HELP vllm:pd_pulls_total Pulls.
# TYPE vllm:pd_pulls_total counter
vllm:pd_pulls_total{{{LABELS}}} {get["pulls"]}
# HELP vllm:pd_pull_failures_total Failed pulls.
# TYPE vllm:pd_pull_failures_total counter
vllm:pd_pull_failures_total{{{LABELS},cause="timeout"}} {get["failed"]}
vllm:pd_pull_failures_total{{{LABELS},cause="lease"}} {get["failed"]}
# HELP vllm:pd_pull_bytes_total Bytes.
# TYPE vllm:pd_pull_bytes_total counter
vllm:pd_pull_bytes_total{{{LABELS}}} {get["pulls"] * 4e6:g}
# HELP vllm:pd_pull_descriptors_total Descriptors.
# TYPE vllm:pd_pull_descriptors_total counter
vllm:pd_pull_descriptors_total{{{LABELS}}} {get["pulls"] * 3}
# HELP vllm:pd_pull_seconds Duration of a pull.
# TYPE vllm:pd_pull_seconds histogram
vllm:pd_pull_seconds_bucket{{{LABELS},le="+Inf",phase="read"}} {get["pulls"]}
vllm:pd_pull_seconds_count{{{LABELS},phase="read"}} {get["pulls"]}
vllm:pd_pull_seconds_sum{{{LABELS},phase="read"}} {get["pulls"] * 0.002}
vllm:pd_pull_seconds_bucket{{{LABELS},le="+Inf",phase="total"}} {get["pulls"]}
vllm:pd_pull_seconds_count{{{LABELS},phase="total"}} {get["pulls"]}
vllm:pd_pull_seconds_sum{{{LABELS},phase="total"}} {get["pulls"] * 0.003}
# HELP vllm:pd_connector_call_seconds_max Longest call.
# TYPE vllm:pd_connector_call_seconds_max gauge
vllm:pd_connector_call_seconds_max{{{LABELS},call="worker.register_kv_caches"}} 0.9
vllm:pd_connector_call_seconds_max{{{LABELS},call="worker.start_load_kv"}} 0.0004
vllm:pd_connector_call_seconds_max{{{LABELS},call="scheduler.request_finished"}} 0.0007
"""


def test_work_is_the_difference_of_two_snapshots() -> None:
    before = parse(exposition(computed=100, pulls=2, requests=5, pulled=70))
    after = parse(exposition(computed=101, pulls=4, requests=6, pulled=170, cached=32, failed=1))
    work = work_between(before, after)
    assert work == Work(
        requests=1,
        computed_tokens=1,
        cached_tokens=32,
        pulled_tokens=100,
        pulls=2,
        failures=2,
        pull_bytes=8_000_000,
        descriptors=6,
        pull_s=work.pull_s,
        read_s=work.read_s,
        decode_s=work.decode_s,
    )
    assert (work.pull_s, work.read_s, work.decode_s) == pytest.approx((0.006, 0.004, 0.5))


def test_metrics_that_appear_between_snapshots_count_from_zero() -> None:
    work = work_between(parse(""), parse(exposition(pulls=1)))
    assert (work.pulls, work.pull_bytes) == (1, 4_000_000)


def test_a_server_without_the_connector_has_pulled_nothing() -> None:
    work = work_between(parse(""), parse("vllm:request_success_total 3\n"))
    assert (work.requests, work.pulls, work.pulled_tokens) == (3, 0, 0)


def test_total_sums_over_the_labels_that_are_not_named() -> None:
    snapshot = parse(exposition(failed=2, requests=4))
    assert snapshot.total("vllm:pd_pull_failures_total") == 4
    assert snapshot.total("vllm:pd_pull_failures_total", cause="lease") == 2
    assert snapshot.total("vllm:request_success_total", finished_reason="stop") == 4
    assert snapshot.total("vllm:no_such_metric") == 0


def test_the_longest_connector_call_leaves_registration_out() -> None:
    assert parse(exposition()).longest_connector_call() == ("scheduler.request_finished", 0.0007)
    assert parse("").longest_connector_call() is None


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match="html"):
        parse("<html>Not here</html>\n")
