"""Spans of one request through all processes, as a collector gets them by OTLP.

The router sends by HTTP and the others by gRPC, so that one trace is joined of both protocols. The
tests run in the order in which they stand here: the last one ends the processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest
from tests.harness.cluster import Cluster, ClusterShape, running_cluster, save_served_model
from tests.servers import TESTS
from tests.span_collector import CLIENT, ERROR, SERVER, SeenSpan, SpanCollector, span_collector
from tests.waiting import until

from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.credential_folders import with_login
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.broker_hops import BrokerHop
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import read_events, read_hops

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CALLER_SPAN = "b" * 16
ROLES = ("router", "prefill", "decode", "hostcache")
DOOR, REQUEST = "POST /v1/completions", "text_completion tiny"
TRIES = 5
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with span_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, collector: SpanCollector
) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    endpoints = dict.fromkeys(ROLES, collector.grpc) | {"router": collector.http}
    # A drain that is cut off on a busy machine would have the last answer tried again.
    settings = {
        role: {"otlp_endpoint": endpoint, "broker_traces": True, "drain_seconds": 100}
        for role, endpoint in endpoints.items()
    }
    shape = ClusterShape(num_prefill=2, settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@dataclass(frozen=True)
class TracedAnswer:
    """The text of an answer, and the tokens of its prompt that were reused."""

    text: str
    num_cached: int


async def asked(
    cluster: Cluster,
    trace_id: str,
    num_tokens: int = 400,
    max_tokens: int = MAX_TOKENS,
    flags: str = "01",
) -> TracedAnswer:
    """The answer to a prompt of this trace."""
    prompt = [(5 * i + int(trace_id, 16)) % 120 + 3 for i in range(num_tokens)]
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(
            f"{cluster.http}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True},
            headers={
                "traceparent": f"00-{trace_id}-{CALLER_SPAN}-{flags}",
                "x-request-id": trace_id,
            },
        )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    num_cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return TracedAnswer(body["choices"][0]["text"], num_cached)


async def asked_of_a_prefill_worker_that_dies(cluster: Cluster, trace_id: str) -> bool:
    """Kills the worker as soon as it has computed the first of many chunks; whether the request
    was tried again."""
    async with cluster.bus() as bus, bus.subscribed(Subjects().all_life) as messages:
        asking = asyncio.create_task(asked(cluster, trace_id, num_tokens=980))
        async with asyncio.timeout(120):
            async for message in messages:
                event = decode_event(message.payload)
                if (event.role, event.name) == ("prefill", "chunk"):
                    break
        for worker in cluster.of_role("prefill"):
            if worker.ready["worker_id"] == event.worker_id:
                worker.kill()
        await asking
        log = await cluster.log_of(event.request_id)
    return max(entry.attempt for entry in log) > 1


def named(spans: Sequence[SeenSpan], name: str) -> list[SeenSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.begin_ns)


def assert_within(inner: SeenSpan, outer: SeenSpan) -> None:
    """Of one process: a child lies in its parent."""
    assert_begun_by(inner, outer)
    assert inner.end_ns <= outer.end_ns, (inner.name, outer.name)


def assert_begun_by(inner: SeenSpan, outer: SeenSpan) -> None:
    """Of two processes: a worker may say that it ended after the router had all that it waited
    for."""
    assert inner.parent_id == outer.span_id, (inner.name, outer.name)
    assert outer.begin_ns <= inner.begin_ns <= inner.end_ns, (inner.name, outer.name)


def is_whole(spans: Sequence[SeenSpan]) -> bool:
    """Whether each process has sent the span that it ends last, of the last attempt."""
    attempts = named(spans, "attempt")
    if not (named(spans, DOOR) and named(spans, "hostcache.acquire") and attempts):
        return False
    last = {span.name for span in spans if span.parent_id == attempts[-1].span_id}
    return {"prefill", "decode"} <= last


async def whole_trace(collector: SpanCollector, trace_id: str) -> list[SeenSpan]:
    await until(lambda: is_whole(collector.of_trace(trace_id)))
    spans = collector.of_trace(trace_id)
    assert {span.service for span in spans} == {f"ferryman-{role}" for role in ROLES}
    return spans


def without_parent(spans: Sequence[SeenSpan]) -> set[str]:
    ids = [span.span_id for span in spans]
    assert len(set(ids)) == len(ids), "each span has an id of its own"
    return {span.name for span in spans if span.parent_id not in ids}


def assert_no_parent_is_missing(spans: Sequence[SeenSpan]) -> None:
    assert without_parent(spans) == {DOOR}, "the caller's span alone is not ours"


async def test_a_request_is_one_trace_through_four_processes(
    cluster: Cluster, collector: SpanCollector
) -> None:
    trace_id = f"{7:032x}"
    await asked(cluster, trace_id)
    spans = await whole_trace(collector, trace_id)
    assert_no_parent_is_missing(spans)
    (door,), (request,), (attempt,) = (named(spans, name) for name in (DOOR, REQUEST, "attempt"))
    (prefill,), (decode,) = named(spans, "prefill"), named(spans, "decode")
    assert door.parent_id == CALLER_SPAN
    assert_within(request, door)
    assert_within(attempt, request)
    assert_begun_by(prefill, attempt)
    assert_begun_by(decode, attempt)
    for name, outer in (
        ("queue", request),
        ("prefill.compute", prefill),
        ("handoff.send", prefill),
        ("handoff.receive", decode),
        ("decode.tokens", decode),
    ):
        (first, *_) = named(spans, name)
        assert_within(first, outer)
    assert_begun_by(named(spans, "hostcache.acquire")[0], attempt)
    kinds = [span.kind for span in (door, attempt, prefill, decode)]
    assert kinds == [SERVER, CLIENT, SERVER, SERVER]
    assert not [span.name for span in spans if span.status == ERROR]


async def test_the_request_has_the_attributes_of_generative_ai_and_no_content(
    cluster: Cluster, collector: SpanCollector
) -> None:
    trace_id = f"{31:032x}"
    answer = await asked(cluster, trace_id)
    spans = await whole_trace(collector, trace_id)
    assert_no_parent_is_missing(spans)
    (request,) = named(spans, REQUEST)
    assert {
        name: value for name, value in request.attributes.items() if name.startswith("gen_ai.")
    } == {
        "gen_ai.provider.name": "ferryman",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": MAX_TOKENS,
        "gen_ai.usage.input_tokens": 400,
        "gen_ai.usage.output_tokens": MAX_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": answer.num_cached,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": pytest.approx(1, abs=119),
    }
    words = set(answer.text.split())
    assert words
    said = {str(value) for span in spans for value in span.attributes.values()}
    assert not [value for value in said if words & set(value.split())]


async def test_a_request_whose_prefill_worker_dies_is_one_trace_with_more_attempts(
    cluster: Cluster, collector: SpanCollector
) -> None:
    for number in range(20, 20 + TRIES):
        trace_id = f"{number:032x}"
        is_tried_again = await asked_of_a_prefill_worker_that_dies(cluster, trace_id)
        cluster.start("prefill").await_ready()
        cluster.await_workers(prefill=2, decode=1)
        if is_tried_again:
            break
    else:
        raise AssertionError("the kill never came before the answer")
    spans = await whole_trace(collector, trace_id)
    (request,) = named(spans, REQUEST)
    *lost, last = named(spans, "attempt")
    assert lost
    assert (request.status == ERROR, last.status == ERROR) == (False, False)
    for attempt in lost:
        assert attempt.status == ERROR
        assert attempt.end_ns <= last.begin_ns
        assert_within(attempt, request)
    assert_within(last, request)
    # The worker that was killed took its open spans with it: the first attempt has no prefill, and
    # the parts of it that had ended are without their parent.
    assert {name.partition(".")[0] for name in without_parent(spans) - {DOOR}} <= {"prefill"}
    assert lost[0].span_id not in {span.parent_id for span in named(spans, "prefill")}
    (decode,) = (span for span in named(spans, "decode") if span.status != ERROR)
    assert_begun_by(decode, last)


async def test_a_trace_that_its_caller_does_not_record_has_no_spans(
    cluster: Cluster, collector: SpanCollector
) -> None:
    unrecorded, recorded = f"{8:032x}", f"{9:032x}"
    await asked(cluster, unrecorded, flags="00")
    await asked(cluster, recorded)
    # Processes send in order: when the later trace is there, the earlier one would be, too.
    await whole_trace(collector, recorded)
    assert collector.of_trace(unrecorded) == []


async def test_the_broker_traces_the_events_of_a_recorded_request_alone(cluster: Cluster) -> None:
    place = BrokerPlace(with_login(cluster.nats, TESTS))
    unrecorded, recorded = f"{11:032x}", f"{12:032x}"
    await asked(cluster, unrecorded, flags="00")
    await asked(cluster, recorded)
    events = await read_events(place, recorded)
    subjects = {
        Subjects().life(event.role, event.worker_id, event.request_id, event.name)
        for event in events
    }
    assert {event.role for event in events} >= {"router", "prefill", "decode"}
    hops: list[BrokerHop] = []
    async with asyncio.timeout(120):
        # The broker writes a trace after its event.
        while {hop.subject for hop in hops} != subjects:
            hops = await hops_of(place, events)
    assert {hop.streams for hop in hops} == {("LIFECYCLE",)}
    assert await hops_of(place, await read_events(place, unrecorded)) == []


async def hops_of(place: BrokerPlace, events: Sequence[LifecycleEntry]) -> list[BrokerHop]:
    return await read_hops(place, dict.fromkeys(event.request_id for event in events))


async def test_processes_that_end_send_their_last_spans_before(
    cluster: Cluster, collector: SpanCollector
) -> None:
    """They are told to end while an answer runs, so its spans are their last act."""
    trace_id = f"{10:032x}"
    first_token = f"{Subjects().root}.life.decode.*.*.first_token"
    async with cluster.bus() as bus, bus.subscribed(first_token) as messages:
        answer = asyncio.create_task(asked(cluster, trace_id, num_tokens=100, max_tokens=300))
        async with asyncio.timeout(120):
            await anext(messages)
    running = [service for role in ROLES for service in cluster.of_role(role)]
    for service in running:
        service.process.send_signal(signal.SIGTERM)
    await answer
    assert [service.process.wait(timeout=120) for service in running] == [0] * len(running)
    spans = collector.of_trace(trace_id)
    assert is_whole(spans)
    assert_no_parent_is_missing(spans)
