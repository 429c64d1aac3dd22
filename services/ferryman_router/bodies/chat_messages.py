"""The messages of a chat: roles, texts, calls of tools and their results, for a template."""

from __future__ import annotations

import json
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.api_fields import MESSAGE, NOT_IN_MESSAGES
from ferryman_router.bodies.body_fields import BodyFields

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CALLS = 128
INVALID_JSON = "INVALID_JSON"  # the word that Pydantic AI has for the same


def chat_turns(fields: BodyFields) -> tuple[ChatTurn, ...]:
    """The turns in `messages`; InvalidRequest names the message and its field."""
    found = fields.items("messages")
    if not found:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return tuple(_turn(one, f"messages[{i}]") for i, one in enumerate(found))


def _turn(value: object, name: str) -> ChatTurn:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)
    fields = BodyFields(value, name)
    fields.check_names(MESSAGE, NOT_IN_MESSAGES)
    role = fields.text("role")
    if role not in ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(ROLES)}", f"{name}.role")
    more = _more(fields, role)
    return ChatTurn(role, _content(fields, more), json.dumps(more) if more else "")


def _more(fields: BodyFields, role: str) -> dict[str, Any]:
    """The fields of a message besides its text. Templates know a thought by either name."""
    more: dict[str, Any] = {}
    for name in ("name", "tool_call_id"):
        if fields.has(name):
            more[name] = fields.text(name)
    thought = fields.text("reasoning_content") or fields.text("reasoning")
    if thought and role == "assistant":
        more["reasoning_content"] = thought
    calls = fields.items("tool_calls")
    if calls and role != "assistant":
        name = fields.name("tool_calls")
        raise InvalidRequest(f"{name} belongs to messages of the assistant", name)
    if len(calls) > MAX_CALLS:
        name = fields.name("tool_calls")
        raise InvalidRequest(f"{name} holds at most {MAX_CALLS} calls", name)
    if calls:
        name = fields.name("tool_calls")
        more["tool_calls"] = [_call(one, f"{name}[{i}]") for i, one in enumerate(calls)]
    return more


def _call(value: object, name: str) -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect; OpenAI's are text."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)
    fields = BodyFields(value, name)
    if fields.text("type", "function") != "function":
        raise InvalidRequest(f"{name}.type must be function", f"{name}.type")
    function = fields.inner("function")
    called = function.text("name")
    if not called:
        raise InvalidRequest(f"{name}.function.name is missing", f"{name}.function.name")
    arguments = call_arguments(function.value("arguments", "{}"), function.name("arguments"))
    return {
        "id": fields.text("id"),
        "type": "function",
        "function": {"name": called, "arguments": arguments},
    }


def call_arguments(value: object, name: str) -> dict[str, Any]:
    """The object; text that is none under INVALID_JSON, so that the model sees what it wrote.

    A model may write such a call, or be cut off in one; an agent sends it back with the error of
    its tool, for the model to try again.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be the JSON text of an object", name)
    try:
        found = json.loads(value or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: value}


def _content(fields: BodyFields, more: dict[str, Any]) -> str:
    """A string, or a list of text parts, which are joined. Beside calls there may be none."""
    value = fields.value("content")
    if value is None and ("tool_calls" in more or "reasoning_content" in more):
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        name = fields.name("content")
        raise InvalidRequest(f"{name} must be a string or a list of text parts", name)
    return "".join(_part(one, f"{fields.name('content')}[{i}]") for i, one in enumerate(value))


def _part(value: object, name: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise InvalidRequest(f"{name} must be a part of type text", name)
    return BodyFields(value, name).text("text")
