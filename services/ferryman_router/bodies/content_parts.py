"""Texts in the content of a message, a turn of the assistant from its pieces, for the endpoints
whose conversations are lists of typed items."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.chat_messages import MAX_CALLS


def joined_text(value: object, name: str, types: Mapping[str, str]) -> str:
    """A string, or the texts of a list of parts; `types` has the field with the text of each type
    that is taken. InvalidRequest names the part that has another one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a string or a list of parts", name)
    return "".join(_part(one, f"{name}[{i}]", types) for i, one in enumerate(value))


def _part(value: object, name: str, types: Mapping[str, str]) -> str:
    part = object_fields(value, name)
    kind = part.text("type")
    if kind not in types:
        known = " or ".join(types)
        raise InvalidRequest(f"{name} must be a part of type {known}: models read text", name)
    return part.text(types[kind])


def object_fields(value: object, name: str) -> BodyFields:
    """The fields of an object inside a body; InvalidRequest for anything else."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", name)
    return BodyFields(value, name)


class AssistantTurn:
    """A turn of the assistant while its pieces are read: a thought, then text, then calls."""

    def __init__(self) -> None:
        self.thought = self.text = ""
        self.calls: list[dict[str, Any]] = []

    @property
    def has_said(self) -> bool:
        """Whether it has text or calls; another thought or text is another turn then."""
        return bool(self.text or self.calls)

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any], field_name: str) -> None:
        """Adds a call. InvalidRequest for one too many; `field_name` is where it stands."""
        if len(self.calls) == MAX_CALLS:
            raise InvalidRequest(f"a turn holds at most {MAX_CALLS} calls", field_name)
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def turns(self) -> list[ChatTurn]:
        """The turn as a template gets it; none when there was nothing."""
        more: dict[str, Any] = {}
        if self.thought:
            more["reasoning_content"] = self.thought
        if self.calls:
            more["tool_calls"] = self.calls
        if not more and not self.text:
            return []
        return [ChatTurn("assistant", self.text, json.dumps(more) if more else "")]


def tool_turn(call_id: str, output: str) -> ChatTurn:
    """The result of a call."""
    return ChatTurn("tool", output, json.dumps({"tool_call_id": call_id}))
