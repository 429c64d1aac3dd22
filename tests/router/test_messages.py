"""Anthropic's `/v1/messages`: blocks of text, thoughts and calls, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import SENTENCE, GiveUp, RouterCluster, cluster, events
from tests.router.tool_folders import (
    WEATHER_TOOL,
    prompt_text,
    says,
    tool_cluster,
)

from ferryman.schedule.request import FinishReason
from ferryman.wire.values import StreamFinished, Usage
from ferryman_router.intake.body_intake import LARGE_BYTES

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "weather?"}
FUNCTION: Any = WEATHER_TOOL["function"]
TOOL = {
    "name": "get_weather",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
ALL_KINDS = "<think>Hm, two.</think>\n\nWell. " + CALL


@pytest.fixture
async def calling(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, ALL_KINDS) as made:
        yield made


async def _ask(cluster: RouterCluster, **more: Any) -> Any:
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": 200, **more}
    response = await cluster.post(MESSAGES, **body)
    assert response.status_code == 200, response.text
    return response


async def test_an_answer_has_a_block_for_each_thought_text_and_call(
    calling: RouterCluster,
) -> None:
    response = await _ask(calling)
    found = response.json()
    thought, text, call = found["content"]
    assert thought == {"type": "thinking", "thinking": "Hm, two.", "signature": ""}
    assert text == {"type": "text", "text": "Well."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )
    assert (found["type"], found["role"], found["stop_reason"]) == (
        "message",
        "assistant",
        "tool_use",
    )
    usage = found["usage"]
    assert usage["output_tokens"] == len(calling.decodes[0].script)
    prompt_len = len(calling.prefills[0].orders[0].request.token_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt_len
    assert found["id"].startswith("msg_")
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_a_stream_tells_of_each_block_in_order(calling: RouterCluster) -> None:
    whole = (await _ask(calling)).json()
    told = events((await _ask(calling, stream=True)).text)
    names = [event["type"] for event in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = told[0]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] > 0
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    open_blocks: list[int] = []
    texts: dict[int, str] = {}
    for event in told:
        match event["type"]:
            case "content_block_start":
                assert not open_blocks, "a block begins when the one before has ended"
                open_blocks.append(event["index"])
                texts[event["index"]] = ""
            case "content_block_delta":
                assert open_blocks == [event["index"]]
                (text,) = [event["delta"][name] for name in event["delta"] if name != "type"]
                texts[event["index"]] += text
            case "content_block_stop":
                assert open_blocks.pop() == event["index"]
    assert [texts[0], texts[1], json.loads(texts[2])] == [
        whole["content"][0]["thinking"],
        whole["content"][1]["text"],
        whole["content"][2]["input"],
    ]


async def test_an_answer_says_why_it_ended(calling: RouterCluster) -> None:
    says(calling, SENTENCE)
    cut = (await _ask(calling, max_tokens=3)).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    ended = (await _ask(calling)).json()
    assert (ended["stop_reason"], ended["content"][0]["text"]) == ("end_turn", SENTENCE)
    stopped = (await _ask(calling, stop_sequences=["never", "state"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "state")
    assert stopped["content"][0]["text"] == SENTENCE[: SENTENCE.index("state")]
    told = events((await _ask(calling, stop_sequences=["again. "], stream=True)).text)
    assert told[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "again. "}


async def test_blocks_are_turns_for_the_template(calling: RouterCluster) -> None:
    asked = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [_text("sun")]}
    history = [
        USER,
        {"role": "assistant", "content": [thought, _text("Well."), asked]},
        {"role": "user", "content": [result, _text("And "), _text("now?")]},
    ]
    system = [{**_text("Be short."), "cache_control": {"type": "ephemeral"}}]
    await _ask(calling, messages=history, system=system)
    prompt = prompt_text(calling)
    assert "<|system|>Be short.</s><|user|>weather?</s>" in prompt
    called = 'get_weather([["city", "Paris"]])'
    assert f"<|assistant|>Well.<tool_call>{called}</s><|tool|>sun[c1]</s>" in prompt
    assert prompt.endswith("<|user|>And \nnow?</s><|assistant|>")
    assert json.dumps(FUNCTION["parameters"]) in prompt


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


async def test_an_answer_goes_on_with_the_last_words_of_the_assistant(
    calling: RouterCluster,
) -> None:
    says(calling, "sunny.")
    found = (await _ask(calling, messages=[USER, {"role": "assistant", "content": "It is"}])).json()
    assert prompt_text(calling).endswith("<|assistant|>It is")
    assert found["content"] == [{"type": "text", "text": "sunny."}]


async def test_thinking_is_asked_for_or_not(calling: RouterCluster) -> None:
    says(calling, "Hm.</think>Four.")
    asked = {"type": "enabled", "budget_tokens": 1024}
    found = (await _ask(calling, thinking=asked, tools=[])).json()
    assert prompt_text(calling).endswith("<|assistant|><think>\n")
    assert [block["type"] for block in found["content"]] == ["thinking", "text"]
    says(calling, "<think>Hm.</think>Four.")
    found = (await _ask(calling, thinking={"type": "disabled"}, tools=[])).json()
    assert found["content"] == [{"type": "text", "text": "Four."}]


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_a_demanded_call_is_under_a_grammar(calling: RouterCluster, size: int) -> None:
    says(calling, '{"city": "Rome"}')
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
    content = json.dumps(body).encode() + b" " * size
    found = (await calling.http.post(MESSAGES, content=content)).json()
    (call,) = found["content"]
    assert (call["input"], found["stop_reason"]) == ({"city": "Rome"}, "tool_use")
    assert calling.prefills[0].orders[0].request.sampling.grammar is not None


async def test_tokens_are_counted_as_they_would_be_served(calling: RouterCluster) -> None:
    asked = {"messages": [USER], "system": "Be short.", "tools": [TOOL]}
    counted = await calling.post(f"{MESSAGES}/count_tokens", **asked)
    await _ask(calling, **asked)
    prompt_len = len(calling.prefills[0].orders[0].request.token_ids)
    assert counted.json() == {"input_tokens": prompt_len}


async def test_a_stream_that_breaks_off_ends_with_an_error(calling: RouterCluster) -> None:
    given_up = calling.decodes[0].suffers(
        GiveUp(StreamFinished(FinishReason.CANCELLED, Usage(0)), offset=4)
    )
    told = events((await _ask(calling, stream=True)).text)
    assert given_up.happened == 3
    assert told[-1]["type"] == "error"
    error = told[-1]["error"]
    assert (error["type"], error["reason"], error["offset"]) == (
        "overloaded_error",
        "RetriesExhausted",
        4,
    )


async def test_a_key_may_come_as_anthropic_sends_it(nats_url: str, tools_folder: Path) -> None:
    async with cluster(nats_url, tools_folder, api_keys="secret") as made:
        body = {"messages": [USER], "max_tokens": 2}
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            response = await made.http.post(MESSAGES, json=body, headers=headers)
            assert response.status_code == status
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "nothing said": ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    "a role unheard of": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type",
    ),
    "a call of the user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].type",
    ),
    "a result of no call": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    "stops that are none": ({"stop_sequences": [1]}, "stop_sequences"),
    "a tool of a type unheard of": ({"tools": [{"type": "bash"}]}, "tools[0].type"),
    "old calls left out": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
    ),
    "old thoughts left out": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        "context_management.edits[0]",
    ),
    "a schema that is none": (
        {"tools": [{"name": "a", "input_schema": []}]},
        "tools[0].input_schema",
    ),
    "a choice of no tool": ({"tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
    "a choice without a name": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "thinking in words": ({"thinking": {"type": "much"}}, "thinking.type"),
    "servers of tools": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    "a form unheard of": (
        {"output_config": {"format": {"type": "xml"}}},
        "output_config.format.type",
    ),
}


async def test_bad_bodies_are_refused_by_name(calling: RouterCluster) -> None:
    for name, (fields, param) in BAD.items():
        body = {"messages": [USER], "max_tokens": 9, "tools": [TOOL], **fields}
        response = await calling.post(MESSAGES, **body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), name
        assert error["param"] == param, name
    missing = await calling.post(MESSAGES, messages=[USER], max_tokens=9, model="other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = await calling.http.get(MESSAGES)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert calling.prefills[0].orders == []


async def test_the_client_of_anthropic_reads_a_stream_of_all_blocks(
    calling: RouterCluster,
) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra `clients` has it")
    base_url = str(calling.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none") as client:
        asked = {"model": "tiny", "messages": [USER], "tools": [TOOL], "max_tokens": 200}
        async with client.messages.stream(**asked) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            found = await stream.get_final_message()
        whole = await client.messages.create(**asked)
        counted = await client.messages.count_tokens(model="tiny", messages=[USER], tools=[TOOL])
        raw = await client.messages.with_raw_response.create(**asked, extra_body={"x": 1})
        assert raw.headers["x-ferryman-ignored"] == "x"
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**asked, extra_body={"container": "x"})
    assert text == "Well."
    assert [block.type for block in found.content] == [block.type for block in whole.content]
    assert found.content[2].input == whole.content[2].input == {"city": "Paris"}
    assert found.stop_reason == whole.stop_reason == "tool_use"
    usage = found.usage
    assert usage.output_tokens == whole.usage.output_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
