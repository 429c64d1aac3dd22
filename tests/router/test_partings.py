"""A prompt's owner is told where it parts from an earlier one: in the usage, in the words of each
protocol, in the stream of the SDK. The log has positions alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from openai.types.responses import Response as OpenAIResponse
from tests.harness.router import SENTENCE, RouterCluster, cluster, events
from tests.router.tool_folders import roomy_cluster

from ferryman.client import ChatTurn, Client, GenerateStarted, SamplingParams
from ferryman_cli.chat import parting_note
from ferryman_cli.explain import parted_prompts

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MONDAY, TUESDAY = f"{SENTENCE} on Monday", f"{SENTENCE} on Tuesday"


def chat(system: str, *turns: str) -> list[dict[str, str]]:
    """A system message, then turns of the user and the assistant."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": words} for i, words in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


async def parts_of(made: RouterCluster, name: str, messages: Any, **more: Any) -> dict[str, Any]:
    headers = {"x-request-id": name, **more.pop("headers", {})}
    body = {"messages": messages, "max_tokens": 2, **more}
    response = await made.http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json()["usage"]["ferryman"].get("parts", {}))


async def test_the_usage_says_where_in_which_message_and_from_which_request(
    one_pair: RouterCluster,
) -> None:
    assert await parts_of(one_pair, "first", chat(MONDAY, "hi")) == {}
    assert await parts_of(one_pair, "again", chat(MONDAY, "hi")) == {}
    goes_on = chat(MONDAY, "hi", "well", "and?")
    assert await parts_of(one_pair, "third", goes_on) == {}, "it begins as the others do"
    parts = await parts_of(one_pair, "fourth", chat(TUESDAY, "hi"))
    tokenizer = one_pair.router.components.frontend.ctx.model.tokenizer
    ids = [tokenizer.encode_chat(chat(words, "hi")).tolist() for words in (TUESDAY, MONDAY)]
    at = parts["token"]
    assert ids[0][:at] == ids[1][:at]
    assert ids[0][at] != ids[1][at]
    assert (parts["in"], parts["from"]) == ("system[0]", "third")
    assert parts["ours"].startswith(tokenizer.spelt(ids[0][at : at + 1]))
    assert parts["theirs"].startswith(tokenizer.spelt(ids[1][at : at + 1]))
    assert SENTENCE[-4:] in parts["before"] + parts["ours"]
    assert parts["missed_tokens"] == len(ids[0]) - at
    other = await parts_of(one_pair, "fifth", chat(MONDAY, "hi", "well", "or?"))
    assert (other["in"], other["from"]) == ("user[1]", "third")


async def test_a_tool_in_another_place_is_named_as_such(nats_url: str, tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")
    ]
    async with roomy_cluster(nats_url, tmp_path, "Well, three.") as made:
        hello = chat(MONDAY, "hello there")
        assert await parts_of(made, "a", hello, model="tiny", tools=tools) == {}
        parts = await parts_of(made, "b", hello, model="tiny", tools=tools[::-1])
        assert (parts["in"], parts["from"]) == ("tools", "a")


async def test_the_log_has_the_place_and_no_words(one_pair: RouterCluster) -> None:
    secret, other = f"{SENTENCE} xyzzy", f"{SENTENCE} plugh"
    await parts_of(one_pair, "one", chat(secret, "hi"))
    parts = await parts_of(one_pair, "two", chat(other, "hi"))
    await one_pair.life_of("two")
    recorded = await one_pair.recorded(one_pair.subjects.all_life_of("two"))
    facts = json.loads(recorded[0].payload)["facts"]
    assert facts["parts"] == {"at": parts["token"], "missed": parts["missed_tokens"]}
    assert (facts["parts_in"], facts["parts_from"]) == ("system[0]", "one")
    log = b"".join(message.payload for message in recorded)
    assert b"xyzzy" not in log
    assert b"plugh" not in log
    async with Client(f"127.0.0.1:{one_pair.router.grpc_port}") as client:
        (place,) = parted_prompts(await client.trace("two"))
    assert place.text == (
        f"the prompt parts at token {parts['token']}, in system[0], from request one:"
        f" {parts['missed_tokens']} tokens may have been cached"
    )


async def test_no_tenant_hears_of_another_one_s_prompts(nats_url: str, folder: Path) -> None:
    async with cluster(nats_url, folder, api_keys="alpha,beta") as made:

        def key(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}"}

        assert await parts_of(made, "a", chat(MONDAY, "hi"), headers=key("alpha")) == {}
        assert await parts_of(made, "b", chat(TUESDAY, "hi"), headers=key("beta")) == {}
        parts = await parts_of(made, "c", chat(TUESDAY, "hi"), headers=key("alpha"))
        assert parts["from"] == "a"


async def test_the_sdk_s_first_event_has_it(one_pair: RouterCluster) -> None:
    async def started(words: str) -> GenerateStarted:
        turns = [ChatTurn("system", words), ChatTurn("user", "hi")]
        async for event in client.generate(turns, SamplingParams(max_tokens=2)):
            if isinstance(event, GenerateStarted):
                first = event
        return first

    async with Client(f"127.0.0.1:{one_pair.router.grpc_port}") as client:
        first = await started(MONDAY)
        assert not first.parting
        parting = (await started(TUESDAY)).parting
        assert (parting.place, parting.request_id) == ("system[0]", first.request_id)
        note = parting_note(parting)
        assert f"parts at token {parting.position}, in system[0], from request" in note


# In the words of each protocol.


async def test_a_message_has_the_diagnostics_of_anthropic(one_pair: RouterCluster) -> None:
    async def told(system: Any, previous: str | None, *turns: str, **more: Any) -> Any:
        body = {"max_tokens": 2, "system": system, "messages": chat("", *turns)[1:], **more}
        body["diagnostics"] = {"previous_message_id": previous}
        response = await one_pair.post(MESSAGES, **body)
        assert response.status_code == 200, response.text
        return response

    first = AnthropicMessage.model_validate((await told(MONDAY, None, "hi")).json())
    assert first.diagnostics is None
    same = (await told(MONDAY, first.id, "hi", "well", "and?")).json()
    assert same["diagnostics"] is None
    cases = [
        (TUESDAY, first.id, ("hi",), "system_changed"),
        (MONDAY, first.id, ("ho",), "messages_changed"),
        (MONDAY, "msg_unknown", ("hi",), "previous_message_not_found"),
    ]
    for system, previous, turns, reason in cases:
        read = AnthropicMessage.model_validate((await told(system, previous, *turns)).json())
        assert read.diagnostics is not None
        assert read.diagnostics.cache_miss_reason is not None
        assert read.diagnostics.cache_miss_reason.type == reason
        missed = getattr(read.diagnostics.cache_miss_reason, "cache_missed_input_tokens", None)
        assert (missed is None) == (reason == "previous_message_not_found")
    streamed = events((await told(TUESDAY, first.id, "hi", stream=True)).text)
    assert streamed[0]["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    unasked = (await one_pair.post(MESSAGES, max_tokens=2, messages=chat("", "hi")[1:])).json()
    assert "diagnostics" not in unasked


async def test_a_response_has_the_diagnostics_of_openai(one_pair: RouterCluster) -> None:
    async def told(words: str, named: str | None, **more: Any) -> Any:
        body = {"instructions": words, "input": "hi", "max_output_tokens": 2, **more}
        if named is not None:
            body["prompt_cache_options"] = {"comparison_response_id": named}
        response = await one_pair.post(RESPONSES, **body)
        assert response.status_code == 200, response.text
        return response

    first = (await told(MONDAY, None)).json()
    assert "prompt_cache_diagnostics" not in first
    cases = [
        (MONDAY, first["id"], {"type": "cache_hit"}),
        (MONDAY, "resp_unknown", {"type": "comparison_response_not_found"}),
    ]
    for words, named, wanted in cases:
        told_of = (await told(words, named)).json()
        assert told_of["prompt_cache_diagnostics"] == wanted
        assert OpenAIResponse.model_validate(told_of).prompt_cache_diagnostics is not None
    other = (await told(TUESDAY, first["id"])).json()
    diagnostics = other["prompt_cache_diagnostics"]
    assert (diagnostics["type"], diagnostics["reason"]) == ("cache_miss", "input_changed")
    missed = other["usage"]["ferryman"]["parts"]["missed_tokens"]
    assert diagnostics["cache_missed_tokens"] == missed
    options = OpenAIResponse.model_validate(other).prompt_cache_options
    assert options is not None
    assert (options.mode, options.comparison_response_id) == ("implicit", first["id"])
    streamed = events((await told(TUESDAY, first["id"], stream=True)).text)
    assert streamed[-1]["response"]["prompt_cache_diagnostics"] == diagnostics


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (MESSAGES, "diagnostics.previous_message_id"),
        (RESPONSES, "prompt_cache_options.comparison_response_id"),
    ],
)
async def test_an_id_that_is_no_text_is_refused_by_name(
    one_pair: RouterCluster, path: str, field: str
) -> None:
    name, inner = field.split(".")
    words: dict[str, Any] = {"messages": chat("", "hi")[1:], "max_tokens": 2}
    if path == RESPONSES:
        words = {"input": "hi"}
    response = await one_pair.post(path, **words, **{name: {inner: 7}})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
