"""The body of `/v1/responses`, read field by field and checked; its input, text or a list of items,
as the turns of a conversation. Nothing of a response is stored: each body has the whole
conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import SamplingParams
from ferryman.text.marked_turn import marked
from ferryman.wire.public import ChatPrompt, ChatTurn
from ferryman_router.bodies.billing_lines import SYSTEM_ROLES, without_billing
from ferryman_router.bodies.chat_messages import (
    AssistantTurn,
    call_arguments,
    template_variables,
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
from ferryman_router.bodies.field_readers import (
    LOGPROBS,
    TextPart,
    breakpoints_of,
    joined_text,
)
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.openai_requests import parses_special
from ferryman_router.bodies.parsed_request import ParsedRequest, answer_options, sampling_params
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.responses_tools import (
    ResponseTools,
    echoed_choice,
    flat_name,
)
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.tool_fields import CUSTOM_INPUT, NAMED, ToolFields
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

# The input.

_ROLE = choice("system", "developer", "user", "assistant", missing="")
_ARGUMENTS = FieldKind({}, default="{}")
INPUT_ITEMS = {
    "message": record("type id status content phase", role=_ROLE),
    "reasoning": record("type id status summary encrypted_content", content=LIST),
    "function_call": record(
        "type id status", call_id=TEXT, name=TEXT, namespace=TEXT, arguments=_ARGUMENTS
    ),
    "function_call_output": record("type id status output", call_id=TEXT),
    "custom_tool_call": record(
        "type id status", call_id=TEXT, name=TEXT, namespace=TEXT, input=TEXT
    ),
    "custom_tool_call_output": record("type id status name output", call_id=TEXT),
}
NOT_IN_INPUT = {
    "item_reference": "nothing is stored; send the item itself, as clients do with store false"
}
_TEXTS = {
    "input_text": TextPart.of("text", "prompt_cache_breakpoint"),
    "output_text": TextPart.of("text", "annotations logprobs"),
    "text": TextPart.of("text"),
}
_SAID = {**_TEXTS, "refusal": TextPart.of("refusal")}
_THOUGHTS = {"reasoning_text": TextPart.of("text")}
_SUMMARIES = {"summary_text": TextPart.of("text")}


def input_turns(values: Values, body: BodyPlace) -> tuple[ChatTurn, ...]:
    """`instructions` and `input`; InvalidRequest names the item and its field.

    Items of the assistant that follow one another (a thought, a message, calls) are one turn.
    """
    turns, value = InputTurns(), values["input"]
    if (sent := values["instructions"]) is not None:
        text = without_billing(sent, body.field("instructions"))
        if text or text is sent:
            turns.add(ChatTurn("system", text))
    if isinstance(value, str):
        turns.add(ChatTurn("user", value))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            turns.read(item, body.field("input").item(index))
    else:
        raise InvalidRequest("input must be a string or a list of items", "input")
    if not (whole := turns.whole()):
        raise InvalidRequest("input must say something", "input")
    return whole


class InputTurns:
    """Turns as the items come. The assistant's is kept open for what may still belong to it."""

    def __init__(self) -> None:
        self._turns: list[ChatTurn] = []
        self._open = AssistantTurn()
        self._readers: Mapping[str, Callable[[Values, BodyPlace], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call": self._call,
            "custom_tool_call_output": self._output,
        }

    def add(self, turn: ChatTurn) -> None:
        """Adds a turn of any role but the assistant."""
        self._close()
        self._turns.append(turn)

    def read(self, item: Any, name: BodyPlace) -> None:
        """Reads the next item. Raises InvalidRequest."""
        kind = _kind(mapping(item, name), name)
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

    def _message(self, item: Values, name: BodyPlace) -> None:
        role, content = item["role"], name.field("content")
        if role != "assistant":
            self._add_text(role, item["content"], content)
            return
        if self._open.has_said:
            self._close()
        self._open.text = joined_text(item["content"], content, _SAID)

    def _add_text(self, role: str, sent: Any, place: BodyPlace) -> None:
        """Adds a turn; none if nothing is left of a system message."""
        content = without_billing(sent, place) if role in SYSTEM_ROLES else sent
        text = joined_text(content, place, _TEXTS)
        if text or content is sent:
            self.add(marked(ChatTurn(role, text), breakpoints_of(content, place)))

    def _reasoning(self, item: Values, name: BodyPlace) -> None:
        if self._open.has_said or self._open.thought:
            self._close()
        field, types = "content", _THOUGHTS
        if not item["content"]:
            # Clients that show a summary alone send back no more than that.
            field, types = "summary", _SUMMARIES
        parts = () if item[field] is None else items(item[field], f"{name}.{field}")
        self._open.thought = joined_text(list(parts), name.field(field), types)

    def _call(self, item: Values, name: BodyPlace) -> None:
        called = flat_name(item["namespace"], required(item, "name", name))
        if "input" in item:
            arguments = {CUSTOM_INPUT: item["input"]}
        else:
            arguments = call_arguments(item["arguments"], f"{name}.arguments")
        self._open.call(required(item, "call_id", name), called, arguments, f"{name}.name")

    def _output(self, item: Values, name: BodyPlace) -> None:
        output = joined_text(item["output"], name.field("output"), _TEXTS)
        self.add(tool_turn(required(item, "call_id", name), output))


def _kind(item: Mapping[str, Any], name: BodyPlace) -> str:
    """The type of an item. It may be left out of a message, and of a reference: an id alone."""
    if item.get("type") is not None:
        return str(text(item["type"], f"{name}.type"))
    is_reference = {field for field, value in item.items() if value is not None} == {"id"}
    return "item_reference" if is_reference else "message"


# The other fields.


def response_body(raw: dict[str, Any], body: BodyPlace) -> ParsedRequest:
    """A body of `/v1/responses`; without a limit it may use all the room there is."""
    api, values = Api.RESPONSES, BODIES[Api.RESPONSES].read(raw, body)
    tools, limit = (read := ResponseTools()).fields(values, body), values["max_output_tokens"]
    # Log probabilities are shown if they are asked for, by number or by `include`.
    top = values["top_logprobs"]
    num_logprobs = top if top or LOGPROBS in values["include"] else None
    form = flat_format(values["text"]["format"], body.field("text").field("format"))
    params = sampling_params(api, values, limit or 1, num_logprobs, tools=tools, prescribed=form)
    variables = template_variables(
        {
            "chat_template_kwargs": values["chat_template_kwargs"],
            "reasoning_effort": values["reasoning"]["effort"],
        },
        tools.tools,
    )
    # The events have no place for a usage on the way; the last one always has it.
    answer = replace(
        answer_options(api, values, num_logprobs, tools),
        includes_usage_always=False,
        compared_with=(values["prompt_cache_options"] or {}).get("comparison_response_id"),
    )
    return ParsedRequest(
        api,
        values["model"],
        (ChatPrompt(input_turns(values, body), parses_special(values), variables),),
        RequestedSampling(params, not limit, values["bad_words"]),
        values["stream"],
        answer,
        json.dumps(_echo(values, params, tools) | _cache_options(values) | {"tools": read.echo}),
    )


def _cache_options(values: Values) -> dict[str, Any]:
    """The options of a body that has some, with those that OpenAI takes for what it leaves out."""
    if (options := values["prompt_cache_options"]) is None:
        return {}
    set_ones = {name: value for name, value in options.items() if value is not None}
    return {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", **set_ones}}


def _echo(values: Values, params: SamplingParams, tools: ToolFields) -> dict[str, Any]:
    """The fields of a response that repeat what it was asked with."""
    choice: Any = tools.choice
    form = values["text"]["format"]
    if choice == NAMED:
        choice = echoed_choice(tools)
    return {
        "instructions": values["instructions"],
        "max_output_tokens": values["max_output_tokens"],
        "metadata": values["metadata"],
        "parallel_tool_calls": tools.is_parallel,
        "reasoning": {"effort": values["reasoning"]["effort"], "summary": None},
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form},
        "tool_choice": choice,
        "top_logprobs": values["top_logprobs"],
        "top_p": params.top_p,
    }
