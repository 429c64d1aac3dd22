"""Makes spans of the lifecycle events of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ferryman.handoff.lifecycle import ROUTER
from ferryman.ids import RandomBits
from ferryman.runtime.spans.span import AttributeValue, Span, SpanEvent, WorkKind
from ferryman.runtime.spans.span_rules import (
    ASKED,
    ATTEMPT,
    RULES,
    attributes_of,
    begins,
    ends,
    error_of,
    phase_of,
)
from ferryman.runtime.traces import TraceContext, attempt_context, parse_traceparent

MAX_OPEN = 8192
MAX_EVENTS = 128  # of one span: a long answer says `progress` often


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of an outer span that is under way."""

    name: str
    context: TraceContext
    begin_ns: int
    attributes: Mapping[str, AttributeValue]

    def ended(self, parent_id: str, end_ns: int, error: str) -> Span:
        kind = WorkKind.CLIENT if self.name == ATTEMPT else WorkKind.INTERNAL
        return Span(
            self.context,
            parent_id,
            self.name,
            kind,
            self.begin_ns,
            end_ns,
            self.attributes,
            error=error,
        )


@dataclass(slots=True)
class _OpenSpan:
    """An outer span that is under way, and its present phase."""

    role: str
    name: str
    context: TraceContext
    parent_id: str
    begin_ns: int
    attributes: dict[str, AttributeValue]
    events: list[SpanEvent] = field(default_factory=list)
    phase: _Phase | None = None


class LifecycleSpans:
    """Hears each event of a process once, on its event loop, and emits spans as they end.

    It keeps the `MAX_OPEN` spans with the latest events; a process that dies emits none of its
    open ones, and the router's span of the attempt shows that.
    """

    def __init__(
        self,
        emit: Callable[[Span], None],
        random_bits: RandomBits,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._emit, self._random_bits, self._clock_ns = emit, random_bits, clock_ns
        self._open: OrderedDict[tuple[str, str, int], _OpenSpan] = OrderedDict()

    def __call__(
        self,
        role: str,
        request_id: str,
        attempt: int,
        name: str,
        traceparent: str,
        facts: Mapping[str, object],
    ) -> None:
        """One event, or a note of the router before its first event."""
        if role not in RULES:
            return
        # A router's span covers all attempts of a request.
        key = role, request_id, 0 if role == ROUTER else attempt
        now = self._clock_ns()
        span = self._open.get(key)
        if span is None:
            context = parse_traceparent(traceparent) if begins(role, name) else None
            if context is None or not context.is_sampled:
                return
            span = self._begun(role, request_id, context, facts, now)
            self._open[key] = span
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        self._hear(span, attempt, name, facts, now)
        if ends(role, name):
            del self._open[key]
            self._close(span, error_of(name, facts), now)

    def _begun(
        self,
        role: str,
        request_id: str,
        context: TraceContext,
        facts: Mapping[str, object],
        now: int,
    ) -> _OpenSpan:
        rules, about = RULES[role], {"ferryman.request_id": request_id}
        if role != ROUTER:
            # The caller's span is the parent, and this is one of ours.
            made = context.child(self._random_bits)
            return _OpenSpan(role, rules.outer, made, context.span_id, now, {**about})
        # The router gave the request's context a span of its own already.
        intake = facts.get("intake_seconds", 0.0)
        begin = now - int(intake * 1e9) if isinstance(intake, int | float) else now
        name = f"{facts.get('operation', rules.outer)} {facts.get('model', '')}".strip()
        parent = str(facts.get("parent_span", ""))
        return _OpenSpan(role, name, context, parent, begin, {**about})

    def _hear(
        self, span: _OpenSpan, attempt: int, name: str, facts: Mapping[str, object], now: int
    ) -> None:
        attributes = attributes_of(span.role, name, facts)
        phase = phase_of(span.role, name, facts)
        if phase:
            # An attempt that another one follows has failed.
            is_lost = span.phase is not None and span.phase.name == ATTEMPT
            self._end_phase(span, f"{name} again" if is_lost else "", now)
            context = (
                attempt_context(span.context, attempt)
                if phase == ATTEMPT
                else span.context.child(self._random_bits)
            )
            about = {"ferryman.attempt": attempt, **attributes}
            span.phase = _Phase(phase, context, now, about)
        if name == ASKED or begins(span.role, name) or ends(span.role, name):
            span.attributes |= attributes
        elif len(span.events) < MAX_EVENTS:
            span.events.append(SpanEvent(name, now, attributes))

    def _end_phase(self, span: _OpenSpan, error: str, now: int) -> None:
        if span.phase is not None:
            self._emit(span.phase.ended(span.context.span_id, now, error))
            span.phase = None

    def _close(self, span: _OpenSpan, error: str, now: int) -> None:
        self._end_phase(span, error, now)
        kind = RULES[span.role].kind
        self._emit(
            Span(
                span.context,
                span.parent_id,
                span.name,
                kind,
                span.begin_ns,
                now,
                span.attributes,
                tuple(span.events),
                error,
            )
        )
