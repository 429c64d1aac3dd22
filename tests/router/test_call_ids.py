"""Kimi's calls have ids that its template shows the model: each protocol gives them out, and takes
them back, or others in their place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import RouterCluster, frames
from tests.router.tool_folders import (
    WEATHER_TOOL,
    joined_message,
    prompt_text,
    roomy_cluster,
    says,
)

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}{% if m.tool_call_id %}## Return of {{ m.tool_call_id }}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# {{ tools }} #}"
)
CALLS = "".join(
    f"<|tool_call_begin|>functions.get_weather:{number}<|tool_call_argument_begin|>"
    f'{{"city": "{city}"}}<|tool_call_end|>'
    for number, city in enumerate(("Paris", "Oslo"))
)
TURN = f"<|tool_calls_section_begin|>{CALLS}<|tool_calls_section_end|>"
IDS = ["functions.get_weather:0", "functions.get_weather:1"]
USER = {"role": "user", "content": "weather?"}
NAMED = {"name": "get_weather", "description": "", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


@pytest.fixture
async def kimi(nats_url: str, tmp_path: Path) -> AsyncIterator[RouterCluster]:
    async with roomy_cluster(nats_url, tmp_path, TURN, TEMPLATE) as made:
        yield made


def _history(*ids: str) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "sun"} for call_id in ids]
    return [USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


async def _chat(cluster: RouterCluster, messages: list[Any], **more: Any) -> Any:
    body = {"messages": messages, "tools": [WEATHER_TOOL], "max_tokens": 400, **more}
    return await cluster.post("/v1/chat/completions", **body)


async def test_a_chat_has_the_ids_that_the_model_wrote(kimi: RouterCluster) -> None:
    message = (await _chat(kimi, [USER])).json()["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == IDS
    *streamed_frames, _ = frames((await _chat(kimi, [USER], stream=True)).text)
    streamed = joined_message(streamed_frames)
    assert [call["id"] for call in streamed["tool_calls"]] == IDS
    results = [{"role": "tool", "tool_call_id": call_id, "content": "sun"} for call_id in IDS]
    await _chat(kimi, [USER, message, *results])
    # The model's own words come back to it, so its state is warm.
    assert TURN in prompt_text(kimi)
    assert f"## Return of {IDS[1]}" in prompt_text(kimi)


async def test_the_number_goes_on_through_a_conversation(kimi: RouterCluster) -> None:
    for ids in (("call_x1", "call_x2"), ("functions.get_weather:0", "functions_get_weather_1")):
        answer = (await _chat(kimi, _history(*ids))).json()["choices"][0]["message"]
        assert [call["id"] for call in answer["tool_calls"]] == [
            "functions.get_weather:2",
            "functions.get_weather:3",
        ]
        assert "<|tool_call_begin|>functions.get_weather:1<|tool_call_a" in prompt_text(kimi)
        assert "## Return of functions.get_weather:1" in prompt_text(kimi)
        assert not any(call_id in prompt_text(kimi) for call_id in ("call_x1", "get_weather_1"))


async def test_a_demanded_call_has_the_next_number(kimi: RouterCluster) -> None:
    says(kimi, '{"city": "Paris"}')
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    answer = await _chat(kimi, _history("call_x1"), tool_choice=chosen)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["id"] == "functions.get_weather:1"


async def test_responses_have_them_too(kimi: RouterCluster) -> None:
    body: dict[str, Any] = {"input": "weather?", "tools": [FUNCTION], "max_output_tokens": 400}
    calls = (await kimi.post("/v1/responses", **body)).json()["output"]
    assert [call["call_id"] for call in calls] == IDS
    streamed = (await kimi.post("/v1/responses", **body, stream=True)).text
    assert all(json.dumps(call_id) in streamed for call_id in IDS)
    outputs = [
        {"type": "function_call_output", "call_id": call_id, "output": "sun"} for call_id in IDS
    ]
    body["input"] = [{"role": "user", "content": "weather?"}, *calls, *outputs]
    await kimi.post("/v1/responses", **body)
    assert TURN in prompt_text(kimi)


async def test_messages_have_them_in_the_characters_of_that_protocol(kimi: RouterCluster) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
    body = {"messages": messages, "tools": [NAMED], "max_tokens": 400}
    whole = (await kimi.post("/v1/messages", **body)).json()["content"]
    plain = ["functions_get_weather_0", "functions_get_weather_1"]
    assert [block["id"] for block in whole] == plain
    streamed = (await kimi.post("/v1/messages", **body, stream=True)).text
    assert all(json.dumps(call_id) in streamed for call_id in plain)
    results = [{"type": "tool_result", "tool_use_id": one, "content": "sun"} for one in plain]
    messages += [{"role": "assistant", "content": whole}, {"role": "user", "content": results}]
    await kimi.post("/v1/messages", **body)
    assert TURN in prompt_text(kimi)
    assert f"## Return of {IDS[1]}" in prompt_text(kimi)
