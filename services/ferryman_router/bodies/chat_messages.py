"""The messages of a chat, and what else its template reads. A message has a role, a text, calls of
tools or the result of one. The endpoints whose conversations are lists of typed items make their
turns of the same pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.text.marked_turn import marked
from ferryman.text.tokenizer import CONTINUES
from ferryman.text.tool_calls.thought import ContinuedMessage
from ferryman.wire.public import ChatTurn
from ferryman_router.bodies.billing_lines import SYSTEM_ROLES, without_billing
from ferryman_router.bodies.field_kinds import (
    ANY,
    LIST,
    TEXT,
    FieldKind,
    Record,
    Values,
    choice,
    record,
    required,
)
from ferryman_router.bodies.field_readers import TextPart, breakpoints_of, joined_text
from ferryman_router.bodies.place import BodyPlace

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CALLS = 128
INVALID_JSON = "INVALID_JSON"  # the word that Pydantic AI has for the same

NOT_IN_MESSAGES = {"audio": "models here read and write text", "function_call": "send tool_calls"}
_NAME = replace(TEXT, default=None)
MESSAGE = Record(
    {
        "role": choice(*ROLES, missing=""),
        "name": _NAME,
        "tool_call_id": _NAME,
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "tool_calls": LIST,
        **dict.fromkeys("content refusal annotations parsed provider_specific_fields".split(), ANY),
    },
    NOT_IN_MESSAGES,
)
_FUNCTION = record(name=TEXT, arguments=FieldKind({}, default="{}"))
# Clients send a call back as it was put together from a stream, with its index.
_CALL = record("index", id=TEXT, type=replace(TEXT, default="function"), function=_FUNCTION.kind)


_PARTS = {
    "text": TextPart.of("text", "cache_control prompt_cache_breakpoint"),
    "refusal": TextPart.of("refusal"),
}


def chat_turns(values: Values, body: BodyPlace) -> tuple[ChatTurn, ...]:
    """The turns in `messages`; InvalidRequest names the message and its field."""
    messages = values["messages"]
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    place = body.field("messages")
    turns = [turn for i, message in enumerate(messages) for turn in _turns(message, place.item(i))]
    if not turns:
        raise InvalidRequest("messages must say something", "messages")
    return tuple(turns)


def _turns(value: object, place: BodyPlace) -> list[ChatTurn]:
    """The turn of a message; none if nothing is left of a system message."""
    message = MESSAGE.read(value, place)
    more, sent = _more(message, place), message["content"]
    is_system = message["role"] in SYSTEM_ROLES
    content = without_billing(sent, place.field("content")) if is_system else sent
    text = _content(content, more, place)
    if not text and content is not sent:
        return []
    turn = ChatTurn(message["role"], text, json.dumps(more) if more else "")
    return [marked(turn, breakpoints_of(content, place.field("content")))]


def _more(message: Values, place: BodyPlace) -> dict[str, Any]:
    """The fields of a message besides its text. Templates know a thought by either name."""
    more: dict[str, Any] = {}
    for key in ("name", "tool_call_id"):
        if message[key] is not None:
            more[key] = message[key]
    thought = message["reasoning_content"] or message["reasoning"]
    if thought and message["role"] == "assistant":
        more["reasoning_content"] = thought
    if calls := message["tool_calls"]:
        name = place.field("tool_calls")
        if message["role"] != "assistant":
            raise InvalidRequest(f"{name} belongs to messages of the assistant", name)
        if len(calls) > MAX_CALLS:
            raise InvalidRequest(f"{name} holds at most {MAX_CALLS} calls", name)
        more["tool_calls"] = [_call(call, name.item(i)) for i, call in enumerate(calls)]
    return more


def _call(value: object, name: BodyPlace) -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect; OpenAI's are text."""
    call = _CALL.read(value, name)
    if call["type"] != "function":
        raise InvalidRequest(f"{name}.type must be function", f"{name}.type")
    called = required(call["function"], "name", f"{name}.function")
    arguments = call_arguments(call["function"]["arguments"], f"{name}.function.arguments")
    return {
        "id": call["id"],
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
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {INVALID_JSON: value}


def _content(value: Any, more: dict[str, Any], message: BodyPlace) -> str:
    """A string, or a list of text parts, which are joined. With calls there may be none."""
    if value is None and ("tool_calls" in more or "reasoning_content" in more):
        return ""
    return joined_text(value, message.field("content"), _PARTS)


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


def continued(turn: ChatTurn) -> ContinuedMessage | None:
    """The text of this turn, else its thought, for an answer that goes on with it; None where it
    has neither."""
    if turn.content:
        return ContinuedMessage(turn.content)
    thought = json.loads(turn.more or "{}").get("reasoning_content")
    return ContinuedMessage(thought, True) if thought else None


def tool_turn(call_id: str, output: str) -> ChatTurn:
    """The result of a call."""
    return ChatTurn("tool", output, json.dumps({"tool_call_id": call_id}))


# The other fields of a chat that its template reads.

MAX_VARIABLES_CHARS = 1 << 20
MAX_DOCUMENTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
GENERATION = "add_generation_prompt"
_THINKS = ("enable_thinking", "thinking")  # Qwen, GLM, Gemma; DeepSeek, Kimi, Granite
# Given by the request or by the model.
_TAKEN = frozenset({"messages", "tools", "documents", CONTINUES, GENERATION})


def template_variables(values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """JSON text of an object for the template, empty for none. InvalidRequest names the field."""
    variables: dict[str, Any] = dict(values["chat_template_kwargs"])
    if taken := sorted(_TAKEN & variables.keys()):
        name = f"chat_template_kwargs.{taken[0]}"
        raise InvalidRequest(f"{name} is not set here: {taken[0]} has a field of its own", name)
    variables |= _effort(values.get("reasoning_effort"), variables)
    if tools:
        variables["tools"] = list(tools)
    if documents := values.get("documents"):
        if len(documents) > MAX_DOCUMENTS or not all(
            isinstance(document, dict) for document in documents
        ):
            message = f"documents must be at most {MAX_DOCUMENTS} objects"
            raise InvalidRequest(message, "documents")
        variables["documents"] = documents
    variables |= _place_of_the_answer(values)
    text = json.dumps(variables) if variables else ""
    if len(text) > MAX_VARIABLES_CHARS:
        message = f"what the template reads has more than {MAX_VARIABLES_CHARS} characters"
        raise InvalidRequest(message, "chat_template_kwargs")
    return text


def whether_to_think(thinks: bool) -> dict[str, bool]:
    """The variables by which templates know it."""
    return dict.fromkeys(_THINKS, thinks)


def _effort(effort: str | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Templates have one name for an effort, and others for whether to think at all: a body that
    asks for an effort wants thoughts, unless it sets those itself."""
    if effort is None:
        return {}
    thinks = {} if variables.keys() & set(_THINKS) else whether_to_think(effort != "none")
    return {"reasoning_effort": effort, **thinks}


def _place_of_the_answer(values: Mapping[str, Any]) -> dict[str, Any]:
    """An answer is a turn of its own, or goes on with the last message, or neither."""
    continues, begins = values.get("continue_final_message", False), values.get(GENERATION)
    begins = not continues if begins is None else begins
    if continues and begins:
        message = f"continue_final_message and {GENERATION} exclude each other"
        raise InvalidRequest(message, "continue_final_message")
    if continues:
        return {CONTINUES: True, GENERATION: False}
    return {} if begins else {GENERATION: False}
