"""The public gRPC service: streams, resuming by offset, explanations, the lifecycle log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import (
    QUICK,
    SENTENCE,
    Die,
    FaultStage,
    Pause,
    RouterCluster,
    cluster,
    collect,
)
from tests.skipped_time import skipped_time

from ferryman.handoff.lifecycle import check
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.codec.inference import event_from_wire
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.public import GenerateFinished, GenerateStarted, TokenChunk
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.inference_pb2_grpc import InferenceServiceStub
from ferryman_router.routing.generate_request import GenerateRequest, TokenizedRequest

LONG = SENTENCE * 2
LINGERING = QUICK.model_copy(update={"linger_seconds": 60.0})


def _request(request_id: str = "", **more: Any) -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=8)
    return pb.GenerateRequest(
        request_id=request_id, prompt=pb.Prompt(text=LONG), sampling=sampling, **more
    )


async def _events(call: grpc.aio.UnaryStreamCall[Any, Any]) -> list[Any]:
    return [event_from_wire(message) for message in await collect(call)]


async def test_a_stream_begins_goes_on_and_ends(one_pair: RouterCluster) -> None:
    first, *chunks, last = await _events(one_pair.stub.Generate(_request("g-1")))
    assert isinstance(first, GenerateStarted)
    assert (first.request_id, first.model) == ("g-1", "tiny")
    assert [chunk.offset for chunk in chunks] == list(range(8))
    assert isinstance(last, GenerateFinished)
    assert (last.usage.completion_tokens, last.usage.cached.device) == (8, 16)
    assert "".join(chunk.text for chunk in chunks) + last.text == one_pair.expected(8)


async def test_a_format_that_holds_nothing_is_in_the_trace(one_pair: RouterCluster) -> None:
    schema = '{"properties": {"a": {"type": "string", "format": "color"}, "é": {"format": "b"}}}'
    request = _request("g-format")
    request.sampling.grammar.kind = types_pb2.GRAMMAR_KIND_JSON_SCHEMA
    request.sampling.grammar.text = schema
    await collect(one_pair.stub.Generate(request))
    await one_pair.life_of("g-format")
    recorded = await one_pair.recorded(one_pair.subjects.all_life_of("g-format"))
    facts = json.loads(recorded[0].payload)["facts"]
    name = "sampling.grammar.properties"
    assert facts["ignored"] == f"{name}.a.format, {name}.?.format"


async def test_a_number_that_no_grammar_holds_is_refused(one_pair: RouterCluster) -> None:
    request = _request()
    request.sampling.grammar.kind = types_pb2.GRAMMAR_KIND_JSON_SCHEMA
    request.sampling.grammar.text = '{"items": {"const": -9223372036854775808}}'
    with pytest.raises(grpc.aio.AioRpcError, match=r"items.const is beyond 2\^53") as refused:
        await collect(one_pair.stub.Generate(request))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_finished_request_can_be_heard_again_from_any_offset(
    one_pair: RouterCluster,
) -> None:
    started, *chunks, last = await _events(one_pair.stub.Generate(_request("g-2")))
    again = await _events(one_pair.stub.Generate(_request("g-2", resume_from_offset=5)))
    assert again == [started, *chunks[5:], last]
    assert len(one_pair.prefills[0].orders) == 1


async def test_a_broken_connection_resumes_without_a_gap(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, limits=LINGERING) as one_pair:
        gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
        address = f"127.0.0.1:{one_pair.router.grpc_port}"
        async with channel(address) as first_channel:
            call = InferenceServiceStub(first_channel).Generate(_request("g-3"))
            seen = [event_from_wire(await call.read()) for _ in range(2)]
        gate.release()
        rest = await _events(one_pair.stub.Generate(_request("g-3", resume_from_offset=1)))
        chunks = [event for event in (*seen, *rest) if isinstance(event, TokenChunk)]
        assert [chunk.offset for chunk in chunks] == list(range(8))
        assert len(one_pair.prefills[0].orders) == 1


async def test_a_client_that_does_not_come_back_ends_its_request(one_pair: RouterCluster) -> None:
    one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
    call = one_pair.stub.Generate(_request("g-4"))
    await call.read()
    await call.read()
    call.cancel()
    assert await one_pair.decodes[0].until_aborted("g-4") == "client_gone"
    await one_pair.until_free()
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # too late: it has to begin anew
        await collect(one_pair.stub.Generate(_request("g-4", resume_from_offset=1)))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_reader_who_is_being_checked_is_back_already(
    nats_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(nats_url, folder, limits=LINGERING) as one_pair:
        time, frontend = skipped_time(monkeypatch), one_pair.router.components.frontend
        gate = one_pair.decodes[0].suffers(Pause(FaultStage.NEXT_TOKEN))
        call = one_pair.stub.Generate(_request("g-8"))
        await call.read()
        await call.read()
        output_log = one_pair.request("g-8").output_log
        is_checked, may_go_on, check_ask = asyncio.Event(), asyncio.Event(), frontend.check

        async def slow_check(ask: GenerateRequest) -> TokenizedRequest:
            is_checked.set()
            await may_go_on.wait()
            return await check_ask(ask)

        monkeypatch.setattr(frontend, "check", slow_check)
        call.cancel()
        num_listeners = 1
        while num_listeners:
            await asyncio.sleep(0.002)
            num_listeners = output_log.num_listeners
        again = one_pair.stub.Generate(_request("g-8", resume_from_offset=1))
        reading = asyncio.ensure_future(_events(again))
        await is_checked.wait()
        await time.skip(100.0)
        assert output_log.end is None
        may_go_on.set()
        gate.release()
        chunks = [event for event in await reading if isinstance(event, TokenChunk)]
    assert [chunk.offset for chunk in chunks] == list(range(1, 8))


async def test_an_id_cannot_be_used_for_something_else(one_pair: RouterCluster) -> None:
    await collect(one_pair.stub.Generate(_request("g-5")))
    other = pb.GenerateRequest(request_id="g-5", prompt=pb.Prompt(text="other"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(one_pair.stub.Generate(other))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_route_is_explained_with_its_runner_up(two_pairs: RouterCluster) -> None:
    await collect(two_pairs.stub.Generate(_request("g-6")))
    explained = await two_pairs.stub.Explain(pb.ExplainRequest(request_id="g-6"))
    (route,) = explained.routes
    assert (route.attempt, len(route.others)) == (1, 3)
    parts = route.chosen
    total = parts.queue_seconds + parts.load_seconds + parts.prefill_seconds
    assert parts.total_seconds == pytest.approx(total + parts.handoff_seconds)
    assert parts.total_seconds <= route.others[0].total_seconds
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await two_pairs.stub.Explain(pb.ExplainRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_lifecycle_is_read_from_the_log_and_legal(two_pairs: RouterCluster) -> None:
    two_pairs.decodes[0].suffers(Die(FaultStage.TOKEN, offset=3))
    await collect(two_pairs.stub.Generate(_request("g-7")))
    await two_pairs.life_of("g-7")
    trace = await two_pairs.stub.Trace(pb.TraceRequest(request_id="g-7"))
    assert trace.events[0].event == "received"
    found = [decode_event(event.json.encode()) for event in trace.events]
    assert [one for one in check(found) if one.rule != "missing_cause"] == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await two_pairs.stub.Trace(pb.TraceRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_models_and_tokens_are_told(one_pair: RouterCluster) -> None:
    (model,) = (await one_pair.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.model_id, model.max_len, model.page_size) == ("tiny", 600, 16)
    said = await one_pair.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="the ferry")))
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    assert said.token_ids == tokenizer.encode("the ferry").tobytes()
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    said = await one_pair.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(chat=chat)))
    assert len(said.token_ids) > 8
