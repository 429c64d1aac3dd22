"""The order of a second attempt is the first one's in every field but those that are named here.

A field that is lost on the way to a second worker changes an answer in its middle, and no error
tells of it. So orders are compared field by field, and the requests have another value than the
default in each field that there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.router import (
    QUICK,
    SENTENCE,
    Fault,
    FaultStage,
    GiveUp,
    Pause,
    Refuse,
    RouterCluster,
    another_router,
    cluster,
)
from tests.router.test_lora import kites
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.token_rules import TokenRules
from ferryman.wire.codec.scalars import token_ids_from_bytes, token_ids_to_bytes
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.values import PrefillOrder, RequestContext
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.queue import Ticket

_ = kites  # a fixture

# The fields that an attempt has of its own, whichever it is.
ATTEMPT = {
    "context.attempt",
    "context.deadline_seconds",
    "context.age_seconds",
    "context.traceparent",  # a span of its own in the request's trace
}
# The pair of workers that it goes to.
PAIR = {"worker_epoch", "decode.worker_id", "decode.address", "decode.epoch"}
# Tokens that were drawn before: those are part of its prompt, and no sibling shares that.
DRAWN = {"request.token_ids", "request.keys", "request.num_generated", "request.num_siblings"}

NUM_TOKENS = 8
MARK = {"type": "ephemeral", "ttl": "1h"}
EACH: dict[str, Any] = {
    "model": "kites",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "seed": 7,
    "stop_token_ids": [398],
    "cache_salt": "salt",
    "priority": 3,
}
COMPLETION = EACH | {
    "prompt": SENTENCE * 4,
    "max_tokens": NUM_TOKENS,
    "n": 2,
    "stop": ["never"],
    "logprobs": 2,
    "prompt_logprobs": 1,
    "ignore_eos": True,
    "logit_bias": {"5": 1.5},
    "min_tokens": 2,
    "allowed_token_ids": list(range(390)),
    "bad_words": ["zebra"],
}
MESSAGE = EACH | {
    "system": [{"type": "text", "text": SENTENCE * 4, "cache_control": MARK}],
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": NUM_TOKENS,
    "structured_outputs": {"regex": ".*"},
}
NOT_IN_GRPC = {"model", "cache_salt", "priority"}  # model is beside the parameters of sampling
BODIES = {"/v1/completions": COMPLETION, "/v1/messages": MESSAGE}
TRACE = {"traceparent": f"00-{7:032x}-{9:016x}-01"}


def unlike(one: Any, other: Any, path: str = "") -> set[str]:
    """The fields of two values that differ, by their path."""
    if is_dataclass(one) and type(one) is type(other):
        parts = ((field.name, f"{path}.{field.name}".lstrip(".")) for field in fields(one))
        return {
            name
            for part, below in parts
            for name in unlike(getattr(one, part), getattr(other, part), below)
        }
    is_same = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return set() if is_same else {path}


def at_default(value: Any) -> set[str]:
    """The fields of a value that are as they would be without being set."""
    names = set()
    for field in fields(value):
        made = field.default_factory
        default = field.default if made is MISSING else made()
        if unlike(getattr(value, field.name), default) == set():
            names.add(field.name)
    return names


@pytest.fixture
async def made(nats_url: str, folder: Path, kites: Path) -> AsyncIterator[RouterCluster]:
    """Two decode workers, of which the one that fails is not asked again."""
    async with cluster(nats_url, folder, num_decodes=2, limits=QUICK, lora=f"kites={kites}") as two:
        yield two


def orders_by_request(made: RouterCluster) -> Mapping[str, list[PrefillOrder]]:
    """The orders that prefill has, in order."""
    orders: dict[str, list[PrefillOrder]] = {}
    for order in made.prefills[0].orders:
        orders.setdefault(order.context.request_id, []).append(order)
    return orders


async def twice(made: RouterCluster, path: str) -> list[PrefillOrder]:
    """Both orders of a request whose first attempt failed."""
    response = await made.http.post(path, json=BODIES[path], headers=TRACE)
    assert response.status_code == 200, response.text
    (orders,) = (orders for orders in orders_by_request(made).values() if len(orders) > 1)
    assert len(orders) == 2
    return orders


async def test_the_requests_here_set_every_field_there_is(made: RouterCluster) -> None:
    """Otherwise a lost field would not show."""
    unset: dict[type, set[str]] = {}
    for path, body in BODIES.items():
        assert (await made.http.post(path, json=body, headers=TRACE)).status_code == 200
    for order in made.prefills[0].orders:
        request = order.request
        for value in (order.context, request, request.sampling, request.sampling.rules):
            names = at_default(value)
            unset[type(value)] = unset.get(type(value), names) & names
    assert unset == {
        RequestContext: {"taken_from"},  # below
        # The salt and the adapter travel in the context, and tokens are drawn below.
        Request: {"num_generated", "tenant_salt", "adapter"},
        SamplingParams: set(),
        TokenRules: set(),
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stage", [FaultStage.PREFILL, FaultStage.COMMIT], ids=lambda one: one.name)
async def test_before_the_first_token_only_attempt_and_workers_differ(
    made: RouterCluster, path: str, stage: FaultStage
) -> None:
    made.prefills[0].suffers(Refuse(stage, Unavailable("not now"), times=1))
    first, second = await twice(made, path)
    assert unlike(first, second) <= ATTEMPT | PAIR
    assert second.context.attempt == 2


@pytest.mark.parametrize("path", BODIES)
async def test_behind_tokens_their_ids_are_the_end_of_the_prompt(
    made: RouterCluster, path: str
) -> None:
    failure = GiveUp(failure_of(Unavailable("not now")), offset=3, times=1)
    for decode in made.decodes:
        decode.suffers(failure)
    first, second = await twice(made, path)
    assert unlike(first, second) <= ATTEMPT | PAIR | DRAWN
    before, after = first.request, second.request
    assert after.num_generated == 3
    assert np.array_equal(after.token_ids[:-3], before.token_ids)
    assert after.token_ids[-3:].tolist() == list(made.script[:3])
    assert after.keys[: len(before.keys)] == before.keys
    assert after.num_siblings == 0


async def test_the_order_to_a_worker_that_drains_is_that_of_the_prompt(made: RouterCluster) -> None:
    gate = Pause(FaultStage.NEXT_TOKEN)
    for decode in made.decodes:
        decode.suffers(gate)
    asking = asyncio.create_task(made.http.post("/v1/messages", json=MESSAGE, headers=TRACE))
    await gate.reached(1)
    (first,) = made.prefills[0].orders
    (worker,) = (one for one in made.decodes if one.worker_id == first.decode.worker_id)
    worker.is_ready = False
    await until(lambda: bool(worker.moved))
    gate.release()
    assert (await asking).status_code == 200
    assert unlike(first, worker.moved[0]) <= ATTEMPT | PAIR | DRAWN


async def test_another_router_gives_the_order_of_the_first_one(made: RouterCluster) -> None:
    gate = Pause(FaultStage.NEXT_TOKEN)
    for decode in made.decodes:
        decode.suffers(gate)
    sampling = {name: value for name, value in EACH.items() if name not in NOT_IN_GRPC}
    asked: dict[str, Any] = {
        "request_id": "mine",
        "model": "kites",
        "prompt": pb.Prompt(text=SENTENCE * 4),
        "sampling": sampling | {"max_tokens": NUM_TOKENS, "stop": ["never"], "logprobs": 2},
    }
    call = made.stub.Generate(pb.GenerateRequest(**asked), metadata=tuple(TRACE.items()))
    started, tokens = (await call.read()).started, (await call.read()).tokens
    for decode in made.decodes:
        decode.faults.remove(gate)
    held = token_ids_from_bytes(tokens.token_ids)
    again = pb.GenerateRequest(
        **asked,
        resume_from_offset=len(held),
        num_sent_before=1,
        held_token_ids=token_ids_to_bytes(held),
        started_request_id=started.request_id,
    )
    async with another_router(made) as stub:
        async for _event in stub.Generate(again, metadata=tuple(TRACE.items())):
            pass
    call.cancel()
    first, second = made.prefills[0].orders
    others = {"context.taken_from", "router_id"}
    assert unlike(first, second) <= ATTEMPT | PAIR | DRAWN | others
    spans = [order.context.traceparent.split("-") for order in (first, second)]
    assert spans[0][1] == spans[1][1] == f"{7:032x}", "one trace, with a span of each router"
    assert second.context.taken_from == first.router_id == made.router.worker_id


async def test_a_second_place_in_the_queue_is_the_first_ones(
    made: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets, place = list[Ticket](), Dispatcher.place

    async def noted(self: Dispatcher, ticket: Ticket, *rest: Any) -> Any:
        tickets.append(ticket)
        return await place(self, ticket, *rest)

    monkeypatch.setattr(Dispatcher, "place", noted)
    fault: Fault = Refuse(FaultStage.PREFILL, Unavailable("not now"), times=1)
    made.prefills[0].suffers(fault)
    await twice(made, "/v1/messages")
    first, second = tickets
    assert unlike(first, second) == set()
    assert at_default(first) == {"cost", "share"}, "a cost is counted later; all have one share"
