"""A collector of OpenTelemetry traces: what an exporter sends to it over HTTP, as protobuf, is kept here."""

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came. Ids are hexadecimal; times are Unix seconds."""

    name: str
    trace: str
    id: str
    parent: str  # empty for none
    start: float
    end: float
    failed: bool
    message: str
    service: str
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()


class Collector:
    """Listens on a free port of this machine. Leaving the context ends it."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    content = gzip.decompress(content)
                collector._take(content)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def trace(self, trace: str) -> list[CollectedSpan]:
        """The spans of a trace that have come, in the order of their beginnings."""
        with self._lock:
            return sorted((span for span in self._spans if span.trace == trace), key=lambda span: span.start)

    def traces(self) -> set[str]:
        """The ids of all traces."""
        with self._lock:
            return {span.trace for span in self._spans}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, content: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(content)
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    collected = CollectedSpan(
                        name=span.name,
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        start=span.start_time_unix_nano / 1e9,
                        end=span.end_time_unix_nano / 1e9,
                        failed=span.status.code == 2,
                        message=span.status.message,
                        service=names.get("service.name", ""),
                        attributes={
                            one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes
                        },
                        events=tuple(event.name for event in span.events),
                    )
                    with self._lock:
                        self._spans.append(collected)
