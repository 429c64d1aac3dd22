"""The messages of `/v1/messages`: content blocks as the turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.api_fields import CONTENT_BLOCKS, MESSAGE_OF_MESSAGES
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.content_parts import (
    AssistantTurn,
    joined_text,
    object_fields,
    tool_turn,
)

ROLES = ("user", "assistant", "system")
_OF_USER = ("text", "tool_result")
_OF_ASSISTANT = ("text", "thinking", "tool_use")
_TEXT = {"text": "text"}


def message_turns(fields: BodyFields) -> tuple[ChatTurn, ...]:
    """`system` and `messages`; InvalidRequest names the block and its field."""
    turns: list[ChatTurn] = []
    if fields.has("system"):
        turns.append(ChatTurn("system", joined_text(fields.value("system"), "system", _TEXT)))
    messages = fields.items("messages")
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, value in enumerate(messages):
        message = object_fields(value, f"messages[{index}]")
        message.check_names(MESSAGE_OF_MESSAGES, {})
        role = message.choice("role", "", ROLES)
        turns += _assistant(message) if role == "assistant" else _others(message, role)
    if not turns:
        raise InvalidRequest("messages must say something", "messages")
    return tuple(turns)


def goes_on(turns: Sequence[ChatTurn]) -> bool:
    """Whether the answer goes on with the last turn: it is the assistant's, and of text."""
    last = turns[-1]
    has_calls = "tool_calls" in json.loads(last.more or "{}")
    return last.role == "assistant" and bool(last.content) and not has_calls


def _others(message: BodyFields, role: str) -> list[ChatTurn]:
    """Results of calls are turns of their own; the texts between them belong together."""
    turns: list[ChatTurn] = []
    text, has_text = "", False
    for block in _blocks(message, _OF_USER if role == "user" else ("text",)):
        if block.text("type") == "text":
            text, has_text = text + block.text("text"), True
            continue
        if has_text:
            turns.append(ChatTurn(role, text))
        text, has_text = "", False
        output = joined_text(block.value("content", ""), block.name("content"), _TEXT)
        turns.append(tool_turn(_given(block, "tool_use_id"), output))
    return [*turns, ChatTurn(role, text)] if has_text else turns


def _assistant(message: BodyFields) -> list[ChatTurn]:
    turn = AssistantTurn()
    for block in _blocks(message, _OF_ASSISTANT):
        match block.text("type"):
            case "text":
                turn.text += block.text("text")
            case "thinking":
                turn.thought += block.text("thinking")
            case "tool_use":
                arguments = dict(block.inner("input").items_by_name())
                name = _given(block, "name")
                turn.call(_given(block, "id"), name, arguments, block.name("name"))
    return turn.turns()


def _blocks(message: BodyFields, known: Sequence[str]) -> list[BodyFields]:
    """The blocks of a message, checked for their types and names; a string is one of text."""
    value, name = message.value("content"), message.name("content")
    if isinstance(value, str):
        return [BodyFields({"type": "text", "text": value}, name)]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a string or a list of blocks", name)
    found = [object_fields(one, f"{name}[{i}]") for i, one in enumerate(value)]
    for block in found:
        kind = block.choice("type", "", known)
        block.check_names(CONTENT_BLOCKS[kind], {})
    return found


def _given(block: BodyFields, field: str) -> str:
    found: str = block.text(field)
    if not found:
        raise InvalidRequest(f"{block.name(field)} is missing", block.name(field))
    return found
