"""Workers of unlike arithmetics: no state passes between them, and every answer says its level."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.harness.router import (
    SENTENCE,
    Die,
    FakeRouterWorker,
    FaultStage,
    RouterCluster,
    collect,
)
from tests.harness.router import STATE as OF_FAKES
from tests.router.test_role_patience import Room
from tests.router.test_routing_policy import ASKING, STATE, TOKENS, beat_of, fleet_of
from tests.waiting import until

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Exactness, Kind
from ferryman.errors import NoWorker
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.codec.caches import CacheSnapshot
from ferryman.wire.codec.inference import event_from_wire, explanation_from_wire, model_from_wire
from ferryman.wire.nats.heartbeat import NO_STATE, ServedState, beat_from_bytes, beat_to_bytes
from ferryman.wire.public import GenerateFinished
from ferryman.wire.redis.index import NodeLife, NodePrefix
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman_router.request.request_history import past_routes
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.routing_policy import RouteChoice, RoutingCosts, choose

LONG = SENTENCE * 2
ONE_RANK, TWO_RANKS = (f"cpu/avx512.znver4/float32/r2965f0ee/tp{ranks}" for ranks in (1, 2))
HERE = replace(STATE, digest="here", arithmetic=ONE_RANK)
THERE = replace(STATE, digest="there", arithmetic=TWO_RANKS)


def hold(fleet: Fleet, name: str, state: ServedState, num_pages: int) -> None:
    keys = ASKING.chains.of(state)[:num_pages]
    held = {Kind.FULL: keys, Kind.RECURRENT: keys[-1:]}
    fleet.on_cache_snapshot(WorkerName(name, 1), CacheSnapshot(name, 1, 0, held))


def chosen(fleet: Fleet, **more: Any) -> RouteChoice:
    explanation = choose(fleet, replace(ASKING, **more), costs=RoutingCosts(), now=0.0)
    assert explanation is not None
    return explanation.chosen


# The choice of workers.


def two_arithmetics() -> Fleet:
    return fleet_of(
        beat_of("prefill", 1, state=HERE, node="n1"),
        beat_of("decode", 1, state=HERE),
        beat_of("prefill", 2, state=THERE, node="n2", max_running=0),
        beat_of("decode", 2, state=THERE),
    )


def test_a_beat_has_the_arithmetic_of_its_worker() -> None:
    beat = beat_of("prefill", 1, state=HERE)
    again = beat_from_bytes(beat_to_bytes(beat))
    assert again == beat


def test_a_choice_says_its_level_and_what_others_keep_in_another_arithmetic() -> None:
    fleet = two_arithmetics()
    before = chosen(fleet)
    assert (before.exactness, before.unlike_tokens) == (Exactness.BITS, 0)
    hold(fleet, "prefill-00000002", THERE, 8)
    after = chosen(fleet)
    assert (after.prefill.worker_id, after.usable_tokens) == ("prefill-00000001", 0)
    assert after.unlike_tokens == 32
    hold(fleet, "prefill-00000001", HERE, 8)
    assert chosen(fleet).unlike_tokens == 0, "as much is here"


def test_state_of_another_model_is_no_other_arithmetic() -> None:
    other = replace(THERE, fingerprint="another")
    fleet = fleet_of(
        beat_of("prefill", 1, state=HERE),
        beat_of("decode", 1, state=HERE),
        beat_of("prefill", 2, state=other),
    )
    hold(fleet, "prefill-00000002", other, 8)
    assert chosen(fleet).unlike_tokens == 0


def test_a_host_cache_that_was_laid_out_for_another_arithmetic_keeps_nothing_on_a_device() -> None:
    """It joins before it knows a state, and says one from the first worker that attaches on."""
    fleet = two_arithmetics()
    joining = beat_of("hostcache", 1, state=NO_STATE, node="n1")
    fleet.on_heartbeat(joining, 0.0)
    fleet.on_heartbeat(replace(joining, state=THERE), 0.0)
    assert chosen(fleet).unlike_tokens == 0


def test_what_a_node_keeps_counts_for_the_arithmetic_it_was_asked_for() -> None:
    """Both nodes were asked for the keys of both states."""
    n1, n2 = (NodePrefix(NodeLife(node, 1), 9, 9) for node in ("n1", "n2"))
    fleet = two_arithmetics()
    other = chosen(fleet, cache_index={THERE: {"n1": n1, "n2": n2}})
    assert (other.cached.host, other.unlike_tokens) == (0, 36)
    own = chosen(fleet, cache_index={HERE: {"n1": n1}, THERE: {"n2": n2}})
    assert (own.cached.host, own.unlike_tokens) == (36, 0)


async def test_each_state_of_the_fleet_is_asked_for(
    two_pairs: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = two_pairs, list[PageKey]()

    async def usable_pages(_: object, keys: Sequence[PageKey], shape: object) -> dict[str, object]:
        asked.append(keys[0])
        return {}

    index = made.router.components.frontend.ctx.index
    monkeypatch.setattr(type(index), "usable_pages", usable_pages)
    for number, prefill in enumerate(made.prefills):
        prefill.node = f"n{number}"
        await made.until_node(prefill.node)
    assert (await made.complete(LONG, max_tokens=2)).status_code == 200
    assert len(asked) == 1, "both workers keep one state"
    asked.clear()
    await compute_in(made, ONE_RANK, made.prefills[0], made.decodes[0])
    await compute_in(made, TWO_RANKS, made.prefills[1], made.decodes[1])
    assert (await made.complete(LONG, max_tokens=2)).status_code == 200
    assert len(asked) == len(set(asked)) == 2


def test_a_prompt_that_is_scored_blames_no_arithmetic() -> None:
    fleet = two_arithmetics()
    hold(fleet, "prefill-00000002", THERE, 8)
    assert chosen(fleet, computes_all=True).unlike_tokens == 0


def test_workers_of_unlike_arithmetics_are_no_pair_and_their_roles_are_not_served() -> None:
    fleet = fleet_of(beat_of("prefill", 1, state=HERE), beat_of("decode", 1, state=THERE))
    assert choose(fleet, ASKING, costs=RoutingCosts(), now=0.0) is None
    assert not fleet.is_served("prefill")
    assert not fleet.is_served("decode")
    said = fleet.discord()
    assert ONE_RANK in said
    assert TWO_RANKS in said
    assert "exactness=values" in said
    fleet.on_heartbeat(beat_of("decode", 2, state=HERE), 0.0)
    assert fleet.is_served("prefill")
    assert fleet.is_served("decode")
    assert fleet.discord() == ""


def test_one_role_alone_has_no_discord() -> None:
    fleet = fleet_of(beat_of("prefill", 1, state=HERE))
    assert fleet.is_served("prefill")
    assert fleet.discord() == ""


def test_another_model_is_told_from_another_arithmetic() -> None:
    other = replace(THERE, fingerprint="another")
    fleet = fleet_of(beat_of("prefill", 1, state=HERE), beat_of("decode", 1, state=other))
    assert "another model" in fleet.discord()


def test_requests_that_wait_for_a_pair_are_refused_with_both_arithmetics() -> None:
    room = Room()
    for beat in (beat_of("prefill", 1, state=HERE), beat_of("decode", 1, state=THERE)):
        room.fleet.on_heartbeat(beat, room.now)
    room.pass_time(60.0)
    refusal = room.patience.refusal(room.now)
    assert isinstance(refusal, NoWorker)
    assert ONE_RANK in str(refusal)
    assert TWO_RANKS in str(refusal)


def test_all_workers_promise_what_each_of_them_does() -> None:
    fleet = fleet_of(beat_of("prefill", 1, state=HERE), beat_of("decode", 1, state=HERE))
    assert fleet.promise() == (Exactness.BITS, (ONE_RANK,))
    fleet.on_heartbeat(beat_of("prefill", 2, state=THERE), 0.0)
    assert fleet.promise() == (Exactness.BITS, (ONE_RANK, TWO_RANKS))
    fleet.on_heartbeat(beat_of("prefill", 3, state=STATE), 0.0)
    assert fleet.promise() == (Exactness.VALUES, ("any", ONE_RANK, TWO_RANKS))
    assert Fleet(1.0).promise() == (Exactness.VALUES, ())
    assert len(TOKENS) == 40


# Answers.


async def compute_in(made: RouterCluster, arithmetic: str, *workers: FakeRouterWorker) -> None:
    """Workers change their arithmetic, as if others had come in their place."""
    for worker in workers:
        worker.state = replace(OF_FAKES, digest=f"{arithmetic[-1]:a>32}", arithmetic=arithmetic)
    names = {worker.worker_id for worker in workers}
    await until(
        lambda: all(
            one.beat.state.arithmetic == arithmetic
            for one in made.fleet
            if one.beat.worker_id in names
        )
    )


@pytest.mark.parametrize(("arithmetic", "level"), [(ONE_RANK, "bits"), ("any", "values")])
async def test_every_protocol_the_card_and_the_log_say_the_level(
    one_pair: RouterCluster, arithmetic: str, level: str
) -> None:
    await compute_in(one_pair, arithmetic, *one_pair.prefills, *one_pair.decodes)
    messages = [{"role": "user", "content": "the ferry"}]
    answers = [
        await one_pair.complete(LONG, max_tokens=3),
        await one_pair.post("/v1/chat/completions", messages=messages, max_tokens=3),
        await one_pair.post("/v1/responses", input="the ferry", max_output_tokens=3),
        await one_pair.post("/v1/messages", messages=messages, max_tokens=3, model="tiny"),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["ferryman"]["exactness"] == level
    (card,) = (await one_pair.http.get("/v1/models")).json()["data"]
    assert card["ferryman"] == {"exactness": level, "arithmetics": [arithmetic]}
    (told,) = (await one_pair.stub.ListModels(pb.ListModelsRequest())).models
    assert model_from_wire(told).exactness.value == level
    assert list(told.arithmetics) == [arithmetic]
    sampling = types_pb2.SamplingParams(max_tokens=3)
    asked = pb.GenerateRequest(request_id="named", prompt=pb.Prompt(text=LONG), sampling=sampling)
    *_, last = await collect(one_pair.stub.Generate(asked))
    end = event_from_wire(last)
    assert isinstance(end, GenerateFinished)
    assert end.exactness.value == level
    (route,) = (await one_pair.stub.Explain(pb.ExplainRequest(request_id="named"))).routes
    assert explanation_from_wire(route).chosen.exactness.value == level
    request_id = answers[0].json()["usage"]["ferryman"]["request_id"]
    await one_pair.life_of(request_id)
    said = await one_pair.recorded(one_pair.subjects.all_life_of(request_id))
    events = {entry.name: entry.facts for entry in map(decode_event, (s.payload for s in said))}
    assert events["routed"]["exactness"] == events["finished"]["exactness"] == level
    past = past_routes([decode_event(entry.payload) for entry in said])
    assert past[0].chosen.exactness.value == level


async def test_an_answer_of_two_arithmetics_promises_no_bits(two_pairs: RouterCluster) -> None:
    """The first tokens are those of the pair that dies, the others those of another one."""
    made = two_pairs
    for arithmetic, prefill, decode in zip(
        (ONE_RANK, TWO_RANKS), made.prefills, made.decodes, strict=True
    ):
        await compute_in(made, arithmetic, prefill, decode)
    deaths = [decode.suffers(Die(FaultStage.TOKEN, offset=4)) for decode in made.decodes]
    broken = asyncio.create_task(made.complete(LONG, max_tokens=12))
    await until(lambda: sum(death.happened for death in deaths) == 1)
    for decode in made.decodes:
        decode.faults.clear()
    answer = (await broken).json()
    assert answer["choices"][0]["text"] == made.expected(12)
    assert answer["usage"]["ferryman"]["exactness"] == "values"
    whole = (await made.complete(LONG, max_tokens=12)).json()
    assert whole["usage"]["ferryman"]["exactness"] == "bits"


async def test_a_worker_is_told_what_others_keep_in_another_arithmetic(
    two_pairs: RouterCluster,
) -> None:
    made = two_pairs
    await compute_in(made, ONE_RANK, made.prefills[0], made.decodes[0])
    await compute_in(made, TWO_RANKS, made.prefills[1], made.decodes[1])
    first = await made.complete(LONG, max_tokens=2)
    assert first.status_code == 200
    served = next(prefill for prefill in made.prefills if prefill.orders)
    other = next(prefill for prefill in made.prefills if prefill is not served)
    keys = served.orders[0].request.keys
    held = {Kind.FULL: keys, Kind.RECURRENT: keys[-1:]}
    name = WorkerName(served.worker_id, served.epoch)
    made.fleet.on_cache_snapshot(name, CacheSnapshot(served.worker_id, served.epoch, 99, held))
    served.is_ready = False
    await until(lambda: len(made.fleet.usable("prefill", 0.0)) < 2)
    again = await made.complete(LONG, max_tokens=2)
    assert again.status_code == 200
    assert served.orders[0].unlike_pages == 0
    assert other.orders[0].unlike_pages == len(keys)
