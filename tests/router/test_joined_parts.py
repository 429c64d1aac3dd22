"""Calls, checks and arguments where the router's parts meet: each was once left out by a draw of
planted defects, and no test noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.harness.router import (
    QUICK,
    SENTENCE,
    FaultStage,
    Pause,
    Refuse,
    RouterCluster,
    cluster,
    collect,
)
from tests.router.tool_folders import WEATHER_TOOL, prompt_text, tool_cluster
from tests.waiting import until

from ferryman.errors import Unavailable
from ferryman.handoff.request import RequestState
from ferryman.handoff.usage import CachedTokens
from ferryman.settings.router import LimitSettings
from ferryman.wire.public import TokenChunk
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman_router.answers.openai_responses import ChatFormat
from ferryman_router.request.placement import RequestPlacement
from ferryman_router.request.request_history import shown_route
from ferryman_router.request.request_table import Evacuation
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.prefix_sources import PrefixFetch
from ferryman_router.routing.routing_policy import Explanation, RouteChoice
from ferryman_router.service import _connection_limits

LONG = SENTENCE * 2


async def test_text_before_a_result_is_a_turn_before_it(nats_url: str, tools_folder: Path) -> None:
    text = {"type": "text", "text": "Before."}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sun"}
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [text, result, {"type": "text", "text": "After."}]},
    ]
    async with tool_cluster(nats_url, tools_folder, "Fine.") as made:
        more = {"messages": history, "tools": [tool], "max_tokens": 20}
        assert (await made.post("/v1/messages", **more)).status_code == 200
        told = "<|user|>Before.</s><|tool|>sun[c1]</s><|user|>After.</s><|assistant|>"
        assert prompt_text(made).endswith(told)


async def test_a_tool_of_another_type_is_refused_though_it_has_a_function(
    nats_url: str, tools_folder: Path
) -> None:
    async with tool_cluster(nats_url, tools_folder, "Fine.") as made:
        asked = [{"role": "user", "content": "weather?"}]
        tools = [{**WEATHER_TOOL, "type": "web_search"}]
        refused = await made.post("/v1/chat/completions", messages=asked, tools=tools)
        assert refused.status_code == 400
        assert "tools[0].type" in refused.json()["error"]["message"]


async def test_calls_without_a_seed_get_different_ones(one_pair: RouterCluster) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=1)
    for _ in range(3):
        asked = pb.GenerateRequest(prompt=pb.Prompt(text=LONG), sampling=sampling)
        await collect(one_pair.stub.Generate(asked))
    seeds = {order.request.sampling.seed for order in one_pair.prefills[0].orders}
    assert len(seeds) == 3


async def test_a_form_that_cannot_be_is_refused_before_a_worker_hears_of_it(
    one_pair: RouterCluster,
) -> None:
    refused = await one_pair.complete(LONG, guided_regex="a(")
    assert refused.status_code == 400
    assert not one_pair.prefills[0].orders


async def test_a_worker_that_was_not_reached_is_counted_as_one(one_pair: RouterCluster) -> None:
    unreached = Refuse(FaultStage.ORDER, Unavailable("the fake is not there"), times=1)
    one_pair.prefills[0].suffers(unreached)
    response = await one_pair.complete(LONG, max_tokens=2)
    assert response.json()["choices"][0]["text"] == one_pair.expected(2)
    retries = one_pair.router.components.frontend.ctx.metrics.retries
    causes = {
        sample.labels["cause"]: sample.value
        for metric in retries.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert causes == {"not_reached": 1.0}


async def test_a_request_whose_tokens_come_is_at_decode(one_pair: RouterCluster) -> None:
    gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 4, "stream": True}
    headers = {"x-request-id": "at-1"}
    call = one_pair.http.stream("POST", "/v1/completions", json=body, headers=headers)
    async with call as response:
        parts = response.aiter_bytes()
        await anext(parts)
        await gate.reached(1)
        assert one_pair.request("at-1").history.state is RequestState.DECODING
        gate.release()
        async for _ in parts:
            pass


async def test_an_answer_that_was_cut_tells_the_forecast_how_long_its_first_token_took(
    one_pair: RouterCluster,
) -> None:
    gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    body = {"prompt": LONG, "max_tokens": 4, "stream": True}
    components = one_pair.router.components
    async with one_pair.http.stream(
        "POST", "/v1/completions", json=body, headers={"x-request-id": "cut"}
    ) as response:
        await anext(response.aiter_bytes())
        await gate.reached(1)
        components.frontend.cancel(one_pair.request("cut"), "the test ends it")
        await until(lambda: one_pair.request("cut").output_log.end is not None)
        assert components.dispatcher.forecast._first_seconds, "one answer has begun"
        assert not components.dispatcher.forecast._output_tokens, "none is whole"
    gate.release()


async def test_a_request_that_leaves_is_asked_no_second_time(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, num_decodes=2, limits=QUICK) as made:
        gates = [decode.suffers(Pause(FaultStage.DETACH)) for decode in made.decodes]
        tokens = [decode.suffers(Pause(FaultStage.NEXT_TOKEN)) for decode in made.decodes]
        answer = asyncio.create_task(made.complete(LONG, max_tokens=4))
        await until(lambda: any(gate.happened for gate in tokens))
        number = 0 if tokens[0].happened else 1
        made.decodes[number].is_ready = False
        await gates[number].reached(1)
        frontend = made.router.components.frontend
        evacuation, asked = Evacuation(frontend.ctx), list(frontend._background._tasks)
        evacuation.look(frontend.requests, frontend.ctx.clock())
        assert list(frontend._background._tasks) == asked
        for gate in (*gates, *tokens):
            gate.release()
        assert (await answer).status_code == 200


async def test_streamed_answers_are_said_to_be(one_pair: RouterCluster) -> None:
    paths = (await one_pair.http.get("/openapi.json")).json()["paths"]
    streamed = {
        path
        for path, methods in paths.items()
        for operation in methods.values()
        if "text/event-stream" in operation["responses"]["200"]["content"]
    }
    assert {"/v1/completions", "/v1/chat/completions", "/v1/messages"} <= streamed
    assert not streamed & {"/v1/models", "/health", "/metrics"}


def test_each_limit_of_a_connection_is_the_settings_own() -> None:
    limits = LimitSettings(
        max_connections=11,
        max_connections_per_address=12,
        header_seconds=13.0,
        body_seconds=14.0,
        max_body_bytes=2**20,
    )
    made = _connection_limits(limits)
    assert (made.max_connections, made.max_per_address) == (11, 12)
    assert (made.header_seconds, made.body_seconds) == (13.0, 14.0)
    assert made.drain_bytes == 2**21


def test_a_route_shows_the_tokens_of_every_tier() -> None:
    cached = CachedTokens(device=16, host=32, storage=48, peer=64)
    fetch = PrefixFetch(16, cached, 0.1, 0.2, 0.3)
    prefill, decode = WorkerName("prefill-1", 1), WorkerName("decode-1", 1)
    choice = RouteChoice(prefill, decode, 1.0, 2.0, 3.0, 4.0, fetch, "grpc", "", unlike_tokens=5)
    shown = shown_route(Explanation(1, choice, (choice,)))
    for one in (shown.chosen, *shown.others):
        tiers = (one.device_tokens, one.host_tokens, one.storage_tokens, one.peer_tokens)
        assert tiers == (16, 32, 48, 64)
        assert (one.fetch_seconds, one.load_seconds, one.recompute_seconds) == (0.1, 0.2, 0.3)
        assert (one.row_seconds, one.plane, one.unlike_tokens) == (4.0, "grpc", 5)


def test_a_chunk_without_text_is_no_frame_of_a_chat() -> None:
    heading = SimpleNamespace(is_plain=True, answer_id="a", created=0, model="m")
    frames = ChatFormat(cast(Any, heading))
    assert frames.tokens(0, TokenChunk(0, (1,), "")) == b""


async def test_the_index_is_asked_for_the_pages_that_can_be_reused_and_no_more() -> None:
    """One token is always computed, so the last page of a prompt of whole pages is none of them."""

    class State:
        page_size = 4
        resume_shape = "shape"

    asked: list[tuple[Sequence[str], object]] = []

    async def usable_pages(chain: Sequence[str], shape: object) -> dict[str, object]:
        asked.append((chain, shape))
        return {}

    worker = SimpleNamespace(beat=SimpleNamespace(state=State(), node="node"))
    ctx = SimpleNamespace(
        fleet=SimpleNamespace(usable=lambda role, now: [worker, worker]),
        clock=lambda: 0.0,
        index=SimpleNamespace(usable_pages=usable_pages),
    )
    chains = SimpleNamespace(token_ids=range(12), of=lambda state: ["a", "b", "c"])
    await RequestPlacement._cache_index(cast(Any, SimpleNamespace(_ctx=ctx, chains=chains)))
    assert asked == [(["a", "b"], "shape")]
