"""Fields that say how often a prompt is answered, and what is shown of prompt and answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import (
    QUICK,
    SENTENCE,
    FaultStage,
    Pause,
    RouterCluster,
    cluster,
    frames,
)
from tests.router.tool_folders import prompt_text, says, tool_cluster, tool_folder

from ferryman.errors import ConfigError
from ferryman.schedule.token_rules import TokenRules
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman_router.intake.body_intake import LARGE_BYTES
from ferryman_router.intake.frontend import TURN_BYTES
from ferryman_router.routing.queue import Ticket, WaitQueue
from ferryman_router.served_model import generation_defaults

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LONG = SENTENCE * 2
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def thinking(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, "Hm.</think>Four.") as made:
        yield made


async def _chat(cluster: RouterCluster, **more: Any) -> Any:
    return await cluster.post(CHAT, **{"messages": [USER], "max_tokens": 100, **more})


async def test_several_answers_share_a_prompt_and_draw_with_seeds_of_their_own(
    one_pair: RouterCluster,
) -> None:
    body = (await one_pair.complete([LONG, "the"], n=2, max_tokens=3, seed=2**63 - 1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    orders = one_pair.prefills[0].orders
    seeds = [order.request.sampling.seed for order in orders]
    assert sorted(seeds) == [-(2**63)] * 2 + [2**63 - 1] * 2
    lens = {len(order.request.token_ids) for order in orders}
    assert body["usage"]["prompt_tokens"] == sum(lens)
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_further_answers_wait_until_the_prompt_is_computed(one_pair: RouterCluster) -> None:
    gate = one_pair.prefills[0].suffers(Pause(FaultStage.COMMIT))
    asked = asyncio.ensure_future(one_pair.complete(LONG, n=3, max_tokens=2))
    async with asyncio.timeout(120):
        while not gate.happened:
            await one_pair.http.get("/health")
    assert len(one_pair.prefills[0].orders) == 1
    gate.release()
    assert len((await asked).json()["choices"]) == 3
    assert len(one_pair.prefills[0].orders) == 3


async def test_several_answers_of_a_chat_are_streamed_side_by_side(one_pair: RouterCluster) -> None:
    said = frames((await _chat(one_pair, n=2, max_tokens=4, stream=True)).text)[:-1]
    texts = {0: "", 1: ""}
    for frame in said:
        choice = frame["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == dict.fromkeys((0, 1), one_pair.expected(4))


async def test_prompts_of_different_salts_share_no_page(one_pair: RouterCluster) -> None:
    for salt in (None, "a", "a", "b"):
        await one_pair.complete(LONG, max_tokens=2, cache_salt=salt)
    plain, first, again, other = (order.request.keys for order in one_pair.prefills[0].orders)
    assert first == again
    assert len({plain, first, other}) == 3
    assert not set(plain) & set(first)
    salts = [order.context.tenant_salt for order in one_pair.prefills[0].orders]
    assert (salts[0], salts[1] == salts[2]) == (b"", True)


async def test_two_tenants_with_one_salt_share_no_page(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, api_keys="one, two") as made:
        for key in ("one", "two"):
            body = {"prompt": LONG, "max_tokens": 2, "cache_salt": "same"}
            headers = {"authorization": f"Bearer {key}"}
            await made.http.post("/v1/completions", json=body, headers=headers)
        first, second = (order.request.keys for order in made.prefills[0].orders)
        assert not set(first) & set(second)


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_of_a_long_prompt_the_end_is_kept(one_pair: RouterCluster, size: int) -> None:
    body = {"prompt": [[*range(10, 30)], SENTENCE * 40], "max_tokens": 2}
    content = json.dumps({**body, "truncate_prompt_tokens": 5}).encode() + b" " * size
    response = await one_pair.http.post("/v1/completions", content=content)
    assert response.status_code == 200, response.text
    kept = [order.request.token_ids.tolist() for order in one_pair.prefills[0].orders]
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    last = tokenizer.encode(SENTENCE * 40).tolist()[-5:]
    assert sorted(kept) == sorted([[25, 26, 27, 28, 29], last])


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("max_tokens", [1, 2, 100, 511])
@pytest.mark.parametrize(
    "prompt", [[1] * 600, SENTENCE * 40, [1] * 511], ids=["ids", "text", "fits"]
)
async def test_as_much_of_a_prompt_as_fits_with_the_answer_is_kept(
    one_pair: RouterCluster, prompt: Any, max_tokens: int, size: int
) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "truncate_prompt_tokens": -1}
    content = json.dumps(body).encode() + b" " * size
    response = await one_pair.http.post("/v1/completions", content=content)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (512 - max_tokens, 512)


LONG_CHAT = [{"role": "user", "content": SENTENCE * 40}]
KEPT: dict[str, tuple[str, dict[str, Any], int]] = {
    "a chat": (CHAT, {"messages": LONG_CHAT, "max_completion_tokens": 50}, 462),
    "a chat without a limit": (CHAT, {"messages": LONG_CHAT}, 511),
    "one with a least length": (CHAT, {"messages": LONG_CHAT, "min_tokens": 30}, 482),
    "an echo alone": ("/v1/completions", {"prompt": [1] * 600, "max_tokens": 0, "echo": True}, 511),
    "messages": ("/v1/messages", {"messages": LONG_CHAT, "max_tokens": 40}, 472),
    "responses": ("/v1/responses", {"input": LONG_CHAT, "max_output_tokens": 40}, 472),
}


@pytest.mark.parametrize(("path", "body", "kept"), KEPT.values(), ids=KEPT.keys())
async def test_the_room_is_that_of_the_answer_in_every_protocol(
    one_pair: RouterCluster, path: str, body: dict[str, Any], kept: int
) -> None:
    response = await one_pair.post(path, **body, truncate_prompt_tokens=-1)
    assert response.status_code == 200, response.text
    assert len(one_pair.prefills[0].orders[-1].request.token_ids) == kept


async def test_without_room_for_any_prompt_the_limit_is_named(one_pair: RouterCluster) -> None:
    response = await one_pair.complete([1] * 9, max_tokens=512, truncate_prompt_tokens=-1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_chat_of_many_turns_is_cut_as_well(one_pair: RouterCluster) -> None:
    """Its body is small; with the words that the template adds, another process reads it."""
    messages = [{"role": "user", "content": ""}] * 1830
    assert len(json.dumps(messages)) < LARGE_BYTES < (TURN_BYTES + len("user")) * len(messages)
    body = {"messages": messages, "max_tokens": 3}
    response = await one_pair.post(CHAT, **body, truncate_prompt_tokens=7)
    assert response.status_code == 200, response.text
    assert len(one_pair.prefills[0].orders[-1].request.token_ids) == 7


async def test_a_stop_string_is_shown_on_demand(one_pair: RouterCluster) -> None:
    more = {"max_tokens": 100, "stop": "state ac", "include_stop_str_in_output": True}
    text = (await one_pair.complete(**more)).json()["choices"][0]["text"]
    assert text == SENTENCE[: SENTENCE.index("state ac")] + "state ac"
    said = frames((await one_pair.complete(**more, stream=True)).text)[:-1]
    assert "".join(frame["choices"][0]["text"] for frame in said) == text


async def test_control_tokens_are_shown_on_demand(one_pair: RouterCluster) -> None:
    says(one_pair, "one<|user|>two")
    for skips, text in ((True, "onetwo"), (False, "one<|user|>two</s>")):
        response = await one_pair.complete(max_tokens=50, skip_special_tokens=skips)
        assert response.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_token_ids_are_shown_on_demand(one_pair: RouterCluster, path: str) -> None:
    body = {"prompt": "the"} if path != CHAT else {"messages": [USER]}
    more = {**body, "max_tokens": 3, "return_token_ids": True}
    whole = (await one_pair.post(path, **more)).json()
    choice = whole["choices"][0]
    prompt = one_pair.prefills[0].orders[0].request.token_ids.tolist()
    assert choice["token_ids"] == list(one_pair.script[:3])
    assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    first, *said, done = frames((await one_pair.post(path, **more, stream=True)).text)
    assert done == "[DONE]"
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt
    shown = [one for frame in said for one in frame["choices"][0].get("token_ids", ())]
    assert shown == list(one_pair.script[:3])


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_rules_for_tokens_reach_the_workers(one_pair: RouterCluster, size: int) -> None:
    body = {
        "prompt": "the",
        "max_tokens": 3,
        "min_tokens": 2,
        "logit_bias": {"7": -3, "8": 0.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["ferry"],
    }
    content = json.dumps(body).encode() + b" " * size
    response = await one_pair.http.post("/v1/completions", content=content)
    assert response.status_code == 200, response.text
    rules = one_pair.prefills[0].orders[0].request.sampling.rules
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    words = tuple(tuple(tokenizer.encode(word).tolist()) for word in ("ferry", " ferry"))
    assert rules == TokenRules(2, ((7, -3), (8, 0.5)), (1, 2), words)


async def test_a_stop_string_ends_no_answer_before_its_least_length(
    one_pair: RouterCluster,
) -> None:
    says(one_pair, "one two one two one two one two")
    short = await one_pair.complete(max_tokens=100, stop=["two"])
    least = short.json()["usage"]["completion_tokens"] + 1
    longer = await one_pair.complete(max_tokens=100, stop=["two"], min_tokens=least)
    assert short.json()["choices"][0]["text"] == "one "
    assert longer.json()["choices"][0]["text"] == "one two one "


async def test_usage_is_shown_in_every_frame_on_demand(one_pair: RouterCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await one_pair.complete("the", max_tokens=5, stream=True, stream_options=options)
    *said, last, _ = frames(stream.text)
    counts = [frame["usage"]["completion_tokens"] for frame in said if "usage" in frame]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    assert said[0]["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + counts[0]


async def test_an_answer_goes_on_with_the_last_message(thinking: RouterCluster) -> None:
    messages = [USER, {"role": "assistant", "content": " Once </s> upon "}]
    response = await _chat(thinking, messages=messages, continue_final_message=True)
    assert response.status_code == 200, response.text
    assert prompt_text(thinking).endswith("<|assistant|> Once </s> upon ")


async def test_an_answer_needs_no_turn_of_its_own(thinking: RouterCluster) -> None:
    await _chat(thinking, add_generation_prompt=False)
    assert prompt_text(thinking).endswith("hi</s>")
    both = await _chat(thinking, add_generation_prompt=True, continue_final_message=True)
    assert both.json()["error"]["param"] == "continue_final_message"
    empty = [USER, {"role": "assistant", "content": " "}]
    nothing = await _chat(thinking, messages=empty, continue_final_message=True)
    assert nothing.json()["error"]["param"] == "continue_final_message"


async def test_the_template_hears_of_the_callers_variables(thinking: RouterCluster) -> None:
    response = await _chat(thinking, chat_template_kwargs={"enable_thinking": True})
    assert prompt_text(thinking).endswith("<think>\n")
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
    hidden = await _chat(
        thinking, chat_template_kwargs={"enable_thinking": True}, include_reasoning=False
    )
    assert "reasoning_content" not in hidden.json()["choices"][0]["message"]


async def test_an_effort_says_whether_to_think_unless_the_caller_does(
    thinking: RouterCluster,
) -> None:
    for effort, given, thinks in (
        ("low", {}, True),
        ("none", {}, False),
        ("high", {"enable_thinking": False}, False),
        ("none", {"enable_thinking": True}, True),
        ("high", {"thinking": False}, False),
    ):
        await _chat(thinking, reasoning_effort=effort, chat_template_kwargs=given)
        assert prompt_text(thinking).endswith("<think>\n") == thinks, (effort, given)


async def test_usage_has_the_tokens_of_thoughts_shown_or_not(thinking: RouterCluster) -> None:
    tokenizer = thinking.router.components.frontend.ctx.model.tokenizer
    thought = len(tokenizer.encode("Hm.", add_special_tokens=False))
    for shown in (True, False):
        more = {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": shown}
        whole = (await _chat(thinking, **more)).json()["usage"]
        options = {"include_usage": True}
        stream = await _chat(thinking, **more, stream=True, stream_options=options)
        for usage in (whole, frames(stream.text)[-2]["usage"]):
            found = usage["completion_tokens_details"]["reasoning_tokens"]
            assert thought <= found < usage["completion_tokens"], shown


async def test_a_template_that_knows_no_developer_calls_it_system(
    nats_url: str, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m.role }}.{% endfor %}"
    for name, more, role in (("old", "", "system"), ("new", "{# developer #}", "developer")):
        folder = tool_folder(tmp_path / name, template + more)
        async with tool_cluster(nats_url, folder, "ok") as made:
            await _chat(made, messages=[{"role": "developer", "content": "x"}, USER])
            assert prompt_text(made) == f"{role}.user."


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no answers": ({"n": 0}, "n"),
    "too many answers": ({"n": 65}, "n"),
    "a salt that is no text": ({"cache_salt": 7}, "cache_salt"),
    "a salt of nothing": ({"cache_salt": ""}, "cache_salt"),
    "a salt too long": ({"cache_salt": "x" * 1025}, "cache_salt"),
    "half a character of salt": ({"cache_salt": "\ud800"}, "cache_salt"),
    "cut to less than nothing": ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    "an effort unheard of": ({"reasoning_effort": "huge"}, "reasoning_effort"),
    "variables that are a list": ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    "a variable that is a field": (
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs.tools",
    ),
    "documents that are none": ({"documents": ["x"]}, "documents"),
    "a wish that is no wish": ({"skip_special_tokens": 0}, "skip_special_tokens"),
    "priority in words": ({"priority": "high"}, "priority"),
}


async def test_bad_options_are_named(thinking: RouterCluster) -> None:
    for name, (more, param) in BAD.items():
        content = json.dumps({"messages": [USER], **more})
        response = await thinking.http.post(CHAT, content=content)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), name


async def test_more_answers_than_one_call_may_have_are_refused(one_pair: RouterCluster) -> None:
    response = await one_pair.complete(["a"] * 10, n=7)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_prompts_are_tokenized_as_they_would_be_served(thinking: RouterCluster) -> None:
    tokenizer = thinking.router.components.frontend.ctx.model.tokenizer
    ids = tokenizer.encode("the ferry").tolist()
    text = await thinking.post("/tokenize", prompt="the ferry", return_token_strs=True)
    assert text.json()["tokens"] == ids
    assert (text.json()["count"], text.json()["max_model_len"]) == (len(ids), 600)
    assert "".join(text.json()["token_strs"]) == "the ferry"
    await _chat(thinking, documents=[{"text": "x"}])
    chat = await thinking.post("/tokenize", messages=[USER])
    assert chat.json()["tokens"] == thinking.prefills[0].orders[0].request.token_ids.tolist()
    back = await thinking.post("/detokenize", tokens=chat.json()["tokens"])
    assert back.json()["prompt"] == prompt_text(thinking)
    for path, body, param in (
        ("/tokenize", {"prompt": "a", "model": 7}, "model"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        refused = await thinking.post(path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_it_says_that_it_lives_and_in_which_version(one_pair: RouterCluster) -> None:
    assert (await one_pair.http.get("/ping")).status_code == 200
    assert (await one_pair.http.get("/version")).json()["version"].count(".") == 2


async def test_the_makers_of_a_model_set_its_defaults(nats_url: str, tmp_path: Path) -> None:
    folder = tool_folder(tmp_path / "model")
    path = folder / "generation_config.json"
    given = {**json.loads(path.read_text()), "temperature": 0.6, "top_k": 20, "max_length": 5}
    path.write_text(json.dumps(given))
    async with cluster(nats_url, folder) as made:
        await made.complete(max_tokens=2)
        await made.complete(max_tokens=2, temperature=0.1, top_k=None, top_p=0.5)
        first, second = (order.request.sampling for order in made.prefills[0].orders)
        assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
        assert (second.temperature, second.top_k, second.top_p) == (0.1, 20, 0.5)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="generation_config"):
        generation_defaults(folder)


def test_a_lower_priority_number_is_served_first_within_a_line() -> None:
    queue = WaitQueue(16, 16)
    for name, priority in (("a", 0), ("b", 0), ("c", -1), ("d", 5), ("e", 0)):
        queue.join(Ticket(name, "one", 1.0, priority=priority))
    served = []
    while len(queue):
        head = next(queue.heads())
        served.append(head.request_id)
        queue.take(head)
    assert served == ["c", "a", "b", "e", "d"]


async def test_an_operator_bounds_answers_to_requests_without_a_limit(
    nats_url: str, folder: Path
) -> None:
    """A client that names a limit gets it, be it more; min_tokens counts, too."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: list[tuple[str, dict[str, Any], int]] = [
        (CHAT, chat, 9),
        (CHAT, {**chat, "max_tokens": 12}, 12),
        (CHAT, {**chat, "max_completion_tokens": 3}, 3),
        (CHAT, {**chat, "min_tokens": 11}, 11),
        (RESPONSES, {"input": "hi"}, 9),
    ]
    limits = QUICK.model_copy(update={"default_max_tokens": 9})
    async with cluster(nats_url, folder, limits=limits) as made:
        for path, body, _ in bodies:
            assert (await made.http.post(path, json=body)).status_code == 200
        async for _ in made.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="hi"))):
            pass
        found = [order.request.sampling.max_tokens for order in made.prefills[0].orders]
    assert found == [*(most for *_, most in bodies), 9]
