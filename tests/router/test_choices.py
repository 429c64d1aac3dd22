"""The answers to one prompt: the first goes ahead, its siblings follow it, the best are shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.harness.router import PAGE_SIZE, SENTENCE, FaultStage, Pause, RouterCluster

from ferryman.handoff.usage import CachedTokens
from ferryman.schedule.request import FinishReason
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman.wire.values import PrefillOrder, Usage
from ferryman_router.answers.logprobs import best_answers
from ferryman_router.answers.response_format import AnsweredChoice
from ferryman_router.intake.body_intake import LARGE_BYTES

LONG = SENTENCE * 2


def orders_of(cluster: RouterCluster) -> list[PrefillOrder]:
    return [order for prefill in cluster.prefills for order in prefill.orders]


@asynccontextmanager
async def held_before_their_tokens(cluster: RouterCluster) -> AsyncIterator[Pause]:
    """No request is given its first token within the block."""
    held = Pause(FaultStage.COMMIT)
    for prefill in cluster.prefills:
        prefill.suffers(held)
    try:
        yield held
    finally:
        held.release()


@pytest.mark.parametrize("prompt", [LONG, "the"], ids=["pages", "less than a page"])
async def test_the_first_answer_to_each_prompt_goes_ahead(
    one_pair: RouterCluster, prompt: str
) -> None:
    async with held_before_their_tokens(one_pair) as held:
        asked = asyncio.ensure_future(one_pair.complete([prompt, LONG], n=3, max_tokens=2, seed=5))
        await held.reached(2)
        firsts = orders_of(one_pair)
        assert [order.request.num_siblings for order in firsts] == [2, 2]
    body = (await asked).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    siblings = [order.request for order in orders_of(one_pair)[2:]]
    assert [one.num_siblings for one in siblings] == [0] * 4
    assert sorted(one.sampling.seed for one in siblings) == [6, 6, 7, 7]
    prompts = {order.request.token_ids.tobytes() for order in firsts}
    assert {one.token_ids.tobytes() for one in siblings} == prompts


async def test_an_answer_alone_has_no_sibling(one_pair: RouterCluster) -> None:
    await one_pair.complete([LONG, LONG], max_tokens=2)
    assert [order.request.num_siblings for order in orders_of(one_pair)] == [0, 0]


async def test_siblings_go_to_the_decode_worker_of_the_first(two_pairs: RouterCluster) -> None:
    await two_pairs.complete(SENTENCE * 8, n=4, max_tokens=2)
    orders = orders_of(two_pairs)
    assert len(orders) == 4
    assert len(orders[0].request.token_ids) > PAGE_SIZE
    assert len({order.decode.worker_id for order in orders}) == 1


async def test_an_answer_that_fails_before_it_began_has_no_siblings(
    one_pair: RouterCluster,
) -> None:
    async with held_before_their_tokens(one_pair) as held:
        asked = asyncio.ensure_future(one_pair.complete(LONG, n=3, max_tokens=2))
        await held.reached(1)
        frontend = one_pair.router.components.frontend
        (first,) = frontend.requests
        frontend.cancel(first, "test")
        response = await asked
    assert response.status_code == 499
    assert len(orders_of(one_pair)) == 1
    await one_pair.until_free()


async def test_a_client_that_leaves_ends_the_first_and_no_other_begins(
    one_pair: RouterCluster,
) -> None:
    async with held_before_their_tokens(one_pair) as held:
        asked = asyncio.ensure_future(one_pair.complete(LONG, n=3, max_tokens=2))
        await held.reached(1)
        asked.cancel()
        await asyncio.wait({asked})
        await one_pair.until_free()
    assert len(orders_of(one_pair)) == 1


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_the_best_of_several_answers_are_shown(one_pair: RouterCluster, size: int) -> None:
    asked: dict[str, Any] = {"prompt": [LONG, "the"], "n": 2, "best_of": 3, "max_tokens": 4}
    asked |= {"echo": True, "return_token_ids": True}
    content = json.dumps(asked).encode() + b" " * size
    body = (await one_pair.http.post("/v1/completions", content=content)).json()
    answer = one_pair.expected(4)
    assert [choice["text"] for choice in body["choices"]] == [LONG + answer] * 2 + [
        "the" + answer
    ] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    lens = [len(choice["prompt_token_ids"]) for choice in body["choices"]]
    assert lens[0] == lens[1] > lens[2] == lens[3]
    assert body["usage"]["prompt_tokens"] == lens[0] + lens[2], "a prompt counts once"
    assert body["usage"]["completion_tokens"] == 2 * 3 * 4, "all that was generated counts"
    orders = orders_of(one_pair)
    assert [order.request.sampling.logprobs for order in orders] == [1] * 6


def answer(*logprobs: float) -> AnsweredChoice:
    """An answer of tokens 0, 1, … in two chunks, each with a likelier token beside it."""
    drawn: list[Mapping[int, float]] = [
        {index: value, 1000: 0.0} for index, value in enumerate(logprobs)
    ]
    ids, cut = tuple(range(len(drawn))), len(drawn) // 2
    chunks = [
        TokenChunk(0, ids[:cut], "", tuple(drawn[:cut])),
        TokenChunk(cut, ids[cut:], "", tuple(drawn[cut:])),
    ]
    usage = Usage(1, cached=CachedTokens())
    return AnsweredChoice(chunks, GenerateFinished(FinishReason.STOP, usage))


def test_answers_are_ranked_by_the_mean_of_their_log_probabilities() -> None:
    short, long, equal, nothing = answer(-1.0), answer(-0.9, -0.5, -1.0), answer(-1.0), answer()
    found = best_answers([nothing, short, long, equal], 4)
    assert [id(one) for one in found] == [id(one) for one in (long, short, equal, nothing)]
    assert best_answers([nothing, short, long, equal], 1)[0] is long
