"""The messages of `/v1/messages`: content blocks as the turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.chat_messages import AssistantTurn, joined_text, tool_turn
from ferryman_router.bodies.field_kinds import (
    OBJECT,
    TEXT,
    FieldKind,
    Values,
    choice,
    mapping,
    record,
    required,
)

MESSAGE = record("content", role=choice("user", "assistant", "system", missing=""))
CONTENT_BLOCKS = {
    "text": record("type cache_control citations", text=TEXT),
    "thinking": record("type cache_control signature", thinking=TEXT),
    "tool_use": record("type cache_control caller", id=TEXT, name=TEXT, input=OBJECT),
    "tool_result": record(
        "type cache_control is_error", tool_use_id=TEXT, content=FieldKind({}, default="")
    ),
}
_OF_USER = ("text", "tool_result")
_OF_ASSISTANT = ("text", "thinking", "tool_use")
_TEXT = {"text": "text"}


def message_turns(values: Values) -> tuple[ChatTurn, ...]:
    """`system` and `messages`; InvalidRequest names the block and its field."""
    turns: list[ChatTurn] = []
    if values["system"] is not None:
        turns.append(ChatTurn("system", joined_text(values["system"], "system", _TEXT)))
    if not values["messages"]:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, value in enumerate(values["messages"]):
        message = MESSAGE.read(value, name := f"messages[{index}]")
        role, content = message["role"], message["content"]
        read = _assistant if role == "assistant" else _others
        turns += read(role, content, f"{name}.content")
    if not turns:
        raise InvalidRequest("messages must say something", "messages")
    return tuple(turns)


def goes_on(turns: Sequence[ChatTurn]) -> bool:
    """Whether the answer goes on with the last turn: it is the assistant's, and of text."""
    last = turns[-1]
    has_calls = "tool_calls" in json.loads(last.more or "{}")
    return last.role == "assistant" and bool(last.content) and not has_calls


def _others(role: str, content: Any, name: str) -> list[ChatTurn]:
    """Results of calls are turns of their own; the texts between them belong together."""
    turns: list[ChatTurn] = []
    text, has_text = "", False
    for block, place in _blocks(content, name, _OF_USER if role == "user" else ("text",)):
        if block["type"] == "text":
            text, has_text = text + block["text"], True
            continue
        if has_text:
            turns.append(ChatTurn(role, text))
        text, has_text = "", False
        output = joined_text(block["content"], f"{place}.content", _TEXT)
        turns.append(tool_turn(required(block, "tool_use_id", place), output))
    return [*turns, ChatTurn(role, text)] if has_text else turns


def _assistant(role: str, content: Any, name: str) -> list[ChatTurn]:
    turn = AssistantTurn()
    for block, place in _blocks(content, name, _OF_ASSISTANT):
        match block["type"]:
            case "text":
                turn.text += block["text"]
            case "thinking":
                turn.thought += block["thinking"]
            case "tool_use":
                called = required(block, "name", place)
                call_id = required(block, "id", place)
                turn.call(call_id, called, dict(block["input"]), f"{place}.name")
    return turn.turns()


def _blocks(value: Any, name: str, kinds: Sequence[str]) -> list[tuple[Values, str]]:
    """The blocks of a message, each with its name, checked for their types and names; a string is
    one of text."""
    if isinstance(value, str):
        return [({"type": "text", "text": value}, name)]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a string or a list of blocks", name)
    blocks, kind = [], choice(*kinds)
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        block_type = mapping(item, place).get("type")
        kind.check("" if block_type is None else block_type, f"{place}.type")
        blocks.append((CONTENT_BLOCKS[block_type].read(item, place), place))
    return blocks
