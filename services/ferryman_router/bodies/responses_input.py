"""The input of `/v1/responses`: text, or a list of items, as the turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.api_fields import INPUT_ITEMS, NOT_IN_INPUT
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.chat_messages import call_arguments
from ferryman_router.bodies.content_parts import (
    AssistantTurn,
    joined_text,
    object_fields,
    tool_turn,
)

ROLES = ("system", "developer", "user", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text"}
_SAID = {**_TEXTS, "refusal": "refusal"}


def input_turns(fields: BodyFields) -> tuple[ChatTurn, ...]:
    """`instructions` and `input`; InvalidRequest names the item and its field.

    Items of the assistant that follow one another (a thought, a message, calls) are one turn.
    """
    turns = InputTurns()
    if fields.has("instructions"):
        turns.add(ChatTurn("system", fields.text("instructions")))
    found = fields.value("input")
    if isinstance(found, str):
        turns.add(ChatTurn("user", found))
    elif isinstance(found, list) and found:
        for index, item in enumerate(found):
            turns.read(object_fields(item, f"input[{index}]"))
    else:
        raise InvalidRequest("input must be a string or a list of items", "input")
    return turns.whole()


class InputTurns:
    """Turns as the items come. The assistant's is kept open for what may still belong to it."""

    def __init__(self) -> None:
        self._turns: list[ChatTurn] = []
        self._open = AssistantTurn()
        self._readers: Mapping[str, Callable[[BodyFields], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def add(self, turn: ChatTurn) -> None:
        """A turn of somebody else."""
        self._close()
        self._turns.append(turn)

    def read(self, item: BodyFields) -> None:
        """The next item. Raises InvalidRequest."""
        kind = item.text("type", "message")
        if kind not in self._readers:
            known = ", ".join(self._readers)
            message = f"{item.name('type')} must be one of {known}"
            if kind in NOT_IN_INPUT:
                message = f"items of type {kind} are not offered: {NOT_IN_INPUT[kind]}"
            raise InvalidRequest(message, item.name("type"))
        item.check_names(INPUT_ITEMS[kind], {})
        self._readers[kind](item)

    def whole(self) -> tuple[ChatTurn, ...]:
        """All turns."""
        self._close()
        return tuple(self._turns)

    def _close(self) -> None:
        self._turns += self._open.turns()
        self._open = AssistantTurn()

    def _message(self, item: BodyFields) -> None:
        role = item.choice("role", "", ROLES)
        if role != "assistant":
            self.add(ChatTurn(role, _text(item, "content", _TEXTS)))
            return
        if self._open.has_said:
            self._close()
        self._open.text = _text(item, "content", _SAID)

    def _reasoning(self, item: BodyFields) -> None:
        if self._open.has_said or self._open.thought:
            self._close()
        name, types = "content", {"reasoning_text": "text"}
        if not item.items(name):
            # Clients that show a summary alone send back no more than that.
            name, types = "summary", {"summary_text": "text"}
        self._open.thought = joined_text(item.items(name), item.name(name), types)

    def _call(self, item: BodyFields) -> None:
        called, name = item.text("name"), item.name("name")
        if not called:
            raise InvalidRequest(f"{name} is missing", name)
        arguments = call_arguments(item.value("arguments", "{}"), item.name("arguments"))
        self._open.call(_call_id(item), called, arguments, name)

    def _output(self, item: BodyFields) -> None:
        self.add(tool_turn(_call_id(item), _text(item, "output", _TEXTS)))


def _call_id(item: BodyFields) -> str:
    found: str = item.text("call_id")
    if not found:
        name = item.name("call_id")
        raise InvalidRequest(f"{name} is missing", name)
    return found


def _text(item: BodyFields, field: str, types: Mapping[str, str]) -> str:
    value: Any = item.value(field)
    return joined_text(value, item.name(field), types)
