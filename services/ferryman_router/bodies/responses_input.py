"""The input of `/v1/responses`: text, or a list of items, as the turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.chat_messages import (
    AssistantTurn,
    call_arguments,
    joined_text,
    tool_turn,
)
from ferryman_router.bodies.field_kinds import (
    LIST,
    TEXT,
    FieldKind,
    Values,
    choice,
    items,
    mapping,
    record,
    required,
    text,
)

_ROLE = choice("system", "developer", "user", "assistant", missing="")
_ARGUMENTS = FieldKind({}, default="{}")
INPUT_ITEMS = {
    "message": record("type id status content phase", role=_ROLE),
    "reasoning": record("type id status summary encrypted_content", content=LIST),
    "function_call": record("type id status", call_id=TEXT, name=TEXT, arguments=_ARGUMENTS),
    "function_call_output": record("type id status output", call_id=TEXT),
}
NOT_IN_INPUT = {"item_reference": "nothing is stored; send the item itself"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text"}
_SAID = {**_TEXTS, "refusal": "refusal"}


def input_turns(values: Values) -> tuple[ChatTurn, ...]:
    """`instructions` and `input`; InvalidRequest names the item and its field.

    Items of the assistant that follow one another (a thought, a message, calls) are one turn.
    """
    turns, value = InputTurns(), values["input"]
    if values["instructions"] is not None:
        turns.add(ChatTurn("system", values["instructions"]))
    if isinstance(value, str):
        turns.add(ChatTurn("user", value))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            turns.read(item, f"input[{index}]")
    else:
        raise InvalidRequest("input must be a string or a list of items", "input")
    return turns.whole()


class InputTurns:
    """Turns as the items come. The assistant's is kept open for what may still belong to it."""

    def __init__(self) -> None:
        self._turns: list[ChatTurn] = []
        self._open = AssistantTurn()
        self._readers: Mapping[str, Callable[[Values, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def add(self, turn: ChatTurn) -> None:
        """Adds a turn of any role but the assistant."""
        self._close()
        self._turns.append(turn)

    def read(self, item: Any, name: str) -> None:
        """Reads the next item. Raises InvalidRequest."""
        kind = mapping(item, name).get("type")
        kind = "message" if kind is None else text(kind, f"{name}.type")
        if kind not in self._readers:
            message = f"{name}.type must be one of {', '.join(self._readers)}"
            if kind in NOT_IN_INPUT:
                message = f"items of type {kind} are not offered: {NOT_IN_INPUT[kind]}"
            raise InvalidRequest(message, f"{name}.type")
        self._readers[kind](INPUT_ITEMS[kind].read(item, name), name)

    def whole(self) -> tuple[ChatTurn, ...]:
        """All turns."""
        self._close()
        return tuple(self._turns)

    def _close(self) -> None:
        self._turns += self._open.turns()
        self._open = AssistantTurn()

    def _message(self, item: Values, name: str) -> None:
        role, content = item["role"], f"{name}.content"
        if role != "assistant":
            self.add(ChatTurn(role, joined_text(item["content"], content, _TEXTS)))
            return
        if self._open.has_said:
            self._close()
        self._open.text = joined_text(item["content"], content, _SAID)

    def _reasoning(self, item: Values, name: str) -> None:
        if self._open.has_said or self._open.thought:
            self._close()
        field, types = "content", {"reasoning_text": "text"}
        if not item["content"]:
            # Clients that show a summary alone send back no more than that.
            field, types = "summary", {"summary_text": "text"}
        parts = () if item[field] is None else items(item[field], f"{name}.{field}")
        self._open.thought = joined_text(list(parts), f"{name}.{field}", types)

    def _call(self, item: Values, name: str) -> None:
        called = required(item, "name", name)
        arguments = call_arguments(item["arguments"], f"{name}.arguments")
        self._open.call(required(item, "call_id", name), called, arguments, f"{name}.name")

    def _output(self, item: Values, name: str) -> None:
        output = joined_text(item["output"], f"{name}.output", _TEXTS)
        self.add(tool_turn(required(item, "call_id", name), output))
