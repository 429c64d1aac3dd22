"""Spans of lifecycle events, against the tree that a person would draw of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from ferryman.runtime.spans.lifecycle_spans import LifecycleSpans
from ferryman.runtime.spans.span import Span, WorkKind
from ferryman.runtime.traces import TraceContext, attempt_traceparent

TRACE, REQUEST = "a" * 32, TraceContext("a" * 32, "b" * 16, True)
MS = 1_000_000


class Listener:
    """Spans of events at milliseconds that a test names."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._now, ids = 0, count(1)
        self._events = LifecycleSpans(self.spans.append, lambda _: next(ids), lambda: self._now)

    def at(
        self,
        ms: int,
        role: str,
        name: str,
        attempt: int = 1,
        traceparent: str = "",
        **facts: object,
    ) -> None:
        self._now = ms * MS
        traceparent = traceparent or REQUEST.traceparent
        self._events(role, "kite-1", attempt, name, traceparent, facts)

    @property
    def times(self) -> Mapping[str, tuple[int, int]]:
        """By name, in milliseconds."""
        return {span.name: (span.begin_ns // MS, span.end_ns // MS) for span in self.spans}

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def routed_twice(at: Listener) -> None:
    at.at(
        10,
        "router",
        "asked",
        operation="chat",
        model="demo",
        max_tokens=8,
        parent_span="c" * 16,
        intake_seconds=0.004,
    )
    at.at(10, "router", "received", tokens=30)
    at.at(12, "router", "routed", prefill="p-1", decode="d-1")
    at.at(20, "router", "routed", attempt=2, prefill="p-2", decode="d-1")
    at.at(
        40,
        "router",
        "finished",
        attempt=2,
        reason="stop",
        prompt=30,
        tokens=8,
        cached={"device": 16, "host": 0},
        ttft_ms=15.0,
    )


def test_a_request_is_a_span_with_its_queue_and_its_attempts() -> None:
    at = Listener()
    routed_twice(at)
    request = at.named("chat demo")[0]
    # Its body was read and tokenized for 4 ms before the first event.
    assert (request.begin_ns, request.end_ns) == (6 * MS, 40 * MS)
    assert (request.context, request.parent_id) == (REQUEST, "c" * 16)
    assert at.times["queue"] == (10, 12)
    lost, last = at.named("attempt")
    assert [lost.begin_ns, lost.end_ns, last.begin_ns, last.end_ns] == [
        12 * MS,
        20 * MS,
        20 * MS,
        40 * MS,
    ]
    assert (lost.error, last.error, request.error) == ("routed again", "", "")
    assert {span.parent_id for span in (lost, last)} == {REQUEST.span_id}
    assert lost.kind is WorkKind.CLIENT


def test_a_request_has_the_attributes_of_the_genai_conventions() -> None:
    at = Listener()
    routed_twice(at)
    attributes = at.named("chat demo")[0].attributes
    conventions = {name: value for name, value in attributes.items() if name.startswith("gen_ai")}
    assert conventions == {
        "gen_ai.provider.name": "ferryman",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.015,
    }
    assert attributes["ferryman.cached.device"] == 16


def test_workers_spans_are_children_of_the_attempt_that_the_router_sent() -> None:
    at = Listener()
    routed_twice(at)
    sent = attempt_traceparent(REQUEST.traceparent, 2)
    for ms, name in ((22, "queued"), (23, "admitted")):
        at.at(ms, "prefill", name, 2, sent)
    at.at(25, "prefill", "chunk", 2, sent, index=1, count=2)
    at.at(28, "prefill", "chunk", 2, sent, index=2, count=2)
    at.at(30, "prefill", "handed_off", 2, sent, bytes=4096)
    (prefill,) = at.named("prefill")
    assert prefill.parent_id == at.named("attempt")[1].context.span_id
    assert prefill.context.trace_id == TRACE
    assert at.times["prefill"] == (22, 30)
    assert at.times["prefill.queue"] == (22, 23)
    # Computing ends with the last chunk; what follows is the rest of the hand-off.
    assert at.times["prefill.compute"] == (23, 28)
    assert at.times["handoff.send"] == (28, 30)
    assert [(event.name, event.unix_ns // MS) for event in prefill.events] == [
        ("admitted", 23),
        ("chunk", 25),
        ("chunk", 28),
    ]


def test_a_decoding_that_was_retracted_shows_its_pause() -> None:
    at = Listener()
    for ms, name in enumerate(
        ("reserved", "verified", "first_token", "retracted", "resumed", "progress", "finished")
    ):
        at.at(10 * ms, "decode", name)
    at.at(99, "decode", "audited")  # long after the end, and of no span
    assert [(span.name, span.begin_ns // MS, span.end_ns // MS) for span in at.spans] == [
        ("handoff.receive", 0, 10),
        ("decode.queue", 10, 20),
        ("decode.tokens", 20, 30),
        ("decode.retracted", 30, 40),
        ("decode.tokens", 40, 60),
        ("decode", 0, 60),
    ]


def test_a_failed_request_has_its_reason_as_the_error() -> None:
    at = Listener()
    at.at(0, "router", "received")
    at.at(1, "router", "routed")
    at.at(2, "router", "failed", reason="NoWorker")
    assert {span.name: span.error for span in at.spans} == {
        "queue": "",
        "attempt": "NoWorker",
        "request": "NoWorker",
    }


def test_a_trace_that_nobody_records_has_no_spans() -> None:
    at, unsampled = Listener(), TraceContext(TRACE, "b" * 16, False).traceparent
    for name in ("received", "routed", "finished"):
        at.at(1, "router", name, 1, unsampled)
    at.at(1, "hostcache", "loaded")
    assert at.spans == []
