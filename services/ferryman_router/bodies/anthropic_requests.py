"""The body of Anthropic's `/v1/messages`, read field by field and checked; its content blocks as
the turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.text.marked_turn import MarkedChat, TextBreakpoint, ended, marked
from ferryman.text.tool_calls.thought import ContinuedMessage
from ferryman.wire.public import ChatPrompt, ChatTurn
from ferryman_router.bodies.anthropic_tools import TOOL_REFERENCE, message_tools
from ferryman_router.bodies.billing_lines import without_billing
from ferryman_router.bodies.chat_messages import (
    AssistantTurn,
    continued,
    template_variables,
    tool_turn,
    whether_to_think,
)
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
from ferryman_router.bodies.field_readers import (
    CACHE_CONTROL,
    TextPart,
    breakpoints_of,
    in_lines,
    joined_text,
)
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.openai_requests import parses_special
from ferryman_router.bodies.parsed_request import ParsedRequest, answer_options, sampling_params
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.tool_fields import ToolFields
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

# The messages.

MESSAGE = record("content", role=choice("user", "assistant", "system", missing=""))
CONTENT_BLOCKS = {
    "text": record("type citations", cache_control=CACHE_CONTROL, text=TEXT),
    "thinking": record("type signature", cache_control=CACHE_CONTROL, thinking=TEXT),
    "tool_use": record(
        "type caller", cache_control=CACHE_CONTROL, id=TEXT, name=TEXT, input=OBJECT
    ),
    "tool_result": record(
        "type is_error",
        cache_control=CACHE_CONTROL,
        tool_use_id=TEXT,
        content=FieldKind({}, default=""),
    ),
}
_OF_USER = ("text", "tool_result")
_OF_ASSISTANT = ("text", "thinking", "tool_use")
_TEXT = {"text": TextPart(CONTENT_BLOCKS["text"])}
_RESULT = {**_TEXT, TOOL_REFERENCE: TextPart.of("tool_name", "cache_control")}


def message_turns(values: Values, body: BodyPlace) -> tuple[ChatTurn, ...]:
    """`system` and `messages`; InvalidRequest names the block and its field."""
    turns: list[ChatTurn] = []
    turns += _system(values["system"], body.field("system"))
    if not values["messages"]:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, value in enumerate(values["messages"]):
        message = MESSAGE.read(value, place := body.field("messages").item(index))
        role, content = message["role"], message["content"]
        read = _assistant if role == "assistant" else _others
        turns += read(role, content, place.field("content"))
    if not turns:
        raise InvalidRequest("messages must say something", "messages")
    return (*turns[:-1], ended(turns[-1], values["cache_control"]))


def _system(sent: Any, place: BodyPlace) -> list[ChatTurn]:
    """The system message; none if there is none, or nothing is left of it."""
    if sent is None:
        return []
    content = without_billing(sent, place)
    text = joined_text(content, place, _TEXT)
    if not text and content is not sent:
        return []
    return [marked(ChatTurn("system", text), breakpoints_of(content, place))]


def _continued(turns: Sequence[ChatTurn]) -> ContinuedMessage | None:
    """The message that the answer goes on with: the last turn, if it is the assistant's and has no
    calls."""
    last = turns[-1]
    has_calls = "tool_calls" in json.loads(last.more or "{}")
    return continued(last) if last.role == "assistant" and not has_calls else None


def _others(role: str, content: Any, name: BodyPlace) -> list[ChatTurn]:
    """Results of calls are turns of their own; the texts between them belong together."""
    turns, texts, points = list[ChatTurn](), list[str](), list[TextBreakpoint]()
    left = without_billing(content, name) if role == "system" else content
    for block, place in _blocks(left, name, _OF_USER if role == "user" else ("text",)):
        if block["type"] == "text":
            texts.append(block["text"])
            if ttl := block.get("cache_control"):
                points.append(TextBreakpoint(len(in_lines(texts)), ttl))
            continue
        if texts:
            turns.append(marked(ChatTurn(role, in_lines(texts)), points))
        texts, points = [], []
        turns.append(_result(block, place))
    words = in_lines(texts)
    is_left_out = not words and left is not content
    return [*turns, marked(ChatTurn(role, words), points)] if texts and not is_left_out else turns


def _result(block: Values, place: BodyPlace) -> ChatTurn:
    """The result of a call, with the marks of its parts and its own."""
    content, output = block["content"], place.field("content")
    turn = tool_turn(required(block, "tool_use_id", place), joined_text(content, output, _RESULT))
    return ended(marked(turn, breakpoints_of(content, output)), block["cache_control"])


def _assistant(role: str, content: Any, name: BodyPlace) -> list[ChatTurn]:
    turn, ttl = AssistantTurn(), 0
    for block, place in _blocks(content, name, _OF_ASSISTANT):
        ttl = block.get("cache_control") or ttl
        match block["type"]:
            case "text":
                turn.text = in_lines((turn.text, block["text"]))
            case "thinking":
                turn.thought = in_lines((turn.thought, block["thinking"]))
            case "tool_use":
                called = required(block, "name", place)
                call_id = required(block, "id", place)
                turn.call(call_id, called, dict(block["input"]), f"{place}.name")
    return [ended(whole, ttl) for whole in turn.turns()]


def _blocks(value: Any, name: BodyPlace, kinds: Sequence[str]) -> list[tuple[Values, BodyPlace]]:
    """The blocks of a message, each with its name, checked for their types and names; a string is
    one of text."""
    if isinstance(value, str):
        return [({"type": "text", "text": value}, name)]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a string or a list of blocks", name)
    blocks, kind = [], choice(*kinds)
    for index, item in enumerate(value):
        place = name.item(index)
        block_type = mapping(item, place).get("type")
        kind.check("" if block_type is None else block_type, place.field("type"))
        blocks.append((CONTENT_BLOCKS[block_type].read(item, place), place))
    return blocks


# The other fields.


def message_body(raw: dict[str, Any], body: BodyPlace) -> ParsedRequest:
    """A body of `/v1/messages`. Raises InvalidRequest, naming the field."""
    api, values = Api.MESSAGES, BODIES[Api.MESSAGES].read(raw, body)
    if values["max_tokens"] is None:
        raise InvalidRequest("max_tokens is missing", "max_tokens")
    tools = message_tools(values, body)
    place = body.field("output_config").field("format")
    form = flat_format(values["output_config"]["format"], place)
    limit, is_managed = values["max_tokens"], values["context_management"] is not None
    params = sampling_params(api, values, limit, None, tools=tools, prescribed=form)
    answer = answer_options(api, values, None, tools)
    prompt = _prompt(values, body, tools)
    thinks, goes_on = _mode(values) != "disabled", _continued(prompt.turns)
    return ParsedRequest(
        api,
        values["model"],
        (prompt,),
        RequestedSampling(params, bad_words=values["bad_words"]),
        values["stream"],
        replace(
            answer,
            shows_thoughts=thinks,
            continued=goes_on,
            compared_with=(values["diagnostics"] or {}).get("previous_message_id"),
        ),
        json.dumps({"context_management": values["context_management"]} if is_managed else {}),
    )


def counted_prompt(values: Values, body: BodyPlace) -> ChatPrompt:
    """The prompt in a body of `/v1/messages/count_tokens`. Raises InvalidRequest."""
    return _prompt(values, body, message_tools(values, body))


def _prompt(values: Values, body: BodyPlace, tools: ToolFields) -> ChatPrompt:
    turns, variables = message_turns(values, body), values["chat_template_kwargs"]
    if mode := _mode(values):
        variables = {**variables, **whether_to_think(mode != "disabled")}
    for_template = {
        "chat_template_kwargs": variables,
        "continue_final_message": _continued(turns) is not None,
        "reasoning_effort": values["output_config"]["effort"],
    }
    text = template_variables(for_template, tools.tools)
    return MarkedChat(turns, parses_special(values), text, tools.breakpoints)


def _mode(values: Values) -> str:
    """Whether the model shall think; empty if the body leaves it to the model."""
    return str(values["thinking"]["type"]) if values["thinking"] else ""
