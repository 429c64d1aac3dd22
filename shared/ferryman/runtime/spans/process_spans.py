"""Tracing of one process: on with a collector, and without one nothing at all."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ferryman.runtime.lifecycle import LifecycleWatch, unwatched
from ferryman.runtime.metrics import Metrics
from ferryman.runtime.spans.lifecycle_spans import LifecycleSpans
from ferryman.runtime.spans.otlp import Collector, otlp_sender
from ferryman.runtime.spans.span import AttributeValue, Span, WorkKind
from ferryman.runtime.spans.span_queue import SpanQueue, SpanStatistics
from ferryman.runtime.traces import parse_traceparent
from ferryman.runtime.version import package_version
from ferryman.settings.groups import TracingSettings

CLOSE_SECONDS = 2.0


def _lose(span: Span) -> None:
    """Nobody reads spans here."""


def _no_spans() -> SpanStatistics:
    return SpanStatistics(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Tracing:
    """The way of a process's spans to the collector. `watch` takes its lifecycle events; `samples`
    decides whether a trace that begins here is recorded."""

    is_on: bool
    emit: Callable[[Span], None]
    watch: LifecycleWatch
    samples: Callable[[], bool]
    statistics: Callable[[], SpanStatistics]

    def count_in(self, metrics: Metrics) -> None:
        """Shows spans sent and lost among the metrics of a process that has a collector."""
        if self.is_on:
            metrics.watch("spans", self.statistics)

    @contextmanager
    def timed(
        self, name: str, traceparent: str, attributes: Mapping[str, AttributeValue]
    ) -> Iterator[None]:
        """A span of a call that this process serves, for the length of a block."""
        parent = parse_traceparent(traceparent) if self.is_on and traceparent else None
        if parent is None or not parent.is_sampled:
            yield
            return
        begin, error = time.time_ns(), ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            ended = Span(
                parent.child(secrets.randbits),
                parent.span_id,
                name,
                WorkKind.SERVER,
                begin,
                time.time_ns(),
                attributes,
                error=error,
            )
            self.emit(ended)


NO_TRACING = Tracing(False, _lose, unwatched, lambda: False, _no_spans)


@asynccontextmanager
async def tracing(settings: TracingSettings, role: str, worker_id: str) -> AsyncIterator[Tracing]:
    """The tracing of a process, for the length of a block, after which waiting spans are sent.

    Raises ConfigError for an address that is none of a collector, and without OpenTelemetry.
    """
    if not settings.otlp_endpoint:
        yield NO_TRACING
        return
    resource = {
        "service.name": f"ferryman-{role}",
        "service.instance.id": worker_id,
        "service.version": package_version(),
    }
    collector = Collector.at(settings.otlp_endpoint)
    queue = SpanQueue(otlp_sender(collector, resource))
    spans, share = LifecycleSpans(queue.put, secrets.randbits), collector.share
    try:
        yield Tracing(True, queue.put, spans, lambda: random.random() < share, queue.statistics)
    finally:
        await asyncio.to_thread(queue.close, CLOSE_SECONDS)
