"""The places that a caller marks are kept, and usage counts them in each protocol's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anthropic.types import Message as AnthropicMessage
from tests.harness.router import SENTENCE, RouterCluster, events
from tests.router.test_choices import orders_of
from tests.router.tool_folders import tool_cluster

from ferryman.errors import InvalidRequest
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.text.marked_turn import MarkedChat
from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.body_intake import LARGE_BYTES
from ferryman_router.intake.reader import BODY_KINDS

PAGE_SIZE = 16
USER: dict[str, Any] = {"role": "user", "content": "hi"}
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def text(words: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": mark} if mark else {})}


async def asked(
    cluster: RouterCluster, size: int = 0, path: str = "/v1/messages", **body: Any
) -> tuple[LocatedPrompt, dict[str, Any]]:
    """The prompt of a body's order, and the usage of its answer."""
    sent = json.dumps({"max_tokens": 2, **body}) + " " * size
    response = await cluster.http.post(path, content=sent)
    assert response.status_code == 200, response.text
    request = orders_of(cluster)[-1].request
    return LocatedPrompt(request.token_ids, request.fork_points), response.json()["usage"]


def spelt(cluster: RouterCluster, ids: Any) -> str:
    return cluster.router.components.frontend.ctx.model.tokenizer.spelt(ids.tolist())


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_state_is_kept_at_a_mark_within_a_system_message(
    one_pair: RouterCluster, size: int
) -> None:
    """Also if another process reads the body."""
    system = [text(f"{SENTENCE} one", SHORT), text("the river and back again")]
    prompt, _ = await asked(one_pair, size, system=system, messages=[USER])
    before = [spelt(one_pair, prompt.token_ids[:fork]) for fork in prompt.fork_points]
    assert any(words.endswith(f"{SENTENCE} one") for words in before)
    plain = [text(f"{SENTENCE} one"), text("the river and back again")]
    unmarked, _ = await asked(one_pair, size, system=plain, messages=[USER])
    assert np.array_equal(unmarked.token_ids, prompt.token_ids)
    assert len(prompt.fork_points) == len(unmarked.fork_points) + 1


async def test_an_order_says_for_how_long_a_mark_is_to_be_kept(one_pair: RouterCluster) -> None:
    system = [text(f"{SENTENCE} one", LONG), text("the river and back again", SHORT)]
    prompt, _ = await asked(one_pair, system=system, messages=[USER])
    pins = orders_of(one_pair)[-1].request.pins
    assert [pin.seconds for pin in pins] == [3600, 300]
    assert {pin.position for pin in pins} <= set(prompt.fork_points)
    await asked(one_pair, system=SENTENCE, messages=[USER])
    assert orders_of(one_pair)[-1].request.pins == ()


async def test_marks_of_results_calls_and_parts_of_a_chat_are_read(one_pair: RouterCluster) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}, "cache_control": SHORT}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("wagons", SHORT)]}
    body = {
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [text("one"), text("two", LONG), text("three")]},
            {"role": "assistant", "content": [text("well"), call]},
            {"role": "user", "content": [{**result, "cache_control": LONG}, text("and?")]},
        ],
        "cache_control": SHORT,
    }
    (prompt,) = BODY_KINDS[Api.MESSAGES](body, BodyPlace.of_body()).prompts
    marks = [getattr(turn, "breakpoints", ()) for turn in prompt.turns]  # type: ignore[union-attr]
    assert marks == [((7, 3600),), ((4, 300),), ((6, 300), (6, 3600)), ((4, 300),)]
    chat = {"messages": [{"role": "user", "content": [text("a"), text("bc", LONG)]}]}
    (prompt,) = BODY_KINDS[Api.CHAT](chat, BodyPlace.of_body()).prompts
    assert prompt.turns[0].breakpoints == ((4, 3600),)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("api", "field", "kind"),
    [(Api.CHAT, "messages", "text"), (Api.RESPONSES, "input", "input_text")],
)
def test_a_breakpoint_of_openai_is_a_mark(api: Api, field: str, kind: str) -> None:
    points = [{"mode": "explicit"}, {"mode": "explicit", "ttl": "12h"}, None]
    content = [{"type": kind, "text": "one", "prompt_cache_breakpoint": point} for point in points]
    place = BodyPlace.of_body()
    body = {field: [{"role": "user", "content": content}]}
    (prompt,) = BODY_KINDS[api](body, place).prompts
    assert isinstance(prompt, ChatPrompt)
    assert [getattr(turn, "breakpoints", ()) for turn in prompt.turns] == [((3, 1800), (7, 43_200))]
    assert place.ignored.listed == ()


TOOL_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def named_tool(api: Api, name: str, **more: Any) -> dict[str, Any]:
    if api is Api.MESSAGES:
        return {"name": name, "input_schema": TOOL_SCHEMA, **more}
    return {"type": "function", "function": {"name": name, "parameters": TOOL_SCHEMA}, **more}


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.CHAT])
def test_marks_of_tools_are_read(api: Api) -> None:
    tools = [
        named_tool(api, "carry", cache_control=SHORT),
        named_tool(api, "wait", cache_control=None),
        named_tool(api, "return", cache_control=LONG),
    ]
    place = BodyPlace.of_body()
    body = {"messages": [USER], "max_tokens": 2, "tools": tools}
    (prompt,) = BODY_KINDS[api](body, place).prompts
    assert isinstance(prompt, MarkedChat)
    assert prompt.tool_breakpoints == ((0, 300), (2, 3600))
    assert place.ignored.listed == ()
    body["tools"] = [named_tool(api, "carry", cache_control={"type": "ephemeral", "ttl": "2d"})]
    with pytest.raises(InvalidRequest, match=r"tools\[0\].cache_control.ttl"):
        BODY_KINDS[api](body, BodyPlace.of_body())


def test_a_tool_that_is_left_out_marks_the_end_of_the_one_before() -> None:
    search = {"type": "web_search_20250305", "name": "carry", "cache_control": SHORT}
    later = named_tool(Api.MESSAGES, "later", defer_loading=True, cache_control=LONG)
    tools = [{**search, "name": "web_search"}, named_tool(Api.MESSAGES, "carry"), later]
    tools += [named_tool(Api.MESSAGES, "wait"), {**search, "name": "web_search"}]
    body = {"messages": [USER], "max_tokens": 2, "tools": tools}
    (prompt,) = BODY_KINDS[Api.MESSAGES](body, BodyPlace.of_body()).prompts
    assert isinstance(prompt, MarkedChat)
    assert prompt.tool_breakpoints == ((0, 3600), (1, 300))


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["small", "large"])
async def test_state_is_kept_at_the_end_of_a_marked_tool(
    nats_url: str, tools_folder: Path, size: int
) -> None:
    names = [f"{name} the ferry".replace(" ", "_") for name in ("carry", "await", "leave")]
    tools = [named_tool(Api.MESSAGES, name) for name in names]
    tools[1]["cache_control"] = LONG
    async with tool_cluster(nats_url, tools_folder, "well") as made:
        _, usage = await asked(made, size, messages=[USER], tools=tools)
        request = orders_of(made)[-1].request
        (pin,) = request.pins
        assert pin.seconds == 3600
        assert pin.position in request.fork_points
        told = spelt(made, request.token_ids[: pin.position])
        assert names[1] in told
        assert names[2] not in told
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 0


@pytest.mark.parametrize(
    ("mark", "param"),
    [("yes", "cache_control"), ({"type": "ephemeral", "ttl": "2d"}, "cache_control.ttl")],
)
async def test_a_mark_that_is_none_is_refused_by_name(
    one_pair: RouterCluster, mark: Any, param: str
) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages", {"messages": [USER], "cache_control": mark}, param),
        (
            "/v1/messages",
            {"messages": [{**USER, "content": [text("a", mark)]}]},
            f"messages[0].content[0].{param}",
        ),
        ("/v1/messages", {"messages": [USER], "system": [text("a", mark)]}, f"system[0].{param}"),
        (
            "/v1/chat/completions",
            {"messages": [{**USER, "content": [text("a", mark)]}]},
            f"messages[0].content[0].{param}",
        ),
    ]
    for path, body, name in cases:
        response = await one_pair.http.post(path, json={"max_tokens": 2, **body})
        assert response.status_code == 400, response.text
        assert name in response.json()["error"]["message"]


async def test_a_message_counts_what_was_read_and_what_was_written(one_pair: RouterCluster) -> None:
    """The three add up to the prompt; without a mark nothing was asked to be kept."""
    long = " ".join([SENTENCE] * 4)
    system = [text(long, LONG), text(long, SHORT), text(long)]
    prompt, usage = await asked(one_pair, system=system, messages=[USER])
    hour, short = [fork for fork in prompt.fork_points if fork][:2]
    created = usage["cache_creation"]
    assert usage["cache_read_input_tokens"] == PAGE_SIZE
    assert created["ephemeral_1h_input_tokens"] == hour // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    assert sum(created.values()) == short // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    assert usage["cache_creation_input_tokens"] == sum(created.values())
    counted = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in counted) == len(prompt.token_ids)
    _, plain = await asked(one_pair, system=long, messages=[USER])
    assert plain["cache_creation"] == dict.fromkeys(created, 0)
    body = {"max_tokens": 2, "system": system, "messages": [USER], "stream": True}
    response = await one_pair.post("/v1/messages", **body)
    assert events(response.text)[-2]["usage"]["cache_creation"] == created


async def test_clients_of_each_protocol_read_the_counts(one_pair: RouterCluster) -> None:
    system = [text(" ".join([SENTENCE] * 4), SHORT)]
    body = {"max_tokens": 2, "system": system, "messages": [USER]}
    answer = AnthropicMessage.model_validate((await one_pair.post("/v1/messages", **body)).json())
    assert answer.usage.cache_creation is not None
    assert answer.usage.cache_creation.ephemeral_5m_input_tokens > 0
    assert answer.usage.cache_creation_input_tokens is not None
    chat = [{"role": "system", "content": system}, USER]
    _, usage = await asked(one_pair, path="/v1/chat/completions", messages=chat)
    kept = usage["prompt_tokens"] // PAGE_SIZE * PAGE_SIZE
    wanted = {"cached_tokens": PAGE_SIZE, "cache_write_tokens": kept - PAGE_SIZE}
    assert usage["prompt_tokens_details"] == wanted
    body = {"instructions": SENTENCE * 4, "input": "hi"}
    usage = (await one_pair.post("/v1/responses", **body)).json()["usage"]
    assert set(usage["input_tokens_details"]) == set(wanted)
    assert usage["input_tokens_details"]["cache_write_tokens"] > 0


async def test_state_is_kept_before_the_latest_turns_of_the_user(one_pair: RouterCluster) -> None:
    """The first turn has its own place: where the system message ends."""
    turns = [
        {"role": role, "content": f"{SENTENCE} {number}"}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    prompt, _ = await asked(
        one_pair, path="/v1/chat/completions", messages=[*turns, {**USER, "content": "why?"}]
    )
    told = [spelt(one_pair, prompt.token_ids[fork:]) for fork in prompt.fork_points]
    assert len(told) == 3
    for words, start in zip(told, (SENTENCE, SENTENCE, "why?"), strict=True):
        assert words.startswith(start)
    assert f"{SENTENCE} 4" in told[0]
    assert f"{SENTENCE} 4" not in told[1]
