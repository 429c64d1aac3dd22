"""The span of an HTTP call: from its first byte to the last byte of its answer."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ferryman.runtime.spans.process_spans import Tracing
from ferryman.runtime.spans.span import AttributeValue, Span, WorkKind
from ferryman.runtime.traces import TraceContext, parse_traceparent
from ferryman_router.doors.auth import own_span

_HEADER = b"traceparent"


def traced_door(app: ASGIApp, tracing: Tracing) -> ASGIApp:
    """The application; with a collector, one that makes a span of each call with a body."""
    return TracedDoor(app, tracing) if tracing.is_on else app


class TracedDoor:
    """An ASGI application before another one, which sees this span as its caller's."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Reads, such as a scrape of /metrics each few seconds, are no work to trace.
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        parent = parse_traceparent(_sent_traceparent(scope))
        span = own_span(parent, self._tracing.samples)
        _set_traceparent(scope, span)
        if not span.is_sampled:
            return await self._app(scope, receive, send)
        parent_id = parent.span_id if parent else ""
        return await self._traced(scope, receive, send, span, parent_id)

    async def _traced(
        self, scope: Scope, receive: Receive, send: Send, span: TraceContext, parent_id: str
    ) -> None:
        begin, statuses = time.time_ns(), list[int]()

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            status = statuses[0] if statuses else 0
            attributes: dict[str, AttributeValue] = {
                "http.request.method": scope["method"],
                "url.path": scope["path"],
            }
            if status:
                attributes["http.response.status_code"] = status
            name = f"{scope['method']} {scope['path']}"
            # By the conventions a caller's mistake is no error of the server's span.
            error = str(status) if status >= 500 else "" if status else "no response"
            ended = time.time_ns()
            self._tracing.emit(
                Span(span, parent_id, name, WorkKind.SERVER, begin, ended, attributes, error=error)
            )


def _sent_traceparent(scope: MutableMapping[str, Any]) -> str:
    for name, value in scope["headers"]:
        if name.lower() == _HEADER:
            return str(value.decode("latin-1"))
    return ""


def _set_traceparent(scope: MutableMapping[str, Any], span: TraceContext) -> None:
    kept = [(name, value) for name, value in scope["headers"] if name.lower() != _HEADER]
    scope["headers"] = [*kept, (_HEADER, span.traceparent.encode())]
