"""Spans of OpenTelemetry for requests and their legs. While tracing is off, nothing of OpenTelemetry is imported.

A request's span is a child of the client's ``traceparent``. Each leg has a span below it, and its server gets a
``traceparent`` that names the leg's: what the server traces stands below. While tracing is off, the client's headers
are passed on as they are.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from pd_proxy.headers import HeaderList

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_HEADERS = ("traceparent", "tracestate")


class Trace:
    """The span of a request, or of a leg of it; none while tracing is off."""

    def __init__(self, tracer: "Tracer | None" = None, span: "Span | None" = None) -> None:
        self._tracer = tracer
        self._span = span

    def leg(self, name: str) -> "Trace":
        """Trace a leg below until the context that this returns is left, by whatever way."""
        if self._tracer is None or self._span is None:
            return self
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415  free when off

        span = self._tracer.start_span(f"{name} leg", set_span_in_context(self._span), kind=SpanKind.CLIENT)
        return Trace(None, span)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # A cancelled leg too: the client has left, or the other leg has failed.
        self.end({}, "" if error is None else str(error) or type(error).__name__)

    def applied_to(self, headers: HeaderList) -> HeaderList:
        """Return a server's headers with this trace context in the place of the client's."""
        if self._span is None:
            return headers
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415  free when off
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return [(name, value) for name, value in headers if name not in _HEADERS] + list(carrier.items())

    def goes_to(self, url: str) -> None:
        """Note the server that has the leg."""
        if self._span is not None:
            self._span.set_attribute("server.url", url)

    def note(self, event: str) -> None:
        """Note that something has happened, now."""
        if self._span is not None:
            self._span.add_event(event)

    def answered(self, status: int) -> None:
        """Note the status of the server's answer."""
        if self._span is None:
            return
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            _fail(self._span, f"status {status}")

    def end(self, attributes: Mapping[str, str | int], problem: str) -> None:
        """End the span; ``problem`` is empty if nothing went wrong."""
        if self._span is None:
            return
        self._span.set_attributes(attributes)
        if problem:
            _fail(self._span, problem)
        self._span.end()


class Tracing:
    """Owns the exporter of the proxy's spans. Does nothing without an endpoint."""

    def __init__(self, endpoint: str | None) -> None:
        """Start the exporter.

        Raises:
            ModuleNotFoundError: OpenTelemetry is not installed.
        """
        self._provider = None if endpoint is None else _provider(endpoint)

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Trace:
        """Begin a request's span, below that which its headers name."""
        if self._provider is None:
            return Trace()
        from opentelemetry.trace import SpanKind  # noqa: PLC0415  free when off
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        carrier = {name: headers[name] for name in _HEADERS if name in headers}
        tracer = self._provider.get_tracer("pd_proxy")
        context = TraceContextTextMapPropagator().extract(carrier)
        return Trace(tracer, tracer.start_span(f"{method} {path}", context, kind=SpanKind.SERVER))

    def close(self) -> None:
        """Send what is left, and end the exporter. May wait for the collector, for seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(endpoint: str) -> "TracerProvider":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"tracing needs {missing.name}, which is not installed; run: pip install 'pd-connector[tracing]'",
            name=missing.name,
        ) from missing
    provider = TracerProvider(resource=Resource.create({"service.name": "pd-proxy"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _fail(span: "Span", problem: str) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415  free when off

    span.set_status(Status(StatusCode.ERROR, problem))
