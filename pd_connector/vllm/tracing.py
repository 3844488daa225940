"""Spans of OpenTelemetry for pulls and leases, where vLLM's own tracing is on (``--otlp-traces-endpoint``).

vLLM sets the exporter up in each of its processes. Nothing of OpenTelemetry is imported here while tracing is off.
A span is a child of what the request's ``traceparent`` names: in a trace, D's pull and P's lease stand beside vLLM's
own spans of the request's two legs.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.orders import LeaseEnd
from pd_connector.traces import PullTrace, TracePull

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from pd_connector.vllm.types import VllmConfig

logger = logging.getLogger(__name__)

#: Leases whose beginning is kept; the spans of more would cost memory that nothing bounds.
_MAX_LEASES = 100_000


def pull_spans(vllm_config: "VllmConfig", rank: int) -> TracePull | None:
    """Return what writes the spans of a worker's pulls; None if tracing is off."""
    tracer = _tracer(vllm_config)
    return None if tracer is None else PullSpans(tracer, rank).write


def lease_spans(vllm_config: "VllmConfig") -> "LeaseSpans | None":
    """Return what writes the spans of a prefill engine's leases; None if tracing is off."""
    tracer = _tracer(vllm_config)
    return None if tracer is None else LeaseSpans(tracer)


class PullSpans:
    """Writes a span for each pull of a rank, with one below it for each phase, when the pull has ended."""

    def __init__(self, tracer: "Tracer", rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._rank = rank
        self._clock = clock

    def write(self, pull: PullTrace) -> None:
        """Write the spans of a pull that has just ended."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415  free when off

        offset_s = time.time() - self._clock()  # from monotonic to Unix time

        def unix_ns(moment: float) -> int:
            return int((moment + offset_s) * 1e9)

        attributes: dict[str, Any] = {
            "pd.request_id": pull.request_id,
            "pd.rank": self._rank,
            "pd.source": pull.source,
            "pd.lease_id": pull.lease_id,
            **{f"pd.{name}": number for name, number in pull.figures.items()},
        }
        span = _begin(self._tracer, "pd_pull", pull.traceparent, unix_ns(pull.started), attributes)
        inside = set_span_in_context(span)
        for lap in pull.laps:
            phase = self._tracer.start_span(f"pd_pull.{lap.phase}", context=inside, start_time=unix_ns(lap.start))
            phase.end(unix_ns(lap.end))
        if pull.cause:
            _fail(span, pull.cause, pull.reason)
        span.end(unix_ns(self._clock()))


class LeaseSpans:
    """Writes a span for each lease, when it ends. Thread-safe."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._granted: dict[str, Span] = {}

    def granted(self, lease_id: str, parent: str, request_id: str, tokens: int) -> None:
        """Note that a lease is granted. Nothing is noted of requests without a trace."""
        if not parent:
            return
        attributes = {"pd.request_id": request_id, "pd.lease_id": lease_id, "pd.tokens": tokens}
        span = _begin(self._tracer, "pd_lease", parent, time.time_ns(), attributes)
        with self._lock:
            if len(self._granted) < _MAX_LEASES:
                self._granted[lease_id] = span

    def ended(self, lease_id: str, how: LeaseEnd) -> None:
        """Write the span of a lease that has ended. Others are ignored."""
        with self._lock:
            span = self._granted.pop(lease_id, None)
        if span is None:
            return
        span.set_attribute("pd.end", how.value)
        if how in (LeaseEnd.EXPIRED, LeaseEnd.REVOKED):  # cancelled: nobody needs it
            _fail(span, how.value, f"the lease was {how.value} before all of its readers had released it")
        span.end()


def _tracer(vllm_config: "VllmConfig") -> "Tracer | None":
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    from opentelemetry import trace  # noqa: PLC0415  free when off

    logger.info("PDConnector: pulls and leases are traced, for requests with a traceparent")
    tracer = trace.get_tracer("pd_connector")
    _use_own_ids(tracer)
    return tracer


def _use_own_ids(tracer: "Tracer") -> None:
    """Have a tracer draw span ids from the system's randomness.

    OpenTelemetry draws them from Python's own generator. vLLM seeds that alike in all workers of all engines, so that
    spans of different ranks would have the same id.
    """
    from opentelemetry.sdk import trace  # noqa: PLC0415  free when off
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415

    class SystemIdGenerator(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1  # 0 is none

    if isinstance(tracer, trace.Tracer):
        tracer.id_generator = SystemIdGenerator()


def _begin(tracer: "Tracer", name: str, parent: str, start_ns: int, attributes: dict[str, Any]) -> "Span":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    return tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes)


def _fail(span: "Span", cause: str, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

    span.set_attribute("pd.cause", cause)
    span.set_status(Status(StatusCode.ERROR, reason))
