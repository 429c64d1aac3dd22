"""Structured outputs through a whole cluster: hand-off, drafts and a killed decode worker change no
token, and every answer is of its grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.grammar.guided_model import GUIDES, ORDER, Guide, is_order, save_guided_model
from tests.harness.cluster import Cluster, ClusterShape, one_process, running_cluster

from ferryman.client import Client
from ferryman.errors import InvalidRequest
from ferryman.ids import make_request_id
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.wire.public import GenerateFinished, TokenChunk

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STREAMS = 24
MAX_TOKENS = 300
# Long enough to be in the middle when a worker dies.
LONG = OutputGrammar.json_schema({"type": "array", "items": ORDER, "minItems": 2, "maxItems": 2})


def is_two_orders(text: str) -> bool:
    return len(json.loads(text)) == 2 and all(is_order(json.dumps(one)) for one in json.loads(text))


ASKED: tuple[Guide, ...] = (*GUIDES, Guide("long", LONG, is_two_orders))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_guided_model(tmp_path_factory.mktemp("model") / "guided")
    drafts = {"draft": "ngram", "draft_tokens": 4}
    shape = ClusterShape(
        num_prefill=2,
        num_decode=2,
        max_running=16,
        memory_bytes=48 << 20,
        settings={"prefill": drafts, "decode": drafts},
    )
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def sampling_of(number: int) -> SamplingParams:
    way: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    grammar = (ASKED[-1] if number % 3 else ASKED[number % len(ASKED)]).grammar
    return SamplingParams(max_tokens=MAX_TOKENS, grammar=grammar, **way)


def guide_of(number: int) -> Guide:
    return ASKED[-1] if number % 3 else ASKED[number % len(ASKED)]


def prompt_of(number: int) -> list[int]:
    return [(7 * i + 3 * number) % 300 + 5 for i in range(20 + number % 9)]


async def test_a_killed_decode_worker_changes_no_structured_output(cluster: Cluster) -> None:
    with one_process(cluster.model) as llm:
        prompts = [prompt_of(n) for n in range(NUM_STREAMS)]
        wanted = llm.generate(prompts, [sampling_of(n) for n in range(NUM_STREAMS)])
    name, many, num_far = make_request_id(), asyncio.Event(), 0

    async def answer(client: Client, number: int) -> tuple[list[int], str, FinishReason]:
        nonlocal num_far
        token_ids, text = list[int](), ""
        asked = client.generate(
            prompt_of(number), sampling_of(number), request_id=f"{name}-{number}"
        )
        async for event in asked:
            match event:
                case TokenChunk():
                    num_far += len(token_ids) < 20 <= len(token_ids) + len(event.token_ids)
                    token_ids += event.token_ids
                    text += event.text
                    if num_far >= NUM_STREAMS // 3:
                        many.set()
                case GenerateFinished():
                    return token_ids, text + event.text, event.reason
        raise AssertionError("a stream without an end")

    async with Client(cluster.grpc) as client:
        reading = [asyncio.create_task(answer(client, n)) for n in range(NUM_STREAMS)]
        async with asyncio.timeout(300):
            await many.wait()
        cluster.of_role("decode")[0].kill()
        found = await asyncio.gather(*reading)
        routes = [await client.explain(f"{name}-{n}") for n in range(NUM_STREAMS)]
    assert sum(len(each) > 1 for each in routes) > 0, "somebody had to go on elsewhere"
    for number, ((token_ids, text, reason), expected) in enumerate(zip(found, wanted, strict=True)):
        assert tuple(token_ids) == expected.token_ids, number
        assert reason is FinishReason.STOP
        assert guide_of(number).is_right(text), (number, text)
    cluster.start("decode").await_ready()
    cluster.await_workers(prefill=2, decode=2)
    cluster.assert_ledgers_balance()


async def test_a_chat_over_http_answers_in_the_form_that_was_asked_for(cluster: Cluster) -> None:
    body = {
        "messages": [{"role": "user", "content": "the ferry"}],
        "max_tokens": MAX_TOKENS,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": ORDER}},
    }
    async with httpx.AsyncClient(base_url=cluster.http, timeout=120) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert is_order(answer["message"]["content"])


async def test_max_tokens_cuts_an_output_and_says_so(cluster: Cluster) -> None:
    async with Client(cluster.grpc) as client:
        sampling = SamplingParams(max_tokens=5, seed=1, grammar=LONG)
        events = [event async for event in client.generate([7, 8, 9], sampling)]
        assert isinstance(end := events[-1], GenerateFinished)
        assert end.reason is FinishReason.LENGTH
        bad = SamplingParams(grammar=OutputGrammar.regex("a(?=b)"))
        with pytest.raises(InvalidRequest, match="look-around"):
            [event async for event in client.generate([7, 8, 9], bad)]
