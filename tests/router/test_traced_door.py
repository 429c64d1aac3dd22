"""The span of an HTTP call, and the spans of the requests of one call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.harness.router import RouterCluster

from ferryman.runtime.spans.process_spans import NO_TRACING, Tracing
from ferryman.runtime.spans.span import Span, WorkKind
from ferryman.runtime.traces import parse_traceparent
from ferryman_router.doors.traced import traced_door

TRACE, CALLER = "a" * 32, "b" * 16
SAMPLED = f"00-{TRACE}-{CALLER}-01"


class Endpoint:
    """An application that answers with a status, or breaks, and keeps what it was asked."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.traceparents = status, list[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.traceparents += [
            value.decode() for name, value in scope["headers"] if name == b"traceparent"
        ]
        if not self.status:
            raise RuntimeError("a bug")
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def called(
    endpoint: Endpoint, *, method: str = "POST", traceparent: str = SAMPLED, samples: bool = True
) -> list[Span]:
    """The spans of one call."""
    spans, statistics = list[Span](), NO_TRACING.statistics
    tracing = Tracing(True, spans.append, NO_TRACING.watch, lambda: samples, statistics)
    headers: Sequence[tuple[bytes, bytes]] = (
        [(b"traceparent", traceparent.encode())] if traceparent else []
    )
    scope = {"type": "http", "method": method, "path": "/v1/completions", "headers": headers}

    async def nothing(_message: Message | None = None) -> Message:
        return {"type": "http.request"}

    async def sent(_message: Message) -> None:
        """Drops it."""

    await traced_door(endpoint, tracing)(scope, nothing, sent)
    return spans


async def test_a_call_is_a_span_of_its_callers_trace_and_the_parent_of_its_request() -> None:
    endpoint = Endpoint()
    (span,) = await called(endpoint)
    assert (span.context.trace_id, span.parent_id) == (TRACE, CALLER)
    assert (span.name, span.kind, span.error) == ("POST /v1/completions", WorkKind.SERVER, "")
    assert span.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert endpoint.traceparents == [span.context.traceparent]


@pytest.mark.parametrize(("status", "error"), [(400, ""), (503, "503")])
async def test_a_callers_mistake_is_no_error_of_the_span(status: int, error: str) -> None:
    (span,) = await called(Endpoint(status))
    assert span.error == error


async def test_a_bug_ends_the_span_with_an_error() -> None:
    with pytest.raises(RuntimeError):
        await called(endpoint := Endpoint(0))
    assert endpoint.traceparents


async def test_reads_and_unsampled_calls_have_no_span() -> None:
    assert await called(Endpoint(), method="GET") == []
    assert await called(Endpoint(), traceparent=SAMPLED[:-2] + "00") == []
    assert await called(Endpoint(), traceparent="", samples=False) == []


async def test_a_call_without_a_trace_begins_one_that_its_request_is_in() -> None:
    endpoint = Endpoint()
    (span,) = await called(endpoint, traceparent="")
    assert span.parent_id == ""
    context = parse_traceparent(endpoint.traceparents[0])
    assert context == span.context


def test_without_a_collector_nothing_stands_before_the_application() -> None:
    endpoint = Endpoint()
    assert traced_door(endpoint, NO_TRACING) is endpoint


async def test_two_answers_of_one_call_are_two_spans_of_one_parent(
    one_pair: RouterCluster,
) -> None:
    answer = await one_pair.http.post(
        "/v1/completions",
        json={"prompt": "the ferry", "max_tokens": 2, "n": 2},
        headers={"traceparent": SAMPLED},
    )
    assert answer.status_code == 200
    first, second = (
        parse_traceparent(order.context.traceparent) for order in one_pair.prefills[0].orders
    )
    assert first is not None
    assert second is not None
    assert first.trace_id == second.trace_id == TRACE
    assert first.span_id != second.span_id
