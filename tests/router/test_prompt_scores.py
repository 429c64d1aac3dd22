"""A prompt's log probabilities at the router: whole before the first token, or an attempt is lost.

The fake prefill sends them in pieces of four tokens; each fault counts when it takes effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import (
    SENTENCE,
    Die,
    Fault,
    FaultStage,
    LateScores,
    Pause,
    RouterCluster,
    SpoilScores,
    collect,
)
from tests.waiting import until

from ferryman.client import Client
from ferryman.schedule.prompt_scores import PromptLogprob, PromptScores, joined
from ferryman.schedule.request import SamplingParams
from ferryman.wire.codec.inference import event_from_wire, prompt_to_wire
from ferryman.wire.codec.request import sampling_to_wire
from ferryman.wire.public import GenerateFinished, GenerateStarted, TextPrompt, TokenChunk
from ferryman.wire.v1 import inference_pb2 as pb

LONG = SENTENCE * 2
SCORED = SamplingParams(max_tokens=5, seed=3, prompt_logprobs=1)


def _request(request_id: str, **more: Any) -> pb.GenerateRequest:
    prompt, sampling = prompt_to_wire(TextPrompt(LONG)), sampling_to_wire(SCORED)
    return pb.GenerateRequest(request_id=request_id, prompt=prompt, sampling=sampling, **more)


async def _events(made: RouterCluster, request_id: str, **more: Any) -> list[Any]:
    call = made.stub.Generate(_request(request_id, **more))
    return [event_from_wire(message) for message in await collect(call)]


def _prompt(made: RouterCluster) -> list[int]:
    ids: list[int] = made.router.components.frontend.ctx.model.tokenizer.encode(LONG).tolist()
    return ids


def _check_scores(made: RouterCluster, scores: Sequence[PromptScores]) -> None:
    whole, prompt = joined(list(scores)), _prompt(made)
    assert whole.first == 1
    assert list(whole.positions()) == [
        {
            prompt[i]: PromptLogprob(-i / 8, i),
            prompt[i] + 1: PromptLogprob(-i / 8 - 1, 1),
        }
        for i in range(1, len(prompt))
    ]


def _check_answer(made: RouterCluster, events: Sequence[Any]) -> None:
    """Started, every score once, every token once, finished."""
    assert isinstance(events[0], GenerateStarted)
    scores = [event for event in events if isinstance(event, PromptScores)]
    assert events[1 : 1 + len(scores)] == scores
    _check_scores(made, scores)
    *chunks, last = events[1 + len(scores) :]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(made.script[:5])
    assert isinstance(last, GenerateFinished)


async def test_scores_come_between_started_and_the_first_token(one_pair: RouterCluster) -> None:
    events = await _events(one_pair, "s-1")
    _check_answer(one_pair, events)
    num_pieces = sum(isinstance(event, PromptScores) for event in events)
    assert num_pieces == (len(_prompt(one_pair)) - 1) // 4 == 8
    assert await _events(one_pair, "s-1", resume_from_offset=2) == [
        events[0],
        *[event for event in events[1:] if not isinstance(event, PromptScores)][2:],
    ]
    again = await _events(one_pair, "s-1")
    _check_answer(one_pair, again)
    assert len(one_pair.prefills[0].orders) == 1


async def test_the_sdk_gives_them_whole(one_pair: RouterCluster) -> None:
    async with Client(f"127.0.0.1:{one_pair.router.grpc_port}") as client:
        events = [event async for event in client.generate(LONG, SCORED)]
        assert isinstance(events[0], GenerateStarted)
        assert isinstance(events[1], PromptScores)
        _check_scores(one_pair, events[1:2])  # type: ignore[arg-type]
        one_token = client.generate([7], SCORED)
        kinds = [type(event) async for event in one_token]
    assert kinds == [GenerateStarted, *[TokenChunk] * 5, GenerateFinished]


Spoil = Callable[[list[PromptScores]], list[PromptScores]]


def _each_twice(pieces: list[PromptScores]) -> list[PromptScores]:
    return [piece for piece in pieces for _ in range(2)]


def _all_twice(pieces: list[PromptScores]) -> list[PromptScores]:
    return [*pieces, *pieces]


@pytest.mark.parametrize("spoil", [_each_twice, _all_twice])
async def test_pieces_that_come_twice_count_once(one_pair: RouterCluster, spoil: Spoil) -> None:
    spoilt = one_pair.prefills[0].suffers(SpoilScores(spoil))
    _check_answer(one_pair, await _events(one_pair, "s-2"))
    assert spoilt.happened == 1


def _without_the_third(pieces: list[PromptScores]) -> list[PromptScores]:
    return [*pieces[:2], *pieces[3:]]


def _without_the_last(pieces: list[PromptScores]) -> list[PromptScores]:
    return pieces[:-1]


def _in_another_order(pieces: list[PromptScores]) -> list[PromptScores]:
    return pieces[::-1]


@pytest.mark.parametrize("spoil", [_without_the_third, _without_the_last, _in_another_order, None])
async def test_an_attempt_without_all_scores_is_lost(
    two_pairs: RouterCluster, spoil: Spoil | None
) -> None:
    """The last case is a worker that dies before its hand-off, in the middle of them."""
    victim = min(two_pairs.prefills, key=lambda prefill: prefill.worker_id)
    fault: Fault = victim.suffers(SpoilScores(spoil or _without_the_last))
    if spoil is None:
        fault = victim.suffers(Die(FaultStage.SCORES))
    _check_answer(two_pairs, await _events(two_pairs, "s-3"))
    assert fault.happened == 1
    orders = [order for prefill in two_pairs.prefills for order in prefill.orders]
    assert [order.request.prompt_logprobs for order in orders] == [1, 1]
    life = await two_pairs.life_of("s-3")
    assert life.count("routed") == 2


async def test_tokens_that_overtake_the_scores_wait_for_them(one_pair: RouterCluster) -> None:
    last_word = one_pair.prefills[0].suffers(Pause(FaultStage.COMMITTED))
    late = one_pair.prefills[0].suffers(LateScores())
    reading = asyncio.ensure_future(_events(one_pair, "s-4"))
    await _until_held(one_pair, "s-4", 5)
    assert one_pair.request("s-4").output_log.chunks == []
    last_word.release()
    _check_answer(one_pair, await reading)
    assert late.happened == 1


async def _until_held(made: RouterCluster, request_id: str, num_frames: int) -> None:
    requests = made.router.components.frontend.requests

    def num_held() -> int:
        runner = requests.find(request_id)
        return len(runner._answer._held) if runner is not None else -1

    await until(lambda: num_held() == num_frames)


async def test_a_worker_that_dies_behind_the_scores_does_not_repeat_them(
    two_pairs: RouterCluster,
) -> None:
    victim = min(two_pairs.decodes, key=lambda decode: decode.worker_id)
    death = victim.suffers(Die(FaultStage.TOKEN, offset=2))
    _check_answer(two_pairs, await _events(two_pairs, "s-5"))
    assert death.happened == 1
    orders = [order for prefill in two_pairs.prefills for order in prefill.orders]
    scored = sorted(order.request.prompt_logprobs is not None for order in orders)
    assert scored == [False, True]


async def test_too_many_scores_are_refused_at_the_door(one_pair: RouterCluster) -> None:
    request = _request("s-6")
    request.sampling.prompt_logprobs = 21
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(one_pair.stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt_logprobs" in (caught.value.details() or "")
    assert not one_pair.prefills[0].orders
