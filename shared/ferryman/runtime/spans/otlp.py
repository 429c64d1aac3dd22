"""Sends spans to a collector by OTLP, with OpenTelemetry's SDK: the extra `ferryman[otel]`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ferryman.errors import ConfigError
from ferryman.runtime.spans.span import Span
from ferryman.runtime.spans.span_queue import SendSpans
from ferryman.runtime.version import package_version

SEND_SECONDS = 5.0
_GRPC = {"grpc": True, "grpcs": False}  # whether it goes without TLS
_PATH = "/v1/traces"
_NEEDED = "pip install 'ferryman[otel]'"


@dataclass(frozen=True, slots=True)
class Collector:
    """The address of a collector, and the `share` of the traces beginning here that it gets."""

    url: SplitResult
    share: float

    @classmethod
    def at(cls, endpoint: str) -> Collector:
        """Reads `http://HOST:4318?share=0.1`. Raises ConfigError for a text that is none."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https", *_GRPC) or not url.hostname:
            raise ConfigError(
                f"the collector {endpoint!r} should be http://HOST:4318 or grpc://HOST:4317"
            )
        options = dict(parse_qsl(url.query))
        try:
            share = float(options.pop("share", 1.0))
        except ValueError:
            share = -1.0
        if options or not 0 <= share <= 1:
            raise ConfigError(f"after ? the collector {endpoint!r} takes share=0 to share=1")
        return cls(url._replace(query=""), share)


def check_installed() -> None:
    """Raises ConfigError without the extra."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"spans need OpenTelemetry ({error}): {_NEEDED}") from None


def otlp_sender(collector: Collector, resource: Mapping[str, str]) -> SendSpans:
    """Sends to this collector, as the process that `resource` describes. The libraries read headers
    and certificates from `OTEL_EXPORTER_OTLP_HEADERS` and `_CERTIFICATE`.

    Raises ConfigError as `check_installed` does.
    """
    check_installed()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    # The exporter writes a line for every batch that fails: the queue says it once, and counts.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = _exporter(collector.url)
    about = Resource.create(dict(resource))
    scope = InstrumentationScope("ferryman", package_version())

    def send(spans: Sequence[Span]) -> bool:
        made = [_readable(span, about, scope) for span in spans]
        return bool(exporter.export(made) is SpanExportResult.SUCCESS)

    return send


def _exporter(url: SplitResult) -> Any:
    if url.scheme in _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        is_open = _GRPC[url.scheme]
        return GrpcExporter(endpoint=url.netloc, insecure=is_open, timeout=SEND_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    # The standard's variable names the root; a URL of a collector's own page of traces is one, too.
    path = url.path if url.path.endswith(_PATH) else url.path.rstrip("/") + _PATH
    return HttpExporter(endpoint=url._replace(path=path).geturl(), timeout=SEND_SECONDS)


def _readable(span: Span, resource: Any, scope: Any) -> Any:
    """The span as OpenTelemetry's SDK has it."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    trace_id = int(span.context.trace_id, 16)

    def context(span_id: str, *, is_remote: bool) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))

    status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
    attributes = dict(span.attributes) | ({"error.type": span.error} if span.error else {})
    return ReadableSpan(
        span.name,
        context=context(span.context.span_id, is_remote=False),
        parent=context(span.parent_id, is_remote=True) if span.parent_id else None,
        resource=resource,
        attributes=attributes,
        events=[Event(moment.name, moment.attributes, moment.unix_ns) for moment in span.events],
        kind=SpanKind[span.kind.value],
        status=status,
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )
