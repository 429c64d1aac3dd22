"""The bodies that real agents sent are read, mean what the agents meant, and are answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import RouterCluster
from tests.router.recorded_agents import CHAT, MESSAGES, RESPONSES, RecordedCall, recorded_calls
from tests.router.tool_folders import roomy_cluster

from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.parsed_request import ParsedRequest
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.reader import BODY_KINDS

ALL = recorded_calls()
POSTS = [call for call in ALL if call.method == "POST"]
CLIENTS = sorted({call.client for call in POSTS})
APIS = {CHAT: Api.CHAT, RESPONSES: Api.RESPONSES, MESSAGES: Api.MESSAGES}
EACH = pytest.mark.parametrize("call", POSTS, ids=[call.name for call in POSTS])


def test_there_are_bodies_of_many_clients() -> None:
    assert (len(POSTS), len(CLIENTS)) == (104, 22)


def _read(call: RecordedCall) -> tuple[ParsedRequest, BodyPlace]:
    place = BodyPlace.of_body()
    return BODY_KINDS[APIS[call.endpoint]](dict(call.body), place), place


def _prompt(call: RecordedCall) -> ChatPrompt:
    (prompt,) = _read(call)[0].prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


@EACH
def test_a_recorded_body_is_read(call: RecordedCall) -> None:
    body, place = _read(call)
    unknown = [field.shown for field in place.ignored.listed]
    assert [name for name in unknown if " of type " not in name and " line " not in name] == []
    limit = body.sampling.params.max_tokens
    assert (limit, body.sampling.is_open_ended) == (call.max_tokens or 1, call.max_tokens is None)
    assert body.is_stream == call.body.get("stream", False)
    assert body.sampling.params.temperature == call.body.get("temperature", 1.0)
    assert body.sampling.params.top_p == call.body.get("top_p", 1.0)


@EACH
def test_its_turns_are_those_of_the_client(call: RecordedCall) -> None:
    prompt = _prompt(call)
    told = [json.loads(turn.more or "{}") for turn in prompt.turns]
    calls = [called for more in told for called in more.get("tool_calls", [])]
    assert [
        (called["id"], called["function"]["name"], called["function"]["arguments"])
        for called in calls
    ] == call.calls
    assert [more["tool_call_id"] for more in told if "tool_call_id" in more] == call.results
    said = "\n".join(
        text
        for turn, more in zip(prompt.turns, told, strict=True)
        for text in (more.get("reasoning_content", ""), turn.content)
    )
    at = 0
    for text in call.texts:
        at = said.find(text, at)
        assert at >= 0, text
        at += len(text)
    assert len(said.replace("\n", "")) == len("".join(call.texts).replace("\n", ""))


@EACH
def test_its_tools_are_those_of_the_client(call: RecordedCall) -> None:
    variables = json.loads(_prompt(call).variables or "{}")
    names = {tool["function"]["name"] for tool in variables.get("tools", [])}
    assert names == call.tools


@pytest.fixture
async def roomy(nats_url: str, tmp_path: Path) -> AsyncIterator[RouterCluster]:
    async with roomy_cluster(nats_url, tmp_path, "Well, three.") as made:
        yield made


def _texts(value: Any) -> str:
    """All words of an answer, however deep."""
    if isinstance(value, dict):
        return "".join(_texts(item) for item in value.values())
    if isinstance(value, list):
        return "".join(map(_texts, value))
    return value if isinstance(value, str) else ""


async def test_each_client_gets_its_answer_whole_and_streamed(roomy: RouterCluster) -> None:
    for client in CLIENTS:
        call = max((call for call in POSTS if call.client == client), key=lambda call: call.file)
        body = {**call.body, "model": "tiny"}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in body:
                body[name] = 40
        for is_stream in (False, True):
            body["stream"] = is_stream
            if not is_stream:
                body.pop("stream_options", None)
            response = await roomy.http.post(call.path, json=body)
            assert response.status_code == 200, (call.name, response.text)
            if not is_stream and body.get("tool_choice", "auto") == "auto":
                assert "Well, three." in _texts(response.json()), call.name
