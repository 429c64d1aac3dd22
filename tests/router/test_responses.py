"""`/v1/responses`: items of text, thoughts and calls, and the events that tell of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import SENTENCE, GiveUp, RouterCluster, events
from tests.router.tool_folders import (
    WEATHER_TOOL,
    prompt_text,
    says,
    tool_cluster,
)

from ferryman.schedule.request import FinishReason
from ferryman.wire.values import StreamFinished, Usage
from ferryman_router.intake.body_intake import LARGE_BYTES

RESPONSES = "/v1/responses"
FUNCTION: Any = WEATHER_TOOL["function"]
TOOL = {"type": "function", **FUNCTION}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
ALL_KINDS = "<think>Hm, two.</think>\n\nWell. " + CALL + "\n" + CALL.replace("Paris", "Oslo")


@pytest.fixture
async def calling(nats_url: str, tools_folder: Path) -> AsyncIterator[RouterCluster]:
    async with tool_cluster(nats_url, tools_folder, ALL_KINDS) as made:
        yield made


async def _ask(cluster: RouterCluster, **more: Any) -> Any:
    body = {"input": "weather?", "tools": [TOOL], "max_output_tokens": 200, **more}
    response = await cluster.post(RESPONSES, **body)
    assert response.status_code == 200, response.text
    return response


async def test_an_answer_has_an_item_for_each_thought_text_and_call(calling: RouterCluster) -> None:
    found = (await _ask(calling, metadata={"a": "b"}, temperature=0.5)).json()
    assert [item["type"] for item in found["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    thought, message, paris, oslo = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, two."}]
    (text,) = message["content"]
    assert (text["type"], text["text"], text["annotations"]) == ("output_text", "Well.", [])
    assert [json.loads(call["arguments"])["city"] for call in (paris, oslo)] == ["Paris", "Oslo"]
    assert (paris["name"], paris["call_id"] != oslo["call_id"]) == ("get_weather", True)
    assert {item["status"] for item in found["output"]} == {"completed"}
    assert len({item["id"] for item in found["output"]}) == 4
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert (found["store"], found["metadata"], found["temperature"]) == (False, {"a": "b"}, 0.5)
    assert found["tools"] == [TOOL]
    usage = found["usage"]
    assert usage["output_tokens"] == len(calling.decodes[0].script)
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_a_stream_tells_of_each_item_in_order(calling: RouterCluster) -> None:
    whole = (await _ask(calling)).json()
    told = events((await _ask(calling, stream=True)).text)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    names = [event["type"].removeprefix("response.") for event in told]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == "completed"
    order = [name for at, name in enumerate(names) if name != names[at - 1]]
    assert order[2:10] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
    ]
    assert order[-5:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert Counter(names)["function_call_arguments.delta"] > 4, "arguments come in pieces"
    assert _joined(told) == [_text(item) for item in whole["output"]]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == told[-1]["response"]["output"]
    assert [_text(item) for item in done] == [_text(item) for item in whole["output"]]


def _joined(told: list[Any]) -> list[str]:
    """The texts of the items as their deltas make them up."""
    texts: dict[int, str] = {}
    for event in told:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            texts[at] = texts.get(at, "") + event["delta"]
    return [texts[at] for at in sorted(texts)]


def _text(item: Any) -> str:
    return str(item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_a_cut_answer_is_incomplete(calling: RouterCluster) -> None:
    says(calling, SENTENCE)
    whole = (await _ask(calling, max_output_tokens=5)).json()
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert whole["output"][0]["status"] == "incomplete"
    told = events((await _ask(calling, max_output_tokens=5, stream=True)).text)
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["usage"]["output_tokens"] == 5


async def test_items_of_the_assistant_are_one_turn_for_the_template(calling: RouterCluster) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather"}
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {**call, "arguments": '{"city": "Paris"}', "id": "f", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    await _ask(calling, input=history, instructions="Be short.")
    prompt = prompt_text(calling)
    assert "<|system|>Be short.</s><|user|>weather?</s>" in prompt
    called = 'get_weather([["city", "Paris"]])'
    assert f"<|assistant|>Well.<tool_call>{called}</s><|tool|>sun[c1]</s>" in prompt
    assert json.dumps(FUNCTION["parameters"]) in prompt


async def test_a_form_of_the_text_is_a_grammar(calling: RouterCluster) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "A", "schema": schema, "strict": True}
    found = (await _ask(calling, text={"format": form}, tools=[])).json()
    grammar = calling.prefills[0].orders[0].request.sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema
    assert found["text"] == {"format": form}


async def test_a_demanded_call_is_under_a_grammar(calling: RouterCluster) -> None:
    says(calling, '{"city": "Rome"}')
    choice = {"type": "function", "name": "get_weather"}
    found = (await _ask(calling, tool_choice=choice)).json()
    (call,) = found["output"]
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Rome"}')
    assert found["tool_choice"] == choice


async def test_log_probabilities_are_those_of_the_text_alone(calling: RouterCluster) -> None:
    says(calling, "<think>Hm.</think>Well then.")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = (await _ask(calling, **asked)).json()
    shown = whole["output"][1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in shown).endswith("Well then.")
    assert "Hm" not in "".join(one["token"] for one in shown)
    assert {len(one["top_logprobs"]) for one in shown} == {1}
    told = events((await _ask(calling, **asked, stream=True)).text)
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == shown


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_a_body_of_any_size_comes_back_as_it_was(calling: RouterCluster, size: int) -> None:
    body = {"input": "weather?", "instructions": "Be é.", "max_output_tokens": 9}
    content = json.dumps(body).encode() + b" " * size
    found = (await calling.http.post(RESPONSES, content=content)).json()
    assert (found["instructions"], found["max_output_tokens"]) == ("Be é.", 9)


async def test_a_stream_that_breaks_off_says_so(calling: RouterCluster) -> None:
    given_up = calling.decodes[0].suffers(
        GiveUp(StreamFinished(FinishReason.CANCELLED, Usage(0)), offset=4)
    )
    told = events((await _ask(calling, stream=True)).text)
    assert given_up.happened == 3
    assert told[-1]["type"] == "response.failed"
    failed = told[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert (failed["error"]["reason"], failed["error"]["offset"]) == ("RetriesExhausted", 4)
    assert failed["id"] == told[0]["response"]["id"]


async def test_tokens_are_counted_as_they_would_be_served(calling: RouterCluster) -> None:
    """LiteLLM's proxy asks so for a client of Anthropic's API."""
    asked = {"input": "weather?", "instructions": "Be short.", "tools": [TOOL], "x": 1}
    counted = await calling.post(f"{RESPONSES}/input_tokens", **asked)
    await _ask(calling, **asked)
    prompt_len = len(calling.prefills[0].orders[0].request.token_ids)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": prompt_len}
    assert counted.headers["x-ferryman-ignored"] == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"model": "another"}, "model"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
    ],
)
async def test_no_tokens_are_counted_of_what_would_be_refused(
    fields: dict[str, Any], param: str, calling: RouterCluster
) -> None:
    body = {"model": "tiny", "input": "hi", **fields}
    counted = await calling.http.post(f"{RESPONSES}/input_tokens", json=body)
    asked = await calling.http.post(RESPONSES, json=body)
    assert counted.status_code == asked.status_code >= 400
    assert counted.json()["error"] == asked.json()["error"]
    assert counted.json()["error"]["param"] == param


async def test_the_client_of_openai_reads_a_stream_of_all_items(calling: RouterCluster) -> None:
    openai = pytest.importorskip("openai", reason="the extra `clients` has it")
    base_url = f"{calling.http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        asked = {"model": "tiny", "input": "weather?", "tools": [TOOL], "max_output_tokens": 200}
        async with client.responses.stream(**asked) as stream:
            names = [event.type async for event in stream]
            found = await stream.get_final_response()
        whole = await client.responses.create(**asked)
        asked.pop("max_output_tokens")
        counted = await client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == found.usage.input_tokens
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"
    assert found.output_text == whole.output_text == "Well."
    assert [item.type for item in found.output] == [item.type for item in whole.output]
    assert found.output[2].arguments == '{"city": "Paris"}'
    assert found.usage.output_tokens == whole.usage.output_tokens


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to answer": ({"input": None}, "input"),
    "no items": ({"input": []}, "input"),
    "what is stored": ({"store": True}, "store"),
    "a job": ({"background": True}, "background"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "c"}, "conversation"),
    "items left out": ({"truncation": "auto"}, "truncation"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "another include": ({"include": ["web_search_call.results"]}, "include"),
    "a tool of a type unheard of": ({"tools": [{"type": "weather"}]}, "tools[0].type"),
    "a group within a group": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}]},
        "tools[0].tools[0].type",
    ),
    "too long a name": (
        {
            "tools": [
                {
                    "type": "namespace",
                    "name": "a" * 70,
                    "tools": [{"type": "function", "name": "b" * 70}],
                }
            ]
        },
        "tools[0].tools[0].name",
    ),
    "a tool in the form of a chat": ({"tools": [WEATHER_TOOL]}, "tools[0].function"),
    "a choice of no tool": ({"tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
    "a form unheard of": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "an effort unheard of": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata"),
    "an item that is text": ({"input": ["x"]}, "input[0]"),
    "a role unheard of": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "an item unheard of": ({"input": [{"type": "x"}]}, "input[0].type"),
    "an item that is stored": ({"input": [{"type": "item_reference"}]}, "input[0].type"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    "a call without a name": (
        {"input": [{"type": "function_call", "call_id": "c"}]},
        "input[0].name",
    ),
    "arguments that are no object": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": [1]}]},
        "input[0].arguments",
    ),
    "an output of no call": (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
    ),
}


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {}, {"type": None}])
async def test_a_reference_to_an_item_is_told_how_to_send_it(
    item: dict[str, Any], calling: RouterCluster
) -> None:
    """AI SDK names its earlier items by their ids, unless its `store` is false. A reference needs
    no type."""
    body = {"input": [{"role": "user", "content": "x"}, {**item, "id": "msg_1"}]}
    response = await calling.post(RESPONSES, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input[1].type")
    assert error["message"].endswith("send the item itself, as clients do with store false")


async def test_bad_bodies_are_refused_by_name(calling: RouterCluster) -> None:
    for name, (fields, param) in BAD.items():
        body = {"input": "weather?", "tools": [TOOL], **fields}
        response = await calling.post(RESPONSES, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), name
    assert calling.prefills[0].orders == []
