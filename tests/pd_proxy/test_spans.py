"""Traces: one a request, with a span for each leg, sent to a collector; however the request ends."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pd_proxy import Settings
from pd_proxy.spans import Tracing
from tests.support.examples.fake_servers import FakeServer, drops, prefills_by_name, stalls
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.otlp import CollectedSpan, Collector
from tests.support.waiting import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector:
        yield collector


@pytest.fixture
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer, collector: Collector) -> Proxy:
    p.script = prefills_by_name
    return setup.proxy([p], [d], traces_endpoint=collector.endpoint)


def ask(proxy: Proxy, **body: Any) -> Any:
    return proxy.http.post("/v1/completions", json={"prompt": "a"} | body, headers=HEADERS)


def request_span(collector: Collector, trace: str = TRACE) -> CollectedSpan:
    """The request's span, which comes last."""
    named = "POST /v1/completions"
    return until(lambda: next((span for span in collector.trace(trace) if span.name == named), None))  # type: ignore[return-value]


@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_a_request_is_one_trace_that_goes_on_in_both_servers(
    proxy: Proxy, p: FakeServer, d: FakeServer, collector: Collector, legs: str
) -> None:
    if legs == "together":
        proxy.complete()
    ask(proxy)
    request = request_span(collector)
    spans = {span.name: span for span in collector.trace(TRACE)}
    assert spans.keys() == {"POST /v1/completions", "prefill leg", "decode leg"}
    assert (request.parent, request.service, request.failed) == (PARENT, "pd-proxy", False)
    assert (request.attributes["pd.legs"], request.attributes["http.response.status_code"]) == (legs, 200)
    for name, server in (("prefill leg", p), ("decode leg", d)):
        leg = spans[name]
        assert (leg.parent, leg.failed, leg.attributes["server.url"]) == (request.id, False, server.url)
        assert server.received[-1].headers["traceparent"] == f"00-{TRACE}-{leg.id}-01"
        assert server.received[-1].headers["tracestate"] == "vendor=1"
        assert request.start <= leg.start <= leg.end <= request.end
    assert spans["decode leg"].events == ("first byte",)


def test_a_relayed_request_is_named_by_its_method(proxy: Proxy, collector: Collector) -> None:
    assert proxy.http.get("/v1/models", headers=HEADERS).status_code == 200
    spans = until(lambda: found if len(found := collector.trace(TRACE)) == 2 else None)
    assert {span.name for span in spans or ()} == {"GET /v1/models", "decode leg"}


def test_a_request_without_a_trace_begins_one(proxy: Proxy, p: FakeServer, collector: Collector) -> None:
    proxy.complete()
    until(collector.traces)
    (trace,) = collector.traces()
    assert request_span(collector, trace).parent == ""
    assert p.received[0].headers["traceparent"].startswith(f"00-{trace}-")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_no_span_is_lost_where_a_server_fails(
    proxy: Proxy, p: FakeServer, d: FakeServer, collector: Collector, leg: str
) -> None:
    (p if leg == "prefill" else d).script = drops
    assert ask(proxy).status_code == 502
    request = request_span(collector)
    spans = {span.name: span for span in collector.trace(TRACE)}
    assert request.failed
    assert spans[f"{leg} leg"].failed
    assert "broke off" in spans[f"{leg} leg"].message
    assert len(spans) == (2 if leg == "prefill" else 3)


def test_no_span_is_lost_where_the_client_leaves(proxy: Proxy, d: FakeServer, collector: Collector) -> None:
    d.script = stalls
    header = f"traceparent: {HEADERS['traceparent']}\r\n".encode()
    content = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\n%sContent-Length: %d\r\n\r\n" % (header, len(content))
    client = RawClient(proxy, head, content)
    d.wait()
    client.leave()
    request = request_span(collector)
    spans = {span.name: span for span in collector.trace(TRACE)}
    assert (request.failed, request.message) == (True, "the client left")
    assert spans["decode leg"].failed


def test_what_is_left_is_sent_when_the_proxy_ends(
    setup: ProxySetup, p: FakeServer, d: FakeServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    proxy = setup.proxy([p], [d], traces_endpoint=collector.endpoint)
    ask(proxy)
    assert collector.traces() == set()
    proxy.close()
    assert len(collector.trace(TRACE)) == 3


def test_without_an_endpoint_headers_pass_and_nothing_is_imported(
    setup: ProxySetup, p: FakeServer, d: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {"opentelemetry", *(name for name in sys.modules if name.startswith("opentelemetry."))}:
        monkeypatch.setitem(sys.modules, name, None)  # an import fails
    proxy = setup.proxy([p], [d])
    assert ask(proxy).status_code == 200
    for server in (p, d):
        assert HEADERS.items() <= server.received[0].headers.items()
    with pytest.raises(ModuleNotFoundError, match=r"pd-connector\[tracing\]"):
        Tracing("http://collector")


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ValueError, match=r"'collector:4317'; write a URL of OTLP over HTTP"):
        Settings(prefill=("http://p",), decode=("http://d",), traces_endpoint="collector:4317")
