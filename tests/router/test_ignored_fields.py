"""Fields that no reader knows have no effect, and the answer says so wherever one looks."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any

import pytest
from tests.harness.router import RouterCluster, cluster, events, frames

from ferryman.errors import InvalidRequest
from ferryman_router.bodies.place import MAX_IGNORED, BodyPlace, BodyRules
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.body_intake import LARGE_BYTES
from ferryman_router.intake.reader import BODY_KINDS
from ferryman_router.request.metrics import MAX_IGNORED_NAMES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "whatever": 1}}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}", "x": 1}, "y": 2}

# By kind of body: a body, and the unknown names in it, with what they look like.
UNKNOWN: list[tuple[Api, dict[str, Any], list[str]]] = [
    (
        Api.COMPLETION,
        {"prompt": "a", "temprature": 1},
        ["temprature (did you mean temperature?)"],
    ),
    (Api.CHAT, {"messages": [USER], "prompt": "hi"}, ["prompt"]),
    (Api.CHAT, {"messages": [USER], "x": None}, []),
    (
        Api.COMPLETION,
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        ["stream_options.usage"],
    ),
    (Api.COMPLETION, {"prompt": "a", "ferryman": {"x": 1}}, ["ferryman.x"]),
    (
        Api.CHAT,
        {"messages": [{**USER, "x": 1}, {**USER, "x": 2}, {**USER, "y": None}]},
        ["messages[0].x"],
    ),
    (
        Api.CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txet": "b"}]}]},
        ["messages[0].content[0].txet (did you mean text?)"],
    ),
    (
        Api.CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        ["messages[1].tool_calls[0].y", "messages[1].tool_calls[0].function.x"],
    ),
    (
        Api.CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {**FUNCTION, "descripton": "x"}, "z": 1}],
            "chat_template_kwargs": {"anything": 1},
        },
        ["tools[0].z", "tools[0].function.descripton (did you mean description?)"],
    ),
    (
        Api.CHAT,
        {"messages": [USER], "response_format": {"type": "json_object", "shcema": {}}},
        ["response_format.shcema (did you mean schema?)"],
    ),
    (
        Api.COMPLETION,
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
        },
        ["response_format.json_schema.x"],
    ),
    (
        Api.COMPLETION,
        {"prompt": "a", "structured_outputs": {"regexp": "a"}},
        ["structured_outputs.regexp (did you mean regex?)"],
    ),
    (
        Api.RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "q": 1}]}],
            "text": {"format": {"type": "text", "r": 1}},
            "tools": [{"type": "function", **FUNCTION, "s": 1}],
        },
        ["tools[0].s", "text.format.r", "input[0].content[0].q"],
    ),
    (
        Api.MESSAGES,
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "a", "t": 1}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "u": 1}]}],
            "tools": [{"name": "f", "input_schema": {"v": 1}, "w": 1}],
        },
        ["tools[0].w", "system[0].t", "messages[0].content[0].u"],
    ),
]


@pytest.mark.parametrize(("api", "body", "wanted"), UNKNOWN)
def test_unknown_names_are_noted_at_every_depth(
    api: Api, body: dict[str, Any], wanted: list[str]
) -> None:
    place = BodyPlace.of_body()
    BODY_KINDS[api](body, place)
    assert [field.shown for field in place.ignored.listed] == wanted


@pytest.mark.parametrize(("api", "body", "wanted"), [case for case in UNKNOWN if case[2]])
def test_they_are_refused_by_name_where_bodies_are_read_strictly(
    api: Api, body: dict[str, Any], wanted: list[str]
) -> None:
    with pytest.raises(InvalidRequest, match="is no known field") as caught:
        BODY_KINDS[api](body, BodyPlace.of_body(BodyRules(is_strict=True)))
    assert caught.value.param == wanted[0].split()[0]


def test_a_body_of_unknown_names_is_read_as_quickly_as_any_other() -> None:
    body = {"prompt": "a", **{f"temperatur{index}": index for index in range(60_000)}}
    place = BodyPlace.of_body()
    BODY_KINDS[Api.COMPLETION](body, place)
    assert len(place.ignored.listed) == MAX_IGNORED


async def test_an_answer_names_what_had_no_effect(one_pair: RouterCluster) -> None:
    asked = {"temprature": 1, "max_tokens": 2, "é,\n\x7f": 1}
    shown = ["temprature (did you mean temperature?)", "é,\n\x7f"]
    body = json.dumps({"prompt": "hi", **asked})
    response = await one_pair.http.post(TEXT, content=body, headers={"x-request-id": "odd-1"})
    assert response.headers["x-ferryman-ignored"] == "temprature, ????"
    assert response.json()["usage"]["ferryman"]["ignored"] == shown
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"messages": [USER], **asked, **options})
    response = await one_pair.http.post(CHAT, content=body)
    assert response.headers["x-ferryman-ignored"] == "temprature, ????"
    assert frames(response.text)[-2]["usage"]["ferryman"]["ignored"] == shown
    body = json.dumps({"messages": [USER], **asked, "stream": True})
    response = await one_pair.http.post(MESSAGES, content=body)
    assert events(response.text)[-2]["usage"]["ferryman"]["ignored"] == shown
    body = json.dumps({"messages": [USER], **asked})
    counted = await one_pair.http.post(f"{MESSAGES}/count_tokens", content=body)
    assert counted.headers["x-ferryman-ignored"] == "temprature, max_tokens, ????"
    await one_pair.life_of("odd-1")
    recorded = await one_pair.recorded(one_pair.subjects.all_life_of("odd-1"))
    received = json.loads(recorded[0].payload)
    assert (received["event"], received["facts"]["ignored"]) == ("received", "temprature, ????")
    metrics = (await one_pair.http.get("/metrics")).text
    assert 'ferryman_router_ignored_fields_total{name="temprature"} 4.0' in metrics


async def test_an_answer_to_a_known_body_says_nothing_of_it(one_pair: RouterCluster) -> None:
    response = await one_pair.complete(max_tokens=2)
    assert "x-ferryman-ignored" not in response.headers
    assert "ignored" not in response.json()["usage"]["ferryman"]


async def test_a_large_body_is_read_alike(one_pair: RouterCluster) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2, "temprature": 1}) + " " * LARGE_BYTES
    response = await one_pair.http.post(TEXT, content=body)
    assert response.headers["x-ferryman-ignored"] == "temprature"


async def test_a_flood_of_names_makes_no_flood_of_series(one_pair: RouterCluster) -> None:
    for index in range(MAX_IGNORED_NAMES // MAX_IGNORED + 2):
        names = {f"{'x' * 70}{index}-{item}": 1 for item in range(MAX_IGNORED)}
        response = await one_pair.post("/tokenize", prompt="hi", **names)
        assert len(response.headers["x-ferryman-ignored"]) <= 1024
    metrics = (await one_pair.http.get("/metrics")).text
    series = [line for line in metrics.splitlines() if "ignored_fields_total{" in line]
    assert len(series) == MAX_IGNORED_NAMES + 1


async def test_a_strict_router_refuses_them(nats_url: str, folder: FilePath) -> None:
    async with cluster(nats_url, folder, strict_fields=True) as made:
        cases: list[tuple[str, dict[str, Any], str]] = [
            (TEXT, {"prompt": "hi", "temprature": 1}, "temprature"),
            (CHAT, {"messages": [{**USER, "x": 1}]}, "messages[0].x"),
            (RESPONSES, {"input": "hi", "x": 1}, "x"),
            ("/tokenize", {"prompt": "hi", "x": 1}, "x"),
        ]
        for path, body, param in cases:
            for padding in ("", " " * LARGE_BYTES):
                response = await made.http.post(path, content=json.dumps(body) + padding)
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == param
