"""P, D and the proxy send their spans to one collector: one trace a request, and none lost where a pull fails."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from tests.support.e2e.client import MODEL_NAME
from tests.support.e2e.cluster import Cluster, Server
from tests.support.e2e.deployments import decode, prefill
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.examples.harness import ProxyProcess
from tests.support.otlp import CollectedSpan, Collector
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.tracing]

PARENT = "b7ad6b7169203331"
#: From the request to its end, all that a pull without checksums has.
PHASES = {"queue", "handshake", "plan", "read", "release"}
VARIABLES = (("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"), ("OTEL_BSP_SCHEDULE_DELAY", "200"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(cluster: Cluster, collector: Collector) -> Iterator[tuple[Server, Server]]:
    """P and D, which trace."""
    arguments = ("--otlp-traces-endpoint", collector.endpoint)
    specs = [
        replace(prefill(), arguments=arguments, variables=VARIABLES),
        replace(decode("recompute", tensor_parallel=2), arguments=arguments, variables=VARIABLES),
    ]
    servers = cluster.start(specs)
    Pair(*servers).get_acquainted()  # so that the traces' prompts are pulled
    yield servers[0], servers[1]
    cluster.stop(servers)


@pytest.fixture
def proxy(traced: tuple[Server, Server], collector: Collector) -> Iterator[ProxyProcess]:
    p, d = (server.client.base_url for server in traced)
    arguments = ["-m", "pd_proxy", "--prefill", p, "--decode", d, "--otlp-traces-endpoint", collector.endpoint]
    with ProxyProcess(arguments, OTEL_BSP_SCHEDULE_DELAY="200") as proxy:
        yield proxy


def ask(proxy: ProxyProcess, trace: str, prompt: list[int]) -> None:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    answer = httpx.post(f"{proxy.url}/v1/completions", json=body, headers=headers, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text


def spans_of(collector: Collector, trace: str, count: int) -> list[CollectedSpan]:
    """The spans of a trace, once so many of them have come that are no phases."""

    def found() -> list[CollectedSpan]:
        return [span for span in collector.trace(trace) if not span.name.startswith("pd_pull.")]

    until(lambda: len(found()) >= count, lambda: f"{count} spans: {[one.name for one in found()]}")
    return collector.trace(trace)


def test_each_request_is_one_trace_over_both_legs(
    traced: tuple[Server, Server], proxy: ProxyProcess, collector: Collector
) -> None:
    ids = [f"{number:032x}" for number in range(1, 7)]
    ask(proxy, ids[0], make_prompt(200, ("traced", 0)))  # in turn; the others' legs go at once
    with ThreadPoolExecutor(3) as clients:
        list(clients.map(lambda trace: ask(proxy, trace, make_prompt(300, ("traced", trace))), ids[1:]))
    for trace in ids:
        # The request, its two legs, vLLM's two, the lease, and a pull of each of D's two ranks.
        spans = spans_of(collector, trace, 8)
        (request,) = [span for span in spans if span.name.startswith("POST ")]
        legs = {span.name: span for span in spans if span.name.endswith(" leg")}
        assert request.parent == PARENT
        assert {span.parent for span in legs.values()} == {request.id}
        assert sorted(span.parent for span in spans if span.name == "llm_request") == sorted(
            span.id for span in legs.values()
        )
        (lease,) = [span for span in spans if span.name == "pd_lease"]
        assert (lease.parent, lease.failed, lease.attributes["pd.end"]) == (legs["prefill leg"].id, False, "released")
        pulls = [span for span in spans if span.name == "pd_pull"]
        assert {span.parent for span in pulls} == {legs["decode leg"].id}
        assert sorted(span.attributes["pd.rank"] for span in pulls) == [0, 1]
        for pull in pulls:
            phases = [span for span in spans if span.parent == pull.id]
            assert {span.name.removeprefix("pd_pull.") for span in phases} - {"wait", "reshape"} == PHASES
            assert pull.attributes["pd.bytes"] > 0
            assert not pull.failed
            outside = [one for one in phases if not pull.start - 0.01 <= one.start <= one.end <= pull.end + 0.01]
            assert not outside, f"{outside}, of {pull}"
        # Clocks of one machine: the order of things.
        assert request.start <= lease.start <= max(pull.end for pull in pulls) <= request.end + 0.01


def test_no_span_is_lost_where_the_pull_fails(traced: tuple[Server, Server], collector: Collector) -> None:
    p, d = traced
    trace, prompt = f"{99:032x}", make_prompt(200, ("fails", time.monotonic()))
    params = p.client.prefill(prompt)
    http = httpx.Client(base_url=d.client.base_url, timeout=300, trust_env=False)
    spoilt = params | {"lease_id": "another"}
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": spoilt}
    answer = http.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{PARENT}-01"})
    http.close()
    assert answer.status_code == 200, answer.text  # D has computed it
    spans = spans_of(collector, trace, 3)
    pulls = [span for span in spans if span.name == "pd_pull"]
    assert [(span.failed, span.attributes["pd.cause"]) for span in pulls] == [(True, "lease")] * 2
    assert all("lease another" in span.message for span in pulls)


def test_a_request_without_a_trace_is_not_traced_by_the_connector(
    traced: tuple[Server, Server], collector: Collector
) -> None:
    p, d = traced
    prompt = make_prompt(200, ("untraced", time.monotonic()))
    before = collector.traces()
    completion = d.client.complete(prompt, 4, kv_transfer_params=p.client.prefill(prompt))
    assert completion.status == 200
    time.sleep(2.0)  # ten times the delay of a batch
    names = {span.name for trace in collector.traces() - before for span in collector.trace(trace)}
    assert not {name for name in names if name.startswith("pd_")}
