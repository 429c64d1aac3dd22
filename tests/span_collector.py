"""A collector of spans for tests: OpenTelemetry's own OTLP services, by gRPC and by HTTP.

It is as real as packages allow: no collector installs from an index. The messages, the service and
the exporter are OpenTelemetry's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

ERROR = 2  # a status's code
SERVER, CLIENT = 2, 3  # kinds


@dataclass(frozen=True)
class SeenSpan:
    """A span as the collector got it; times are nanoseconds."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    begin_ns: int
    end_ns: int
    status: int
    attributes: Mapping[str, Any]


@dataclass
class SpanCollector:
    """The spans so far, and the URLs that take them."""

    grpc: str = ""
    http: str = ""
    spans: list[SeenSpan] = field(default_factory=list)

    def take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_seen(service, span) for span in of_scope.spans]

    def of_trace(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """Takes spans for the length of a block; skips the test without the packages."""
    pytest.importorskip("opentelemetry.sdk", reason="needs ferryman[otel]")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    collector = SpanCollector()

    class TraceServicer(services.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return messages.ExportTraceServiceResponse()

    class OtlpHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(messages.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = grpc.server(futures.ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(TraceServicer(), server)
    collector.grpc = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with ThreadingHTTPServer(("127.0.0.1", 0), OtlpHandler) as http:
        collector.http = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            http.shutdown()
            thread.join()
            server.stop(None).wait()


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
