"""A collector that is slow or away costs spans, which are counted, and never a caller's time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.waiting import wait_until

from ferryman.runtime.spans.span import Span, WorkKind
from ferryman.runtime.spans.span_queue import SpanQueue, SpanStatistics
from ferryman.runtime.traces import TraceContext

SPAN = Span(TraceContext("a" * 32, "b" * 16, True), "", "work", WorkKind.INTERNAL, 0, 1, {})


class GatedCollector:
    """Takes spans once it is told to."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.taken = 0
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()
        if is_open:
            self.may_go_on.set()

    def __call__(self, spans: Sequence[Span]) -> bool:
        self.is_asked.set()
        assert self.may_go_on.wait(60)
        self.taken += len(spans)
        return True


def test_spans_are_sent_by_a_thread_of_their_own() -> None:
    collector = GatedCollector()
    queue = SpanQueue(collector, patience=0.001)
    for _ in range(1000):
        queue.put(SPAN)
    queue.close(60)
    assert collector.taken == 1000
    assert queue.statistics() == SpanStatistics(1000, 0, 0)


def test_spans_beyond_the_queue_are_lost_and_counted_while_the_collector_hangs() -> None:
    collector = GatedCollector(is_open=False)
    queue = SpanQueue(collector, max_queued=10, patience=0.001)
    queue.put(SPAN)
    assert collector.is_asked.wait(60), "the first span is at the collector, which hangs"
    for _ in range(15):
        queue.put(SPAN)
    assert queue.statistics() == SpanStatistics(0, 5, 10)
    collector.may_go_on.set()
    queue.close(60)
    assert queue.statistics() == SpanStatistics(11, 5, 0)


def test_spans_of_a_collector_that_is_away_are_lost_and_counted() -> None:
    def away(spans: Sequence[Span]) -> bool:
        raise ConnectionRefusedError("nobody listens")

    queue = SpanQueue(away, patience=0.001)
    queue.put(SPAN)
    wait_until(lambda: queue.statistics() == SpanStatistics(0, 1, 0), "the loss")
    queue.put(SPAN)
    queue.close(60)
    assert queue.statistics() == SpanStatistics(0, 2, 0)
