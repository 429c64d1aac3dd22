"""The three protocols as tests of tools ask them: how a body is made, and what an answer shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.router.tool_folders import WEATHER_TOOL

Shown = tuple[str, list[tuple[str, str]]]
"""The text of an answer, and the names and arguments of its calls."""

USER = {"role": "user", "content": "weather?"}
FUNCTION: Any = WEATHER_TOOL["function"]


class Protocol(NamedTuple):
    """The way of a protocol to offer a tool, to demand a call, and to show what came of it."""

    path: str
    asks: dict[str, Any]
    demands: dict[str, Any]
    limit: str
    shown: Callable[[Any], Shown]
    streamed: Callable[[list[Any]], Shown]
    reason: Callable[[Any], object]


def chat_shown(answer: Any) -> Shown:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]


def sent(stream: str) -> list[Any]:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if "data: {" in line]
    return [json.loads(line) for line in lines]


def chat_streamed(said: list[Any]) -> Shown:
    text, calls = "", list[tuple[str, str]]()
    for frame in said:
        delta = frame["choices"][0]["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                calls.append((function["name"], ""))
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + function["arguments"])
    return text, calls


def response_shown(answer: Any) -> Shown:
    texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return "".join(texts), [(call["name"], call["arguments"]) for call in calls]


def response_streamed(said: list[Any]) -> Shown:
    text, calls = "", list[tuple[str, str]]()
    for event in said:
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        if event["type"] == "response.output_item.added" and "name" in event["item"]:
            calls.append((event["item"]["name"], ""))
        if event["type"] == "response.function_call_arguments.delta":
            calls[-1] = (calls[-1][0], calls[-1][1] + event["delta"])
    return text, calls


def message_shown(answer: Any) -> Shown:
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return "".join(texts), [(call["name"], json.dumps(call["input"])) for call in calls]


def message_streamed(said: list[Any]) -> Shown:
    text, calls = "", list[tuple[str, str]]()
    for event in said:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append((event["content_block"]["name"], ""))
        delta = event.get("delta", {})
        text += delta.get("text", "")
        if "partial_json" in delta:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta["partial_json"])
    return text, calls


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        {"messages": [USER], "tools": [WEATHER_TOOL]},
        {"tool_choice": "required"},
        "max_tokens",
        chat_shown,
        chat_streamed,
        lambda answer: answer["choices"][0]["finish_reason"] == "length",
    ),
    "responses": Protocol(
        "/v1/responses",
        {
            "input": [USER],
            "tools": [{"type": "function", **FUNCTION}],
        },
        {"tool_choice": "required"},
        "max_output_tokens",
        response_shown,
        response_streamed,
        lambda answer: answer["status"] == "incomplete",
    ),
    "messages": Protocol(
        "/v1/messages",
        {
            "messages": [USER],
            "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
        },
        {"tool_choice": {"type": "any"}},
        "max_tokens",
        message_shown,
        message_streamed,
        lambda answer: answer["stop_reason"] == "max_tokens",
    ),
}
