"""A request that began at one router goes on at another, and is its tenant's alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from tests.harness.router import (
    SENTENCE,
    STATE,
    FaultStage,
    Pause,
    RouterCluster,
    another_router,
    cluster,
    collect,
)
from tests.router.test_arithmetics import ONE_RANK, TWO_RANKS, compute_in

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import ANY_ARITHMETIC
from ferryman.errors import NotFound
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import encode_event
from ferryman.wire.codec.inference import event_from_wire
from ferryman.wire.codec.scalars import token_ids_from_bytes, token_ids_to_bytes
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import GenerateFinished
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman_router.request.request_log import past_life
from ferryman_router.request.worker_client import WorkerClient
from ferryman_router.routing.fleet import Fleet
from ferryman_router.routing.generate_request import PastLife, TokenizedRequest

MAX_TOKENS = 12
KEY = (("authorization", "Bearer one"),)


@dataclass
class Begun:
    """An answer that one router has begun, of which its client has the first token."""

    made: RouterCluster
    call: Any
    request_id: str
    seed: int
    token_ids: list[int]

    def again(self, **more: Any) -> pb.GenerateRequest:
        """The request as its client sends it to the next router."""
        held = as_token_ids(self.token_ids)
        fields: dict[str, Any] = {
            "request_id": "mine",
            "prompt": pb.Prompt(text=SENTENCE),
            "sampling": {"max_tokens": MAX_TOKENS, "seed": self.seed},
            "resume_from_offset": len(held),
            "num_sent_before": 1,
            "held_token_ids": token_ids_to_bytes(held),
            "started_request_id": self.request_id,
        }
        return pb.GenerateRequest(**(fields | more))

    @property
    def whole(self) -> list[int]:
        script = self.made.script
        return [script[index % len(script)] for index in range(MAX_TOKENS)]


async def read(call: Any) -> tuple[list[int], str]:
    """The tokens of a stream and the id that it says."""
    found, request_id = list[int](), ""
    async for event in call:
        if event.HasField("tokens"):
            found += token_ids_from_bytes(event.tokens.token_ids).tolist()
        request_id = event.started.request_id or request_id
    return found, request_id


@pytest.fixture
async def begun(nats_url: str, folder: Path) -> AsyncIterator[Begun]:
    async with cluster(nats_url, folder, api_keys="one, two", num_decodes=2) as made:
        async with beginning(made) as whole:
            yield whole


@asynccontextmanager
async def beginning(made: RouterCluster) -> AsyncIterator[Begun]:
    gate = Pause(FaultStage.NEXT_TOKEN)
    for decode in made.decodes:
        decode.suffers(gate)
    request = pb.GenerateRequest(
        request_id="mine",
        prompt=pb.Prompt(text=SENTENCE),
        sampling={"max_tokens": MAX_TOKENS},
    )
    call = made.stub.Generate(request, metadata=KEY)
    started, first = (await call.read()).started, (await call.read()).tokens
    token_ids = token_ids_from_bytes(first.token_ids).tolist()
    assert len(token_ids) == 1, "the others are held back"
    for decode in made.decodes:
        decode.faults.remove(gate)  # requests that come now are not held
    yield Begun(made, call, started.request_id, started.seed, token_ids)
    gate.release()
    call.cancel()


async def test_it_goes_on_by_the_next_attempt_behind_the_tokens_that_the_client_has(
    begun: Begun,
) -> None:
    async with another_router(begun.made) as stub:
        found, request_id = await read(stub.Generate(begun.again(), metadata=KEY))
    assert (begun.token_ids + found, request_id) == (begun.whole, begun.request_id)
    before, order = begun.made.prefills[0].orders
    (decode,) = (d for d in begun.made.decodes if d.worker_id == before.decode.worker_id)
    assert await decode.until_aborted(begun.request_id) == "taken_over"
    assert (order.context.attempt, order.request.num_generated) == (2, 1)
    assert order.context.taken_from == begun.made.router.worker_id


async def test_a_decode_worker_that_the_next_router_does_not_know_yet_is_told_when_it_joins(
    begun: Begun,
) -> None:
    """A router that began just now hears of workers one after the other."""
    (order,) = begun.made.prefills[0].orders
    decode = next(d for d in begun.made.decodes if d.worker_id == order.decode.worker_id)
    other = next(d for d in begun.made.decodes if d is not decode)
    past = PastLife(begun.made.router.worker_id, order.context.attempt, decode.worker_id, ())
    asked = SimpleNamespace(request_id=begun.request_id, past=past)
    fleet, ways, calls = Fleet(60.0), Channels(), list[Coroutine[Any, Any, None]]()
    metrics = begun.made.router.components.frontend.ctx.metrics
    signatures = RouterSignatures(OPEN_TO_ALL)
    client = WorkerClient(fleet, ways, metrics, signatures, calls.append)
    fleet.on_heartbeat(other.beat, 0.0)
    client.end_past(cast("TokenizedRequest", asked))
    client.on_joined(other.beat)
    assert calls == []
    fleet.on_heartbeat(decode.beat, 0.0)
    for _ in range(2):
        client.on_joined(decode.beat)
    (call,) = calls
    await call
    await ways.close()
    assert await decode.until_aborted(begun.request_id) == "taken_over"
    assert other.aborted == []


@pytest.mark.parametrize(("later", "level"), [(ONE_RANK, "bits"), (TWO_RANKS, "values")])
async def test_it_is_called_bits_if_all_its_parts_have_one_arithmetic(
    nats_url: str, folder: Path, later: str, level: str
) -> None:
    """The log says it of the part of the router before."""
    async with cluster(nats_url, folder, api_keys="one", num_decodes=2) as made:
        workers = (*made.prefills, *made.decodes)
        await compute_in(made, ONE_RANK, *workers)
        async with beginning(made) as begun:
            for worker in workers:
                worker.state = replace(worker.state, arithmetic=later)
            async with another_router(made) as stub:
                events = await collect(stub.Generate(begun.again(), metadata=KEY))
    end = event_from_wire(events[-1])
    assert isinstance(end, GenerateFinished)
    assert end.exactness.value == level


async def test_a_client_that_sends_it_twice_to_the_second_router_reads_one_request(
    begun: Begun,
) -> None:
    async with another_router(begun.made) as stub:
        calls = [read(stub.Generate(begun.again(), metadata=KEY)) for _ in range(2)]
        answers = await asyncio.gather(*calls)
        answers.append(await read(stub.Generate(begun.again(), metadata=KEY)))
    assert answers == [(begun.whole[1:], begun.request_id)] * 3
    assert len(begun.made.prefills[0].orders) == 2, "it was taken over once"


@pytest.mark.parametrize(
    ("tenant", "more"),
    [
        pytest.param("two", {}, id="another tenant's"),
        pytest.param("one", {"started_request_id": "never"}, id="never was"),
        pytest.param("one", {"held_token_ids": b""}, id="tokens not shown"),
        pytest.param("one", {"sampling": {"max_tokens": 1}}, id="whole already"),
        pytest.param("one", {"held_token_ids": b"\xff\xff\0\0"}, id="tokens of another model"),
        pytest.param(
            "one", {"sampling": {"max_tokens": 9, "prompt_logprobs": 1}}, id="with a scored prompt"
        ),
    ],
)
async def test_it_cannot_go_on_if_it_is(begun: Begun, tenant: str, more: dict[str, Any]) -> None:
    async with another_router(begun.made) as stub:
        metadata = (("authorization", f"Bearer {tenant}"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Generate(begun.again(**more), metadata=metadata))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(begun.made.prefills[0].orders) == 1
    assert not any(decode.aborted for decode in begun.made.decodes)


def lies_about(request_id: str, router_id: str, subjects: Subjects) -> dict[str, bytes]:
    """Events of a request that a decode worker's login may publish, by their subjects."""
    failed = LifecycleEntry("router", router_id, 1, request_id, 1, 9, "failed", {"reason": "Gone"})
    taken = replace(failed, worker_id="router-0123456789abcdef", attempt=7, name="taken_over")
    far_on = replace(failed, role="decode", worker_id="decode-1", attempt=1 << 40, name="progress")

    def own(event: str) -> str:
        return subjects.life("decode", "decode-1", request_id, event)

    return {
        own("failed"): encode_event(failed),
        own("taken_over"): encode_event(replace(taken, facts={"tenant": "another"})),
        own("garbage"): b"{",
        own("progress"): encode_event(far_on),
    }


async def test_lies_of_a_worker_in_the_log_change_nothing_about_it(begun: Begun) -> None:
    made, pattern = begun.made, begun.made.subjects.all_life_of(begun.request_id)
    lies = lies_about(begun.request_id, made.router.worker_id, made.subjects)
    for subject, payload in lies.items():
        made.bus.publish(subject, payload)
    async with asyncio.timeout(120):
        logged = set[str]()
        while not lies.keys() <= logged:
            logged = {one.subject for one in await made.recorded(pattern)}
    asked = pb.TraceRequest(request_id=begun.request_id)
    shown = (await made.stub.Trace(asked, metadata=KEY)).events
    assert [each.event for each in shown if each.role == "decode"] == ["progress"]
    (forged,) = made.router.components.frontend.ctx.metrics.forged_messages.collect()
    assert forged.samples[0].value == 3
    async with another_router(made) as stub:
        found, _ = await read(stub.Generate(begun.again(), metadata=KEY))
    assert begun.token_ids + found == begun.whole
    order = made.prefills[0].orders[-1]
    assert (order.context.attempt, order.context.taken_from) == (2, made.router.worker_id)


def told(*names: str, router: str = "router-1", attempt: int = 1, **facts: object) -> list[Any]:
    facts = {"tenant": "one", "state": STATE.digest[:8], "decode": "decode-1", **facts}
    return [
        LifecycleEntry("router", router, 1, "r", attempt, seq, name, facts)
        for seq, name in enumerate(names, 1)
    ]


RUNNING = told("received", "routed")


def test_the_latest_router_and_attempt_count() -> None:
    assert past_life(RUNNING, (5,), STATE) == PastLife("router-1", 1, "decode-1", (5,))
    second = told("taken_over", "routed", router="router-2", attempt=2, decode="decode-2")
    lost = told("failed", reason="TakenOver")
    log = [*RUNNING, *second, *lost]
    assert past_life(log, (5, 6), STATE) == PastLife("router-2", 2, "decode-2", (5, 6))


def test_the_arithmetics_of_all_attempts_are_those_of_the_answer() -> None:
    """An attempt of which the log does not say it may have been of any."""
    first = told("received", "routed", arithmetic="a")
    second = told("taken_over", "routed", router="router-2", attempt=2, arithmetic="b")
    assert past_life(first, (5,), STATE).arithmetics == {"a"}
    assert past_life([*first, *second], (5,), STATE).arithmetics == {"a", "b"}
    assert past_life([*first, *RUNNING[1:]], (5,), STATE).arithmetics == {"a", ANY_ARITHMETIC}
    assert past_life(first[:1], (5,), STATE).arithmetics == {ANY_ARITHMETIC}


@pytest.mark.parametrize("lost", [(1,), (2,), (3,), (1, 2), (2, 3), ()])
def test_an_attempt_that_the_log_has_lost_promises_no_bits(lost: tuple[int, ...]) -> None:
    """Other events show that it was."""
    log = [
        *told("received"),
        *(event for n in (1, 2, 3) for event in told("routed", attempt=n, arithmetic="a")),
        *told("failed", attempt=3, reason="Stopping"),
    ]
    log = [event for event in log if event.name != "routed" or event.attempt not in lost]
    past = past_life(log, (5,), STATE)
    assert past.arithmetics == ({"a", ANY_ARITHMETIC} if lost else {"a"})
    assert past.attempt == 3


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([], id="empty"),
        pytest.param([*RUNNING, *told("failed", reason="Suspect")], id="failed"),
        pytest.param([*RUNNING, *told("rejected", reason="QueueFull")], id="rejected"),
        pytest.param(told("received", state="eeeeeeee"), id="another model's"),
        pytest.param([*RUNNING, *told("received", "routed", router="router-2")], id="two of an id"),
    ],
)
def test_what_ended_or_was_another_models_has_no_next_attempt(
    log: Sequence[LifecycleEntry],
) -> None:
    with pytest.raises(NotFound):
        past_life(log, (5,), STATE)


@pytest.mark.parametrize("reason", ["Stopping", "TakenOver", "RequestIdInUse"])
def test_a_router_that_ended_or_lost_it_said_nothing_about_the_answer(reason: str) -> None:
    log = [*RUNNING, *told("failed", reason=reason)]
    assert past_life(log, (5,), STATE).attempt == 1
    assert past_life(log, (5,), replace(STATE, page_size=8)).router_id == "router-1"
