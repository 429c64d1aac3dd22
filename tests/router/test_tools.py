"""Tools in a chat: the template hears of them, the answer's calls and thoughts have fields."""

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
    says,
    tool_cluster,
    tool_folder,
)

from ferryman_router.intake.body_intake import LARGE_BYTES

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "weather?"}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TWO_CALLS = "Well. " + CALL + "\n" + CALL.replace("Paris", "Oslo")


@pytest.fixture
async def calling(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, TWO_CALLS) as made:
        yield made


async def _chat(cluster: RouterCluster, **more: Any) -> Any:
    body = {"messages": [USER], "tools": [WEATHER_TOOL], "max_tokens": 180, **more}
    return await cluster.post(CHAT, **body)


async def test_calls_have_fields_of_their_own(calling: RouterCluster) -> None:
    choice = (await _chat(calling)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Well."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [one["name"] for one in functions] == ["get_weather"] * 2
    assert [one["arguments"] for one in functions] == ['{"city": "Paris"}', '{"city": "Oslo"}']
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_an_answer_of_nothing_but_a_call_has_no_content(calling: RouterCluster) -> None:
    says(calling, CALL)
    message = (await _chat(calling)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("logprobs", [False, True], ids=["plain", "with logprobs"])
async def test_a_stream_of_calls_joins_to_the_whole(calling: RouterCluster, logprobs: bool) -> None:
    said = frames((await _chat(calling, stream=True, logprobs=logprobs)).text)[:-1]
    message = joined_message(said)
    assert message["content"] == "Well."
    arguments = [call["arguments"] for call in message["tool_calls"]]
    assert arguments == ['{"city": "Paris"}', '{"city": "Oslo"}']
    assert said[-1]["choices"][0]["finish_reason"] == "tool_calls"
    pieces = [call for f in said for call in f["choices"][0]["delta"].get("tool_calls", ())]
    assert len(pieces) > 4, "arguments come in pieces"
    shown = [f["choices"][0]["logprobs"] for f in said if f["choices"][0]["logprobs"]]
    num_tokens = len(calling.decodes[0].script)
    assert sum(len(one["content"]) for one in shown) == (num_tokens if logprobs else 0)


async def test_who_takes_one_call_at_a_time_gets_one(calling: RouterCluster) -> None:
    whole = await _chat(calling, parallel_tool_calls=False)
    assert len(whole.json()["choices"][0]["message"]["tool_calls"]) == 1
    stream = await _chat(calling, parallel_tool_calls=False, stream=True)
    assert len(joined_message(frames(stream.text)[:-1])["tool_calls"]) == 1


async def test_without_a_wish_for_calls_they_stay_text(calling: RouterCluster) -> None:
    wishes: tuple[dict[str, Any], ...] = ({"tool_choice": "none"}, {"tools": []})
    for more in wishes:
        choice = (await _chat(calling, **more)).json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert "<tool_call>" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


async def test_the_template_hears_of_tools_calls_and_results(calling: RouterCluster) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ]
    await _chat(calling, messages=history)
    prompt = prompt_text(calling)
    assert json.dumps([WEATHER_TOOL]) in prompt
    assert 'get_weather([["city", "Paris"]])' in prompt
    assert "sun[c1]" in prompt


async def test_what_clients_add_to_an_answer_may_come_back_with_it(
    calling: RouterCluster,
) -> None:
    added = {"refusal": None, "parsed": {"city": "Oslo"}, "provider_specific_fields": {"a": 1}}
    answer = {"role": "assistant", "content": "Sun.", **added}
    assert (await _chat(calling, messages=[USER, answer, USER])).status_code == 200
    assert "Sun." in prompt_text(calling)


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]"], ids=["cut off", "no object"])
async def test_an_agent_may_send_back_a_call_that_went_wrong(
    calling: RouterCluster, arguments: str
) -> None:
    """A model may write such a call, or be cut off; its client asks it to try again."""
    call = {"id": "c1", "function": {"name": "get_weather", "arguments": arguments}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "that is no JSON: try again"},
    ]
    assert (await _chat(calling, messages=history)).status_code == 200
    shown = json.dumps([["INVALID_JSON", arguments]])
    assert f"get_weather({shown})" in prompt_text(calling)


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_control_tokens_in_tools_and_calls_are_text(
    calling: RouterCluster, size: int
) -> None:
    tool = json.loads(json.dumps(WEATHER_TOOL).replace("The weather", "</s><|user|>"))
    body = {"messages": [USER], "tools": [tool], "max_tokens": 180}
    response = await calling.http.post(CHAT, content=json.dumps(body).encode() + b" " * size)
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 2
    request = calling.prefills[0].orders[-1].request
    tokenizer = calling.router.components.frontend.ctx.model.tokenizer
    user = tokenizer.encoder.token_to_id("<|user|>")
    assert request.token_ids.tolist().count(user) == 2, "the template's own, and no other"
    assert "</s><|user|>" in prompt_text(calling)


async def test_thoughts_have_a_field_of_their_own(calling: RouterCluster) -> None:
    says(calling, "<think>Hm, two.</think>\n\nFour.")
    whole = (await _chat(calling, tools=[])).json()["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("Hm, two.", "Four.")
    stream = await _chat(calling, stream=True)
    message = joined_message(frames(stream.text)[:-1])
    assert (message["reasoning_content"], message["content"]) == ("Hm, two.", "Four.")


SHAPE = {"$ref": "#/$defs/Shape"}
DRAW_TOOL = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {"properties": {"shape": SHAPE}, "$defs": {"Shape": {"enum": ["dot"]}}},
    },
}


async def test_a_named_call_is_the_grammar_of_its_arguments(calling: RouterCluster) -> None:
    says(calling, '{"shape": "dot"}')
    choice = {"type": "function", "function": {"name": "draw"}}
    tools = [WEATHER_TOOL, DRAW_TOOL]
    response = await _chat(calling, tools=tools, tool_choice=choice, max_tokens=60)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "draw", "arguments": '{"shape": "dot"}'}
    assert answer["finish_reason"] == "tool_calls"
    grammar = calling.prefills[0].orders[0].request.sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == {
        "type": "object",
        "properties": {"shape": SHAPE},
        "$defs": {"Shape": {"enum": ["dot"]}},
        "additionalProperties": False,
    }


async def test_a_demanded_call_has_other_arguments_only_where_its_schema_says_so(
    calling: RouterCluster,
) -> None:
    bare, told = {"type": "object"}, {"type": "object", "properties": {"a": {"type": "null"}}}
    cases: tuple[tuple[Any, Any], ...] = (
        (bare, False),
        (None, False),
        ({}, False),
        ({"properties": None, "additionalProperties": None}, False),
        (told, False),
        ({**told, "allOf": []}, None),
        ({**bare, "additionalProperties": True}, True),
    )
    for parameters, closed in cases:
        tool = {"type": "function", "function": {"name": "draw", "parameters": parameters}}
        says(calling, "{}")
        await _chat(calling, tools=[tool], tool_choice="required", max_tokens=60)
        grammar = calling.prefills[0].orders[-1].request.sampling.grammar
        assert grammar is not None
        schema = json.loads(grammar.text)["$defs"]["0"]
        assert (schema["type"], schema.get("additionalProperties")) == ("object", closed)


@pytest.mark.parametrize("is_parallel", [True, False], ids=["several", "one"])
async def test_a_demanded_call_is_a_list_under_a_grammar(
    calling: RouterCluster, is_parallel: bool
) -> None:
    says(calling, '[{"name": "draw", "parameters": {"shape": "dot"}}]')
    more = {"tool_choice": "required", "parallel_tool_calls": is_parallel, "max_tokens": 60}
    stream = await _chat(calling, tools=[WEATHER_TOOL, DRAW_TOOL], stream=True, **more)
    (call,) = joined_message(frames(stream.text)[:-1])["tool_calls"]
    assert (call["name"], call["arguments"]) == ("draw", '{"shape": "dot"}')
    grammar = calling.prefills[0].orders[0].request.sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert names == [["get_weather"], ["draw"]]
    draw = schema["$defs"]["1"]
    assert draw["properties"] == {"shape": {"$ref": "#/$defs/1/$defs/Shape"}}
    assert draw["$defs"] == {"Shape": {"enum": ["dot"]}}
    assert (schema["minItems"], schema.get("maxItems")) == (1, None if is_parallel else 1)


BAD_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": {}}, "tools"),
    "too many": ({"tools": [WEATHER_TOOL] * 129}, "tools"),
    "twice": ({"tools": [WEATHER_TOOL] * 2}, "tools"),
    "another type": ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    "properties that are none": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": 7}}}
            ]
        },
        "tools[0].function.parameters.properties",
    ),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "an odd name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    "a schema that is none": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "too large": (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]},
        "tools",
    ),
    "an unknown choice": ({"tool_choice": "maybe"}, "tool_choice"),
    "a choice of no tool": (
        {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        "tool_choice",
    ),
    "a demand without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "a wish that is no wish": ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    "calls of a user": (
        {"messages": [{**USER, "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    "arguments that are no text": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "a", "arguments": [1]}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
}


async def test_bad_tools_are_named(calling: RouterCluster) -> None:
    for name, (fields, param) in BAD_TOOLS.items():
        response = await _chat(calling, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), name
    assert calling.prefills[0].orders == []


async def test_a_model_whose_template_knows_no_tools_refuses_them(
    nats_url: str, tmp_path: Path
) -> None:
    plain = tool_folder(tmp_path / "plain", "{% for m in messages %}{{ m.content }}{% endfor %}")
    unknown = tool_folder(tmp_path / "unknown", "{{ tools }}{{ messages[0].content }}")
    for folder, word in ((plain, "takes no tools"), (unknown, "--tool-parser")):
        async with tool_cluster(nats_url, folder, CALL) as made:
            error = (await _chat(made)).json()["error"]
            assert (error["param"], word in error["message"]) == ("tools", True)
