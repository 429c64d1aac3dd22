"""A line that changes with every request and means nothing to a model is no part of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.harness.router import RouterCluster, cluster
from tests.router.recorded_agents import recorded_calls
from tests.router.test_choices import orders_of

from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.place import AS_USUAL, BodyPlace, BodyRules
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.body_intake import LARGE_BYTES
from ferryman_router.intake.reader import BODY_KINDS

LINE = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
NAME = "line x-anthropic-billing-header"
INPUT = {"type": "input_text", "text": f"{LINE}\nbe\nbrief"}
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def system(content: Any, role: str = "system") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}, USER]}


# By name: the kind of body, a body with the line, and where the line stood.
BODIES: dict[str, tuple[Api, dict[str, Any], str]] = {
    "Claude Code's first block": (
        Api.MESSAGES,
        {"system": [text(LINE), text("be\nbrief")], "messages": [USER]},
        "system[0]",
    ),
    "the head of a text": (
        Api.MESSAGES,
        {"system": f"{LINE}\nbe\nbrief", "messages": [USER]},
        "system",
    ),
    "a system message among others": (
        Api.MESSAGES,
        system([text(f"{LINE}\nbe"), text("brief")]),
        "messages[0].content[0]",
    ),
    "a chat of a gateway": (Api.CHAT, system(f"{LINE}\nbe\nbrief"), "messages[0].content"),
    "parts of a chat": (
        Api.CHAT,
        system([text(LINE), text("be"), text("brief")], "developer"),
        "messages[0].content[0]",
    ),
    "instructions": (
        Api.RESPONSES,
        {"instructions": f"{LINE}\nbe\nbrief", "input": [USER]},
        "instructions",
    ),
    "an item": (
        Api.RESPONSES,
        {
            "input": [
                {"role": "developer", "content": [INPUT]},
                USER,
            ]
        },
        "input[0].content[0]",
    ),
}


def read(
    api: Api, body: dict[str, Any], rules: BodyRules = AS_USUAL
) -> tuple[list[str], list[str]]:
    """The texts of the turns, and what had no effect."""
    place = BodyPlace.of_body(rules)
    limit = {"max_tokens": 2} if api is Api.MESSAGES else {}
    (prompt,) = BODY_KINDS[api]({**body, **limit}, place).prompts
    assert isinstance(prompt, ChatPrompt)
    return [turn.content for turn in prompt.turns], [i.plain for i in place.ignored.listed]


@pytest.mark.parametrize("name", BODIES)
def test_it_is_left_out_and_the_answer_says_where_it_stood(name: str) -> None:
    api, body, place = BODIES[name]
    assert read(api, body) == (["be\nbrief", "hi"], [f"{place} {NAME}"])
    assert read(api, body, BodyRules(is_strict=True))[0] == ["be\nbrief", "hi"]


@pytest.mark.parametrize("name", BODIES)
def test_a_router_may_keep_it(name: str) -> None:
    api, body, _ = BODIES[name]
    assert read(api, body, BodyRules(is_verbatim=True)) == ([f"{LINE}\nbe\nbrief", "hi"], [])


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.MESSAGES, {"system": [text(LINE)], "messages": [USER]}),
        (Api.MESSAGES, system([text(LINE)])),
        (Api.CHAT, system(LINE)),
        (Api.RESPONSES, {"instructions": LINE, "input": [USER]}),
        (Api.RESPONSES, {"input": [{"role": "system", "content": LINE}, USER]}),
    ],
)
def test_a_message_that_has_nothing_else_is_no_message(api: Api, body: dict[str, Any]) -> None:
    assert read(api, body)[0] == ["hi"]


def test_elsewhere_it_is_text() -> None:
    """Only a system message has it, and only at the head of a part."""
    for role, words in [("user", f"{LINE}\nwhy?"), ("system", f"You see:\n{LINE}")]:
        body = {"messages": [{"role": role, "content": words}, USER]}
        assert read(Api.CHAT, body) == ([words, "hi"], [])
    empty = {"messages": [{"role": "system", "content": ""}, USER]}
    assert read(Api.CHAT, empty) == (["", "hi"], []), "an empty message of the sender's stays"


def test_claude_code_s_own_bodies_lose_it() -> None:
    claude = [call for call in recorded_calls() if call.client.startswith("claude-code")]
    posts = [call for call in claude if call.method == "POST"]
    assert len(posts) == 8
    for call in posts:
        texts, ignored = read(Api.MESSAGES, dict(call.body))
        assert not any("billing" in words for words in texts)
        assert f"system[0] {NAME}" in ignored


async def test_requests_that_differ_in_it_alone_have_one_prompt(
    one_pair: RouterCluster, nats_url: str, folder: Path
) -> None:
    def body(number: int, **more: Any) -> str:
        fields = {"system": [text(LINE.format(number)), text("be brief")], "messages": [USER]}
        return json.dumps({"model": "tiny", **fields, **more})

    for padding in ("", " " * LARGE_BYTES):
        for number in range(2):
            sent = body(number, max_tokens=2) + padding
            response = await one_pair.http.post("/v1/messages", content=sent)
            assert response.headers["x-ferryman-ignored"] == f"system[0] {NAME}"
            assert NAME in response.json()["usage"]["ferryman"]["ignored"][0]
    prompts = {order.request.token_ids.tobytes() for order in orders_of(one_pair)}
    assert len(prompts) == 1
    counted = await one_pair.http.post("/v1/messages/count_tokens", content=body(3))
    assert counted.headers["x-ferryman-ignored"] == f"system[0] {NAME}"
    async with cluster(nats_url, folder, verbatim_prompts=True) as made:
        kept = await made.http.post("/v1/messages/count_tokens", content=body(3))
        assert "x-ferryman-ignored" not in kept.headers
        assert kept.json()["input_tokens"] > counted.json()["input_tokens"]
