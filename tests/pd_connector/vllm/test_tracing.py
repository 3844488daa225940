"""Spans of pulls and leases: below the request's trace, one below the other, with causes; nothing while tracing is off.

Covers: pd_connector.traces.
"""

import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from pd_connector.orders import LeaseEnd
from pd_connector.params import contents_digest, parse_remote_prefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.traces import Lap, PullTrace
from pd_connector.vllm.requests import traceparent
from pd_connector.vllm.tracing import LeaseSpans, PullSpans, lease_spans, pull_spans
from tests.support.connector.engines import IDENTITY, THEIRS
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.waiting import ManualClock
from transfer.control.messages import Release

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADER = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Traced:
    """A tracer whose spans stay here."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer: Tracer = provider.get_tracer("test")

    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())


def a_pull(**changes: Any) -> PullTrace:
    laps = (Lap("queue", 1000.0, 1000.25), Lap("read", 1000.25, 1001.0))
    values = {"request_id": "r", "traceparent": HEADER, "source": "p:1", "lease_id": "lease", "started": 1000.0}
    return PullTrace(**{**values, "laps": laps, "figures": {"bytes": 4096}, **changes})


def test_a_pull_is_a_span_of_the_requests_trace_with_its_phases_below() -> None:
    traced, clock = Traced(), ManualClock()
    clock.advance(1.5)
    before_ns = time.time_ns()
    PullSpans(traced.tracer, 3, clock).write(a_pull())
    *phases, pull = traced.spans()
    assert (pull.name, pull.context.trace_id, pull.parent and pull.parent.span_id) == ("pd_pull", TRACE, PARENT)
    assert pull.status.status_code is StatusCode.UNSET
    attributes = dict(pull.attributes or {})
    assert (attributes["pd.rank"], attributes["pd.bytes"], attributes["pd.source"]) == (3, 4096, "p:1")
    assert [span.name for span in phases] == ["pd_pull.queue", "pd_pull.read"]
    assert {span.parent and span.parent.span_id for span in phases} == {pull.context.span_id}
    assert pull.start_time is not None
    assert pull.end_time is not None
    moments = [(span.start_time or 0, span.end_time or 0) for span in (*phases, pull)]
    spent = [(end - start) / 1e9 for start, end in moments]
    assert spent == pytest.approx([0.25, 0.75, 1.5], abs=1e-3)
    assert abs(pull.end_time - before_ns) < 60e9


def test_a_pull_that_failed_says_why() -> None:
    traced = Traced()
    PullSpans(traced.tracer, 0).write(a_pull(laps=(), cause="unreachable", reason="nobody there"))
    (pull,) = traced.spans()
    assert pull.status.status_code is StatusCode.ERROR
    assert pull.status.description == "nobody there"
    assert dict(pull.attributes or {})["pd.cause"] == "unreachable"


@pytest.mark.parametrize("how", ["released", "cancelled", "expired"])
def test_a_lease_is_a_span_until_it_ends_however_it_does(how: str) -> None:
    traced, clock = Traced(), ManualClock()
    spans = LeaseSpans(traced.tracer)
    leases: LeaseTable[str] = LeaseTable(10.0, clock)
    service: LeaseService[str] = LeaseService(leases, IDENTITY, 1, spans=spans)
    request = FakeRequest("r", a_prompt(70), trace_headers={"traceparent": HEADER})
    params = service.grant(request, THEIRS, "r", ("127.0.0.1", 1))
    assert traced.spans() == []
    if how == "released":
        contents = contents_digest(parse_remote_prefill(params))
        assert leases.release(Release("", params["lease_id"], 0, 1, "pull", contents)).valid
    elif how == "cancelled":
        leases.cancel([params["lease_id"]])
    else:
        clock.advance(11.0)
        assert list(leases.collect()) == ["r"]
    (lease,) = traced.spans()
    assert (lease.name, lease.context.trace_id, lease.parent and lease.parent.span_id) == ("pd_lease", TRACE, PARENT)
    assert lease.status.status_code is (StatusCode.ERROR if how == "expired" else StatusCode.UNSET)
    spans.ended(params["lease_id"], LeaseEnd.EXPIRED)
    assert len(traced.spans()) == 1


def test_a_request_without_a_trace_has_no_spans() -> None:
    traced = Traced()
    spans = LeaseSpans(traced.tracer)
    spans.granted("lease", "", "r", 70)
    spans.ended("lease", LeaseEnd.RELEASED)
    assert traced.spans() == []
    request: Any = FakeRequest("r", a_prompt(70))
    assert traceparent(request) == ""
    request.trace_headers = {"traceparent": HEADER}
    assert traceparent(request) == HEADER


def test_ranks_that_seed_python_alike_write_spans_of_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda name: traced.tracer)
    config: Any = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="http://collector"))
    for rank in range(2):
        random.seed(0)
        write = pull_spans(config, rank)
        assert write is not None
        write(a_pull())
    ids = [span.context.span_id for span in traced.spans()]
    assert len(set(ids)) == len(ids) == 6


def test_nothing_of_opentelemetry_is_imported_while_tracing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import fails
    config: Any = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
    assert pull_spans(config, 0) is None
    assert lease_spans(config) is None
    config.observability_config.otlp_traces_endpoint = "http://collector"
    with pytest.raises(ModuleNotFoundError):
        pull_spans(config, 0)
