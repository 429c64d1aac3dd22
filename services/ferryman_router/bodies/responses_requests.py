"""The body of `/v1/responses`, read field by field and checked. Nothing of a response is stored:
each body has the whole conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import MAX_LOGPROBS, SamplingParams
from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.answer_fields import answer_options, bad_words
from ferryman_router.bodies.api_fields import (
    NOT_IN_RESPONSES,
    REASONING,
    RESPONSE_TOOL,
    RESPONSES,
    TEXT_OPTIONS,
)
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.content_parts import object_fields
from ferryman_router.bodies.openai_requests import (
    ParsedRequest,
    parses_special,
    sampling_params,
    with_forced_call,
)
from ferryman_router.bodies.responses_input import input_turns
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.template_fields import EFFORTS, template_variables
from ferryman_router.bodies.tool_fields import (
    CHOICES,
    NAMED,
    ToolChoice,
    ToolFields,
    check_function,
    chosen_tools,
    tools_of,
)
from ferryman_router.routing.generate_request import RequestedSampling

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # thoughts are in the answer as they are
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
_MAX_TOKENS = 2**31 - 1


def response_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/responses`; without a limit it may use all the room there is."""
    fields = BodyFields(raw)
    fields.check_names(RESPONSES, NOT_IN_RESPONSES)
    for name, why in (("store", "nothing is stored"), ("background", "nothing is stored")):
        if fields.flag(name):
            raise InvalidRequest(f"{name} must be false: {why} of a response", name)
    if fields.choice("truncation", "disabled", ("auto", "disabled")) == "auto":
        message = "truncation must be disabled: no item is left out; send those that fit"
        raise InvalidRequest(message, "truncation")
    tools, text = _tools(fields), fields.inner("text")
    text.check_names(TEXT_OPTIONS, {})
    num_logprobs = _num_logprobs(fields)
    limit = fields.whole("max_output_tokens", 0, low=0, high=_MAX_TOKENS)
    if fields.has("max_output_tokens") and not limit:
        raise InvalidRequest("max_output_tokens must be at least 1", "max_output_tokens")
    form = flat_format(text.inner("format"))
    params = sampling_params(fields, limit or 1, num_logprobs, prescribed=form)
    params = with_forced_call(params, tools)
    prompt = ChatPrompt(input_turns(fields), parses_special(fields), _variables(fields, tools))
    # The events have no place for a usage on the way; the last one always has it.
    answer = answer_options(fields, num_logprobs, ToolChoice.of(tools))
    answer = replace(answer, includes_usage_always=False)
    return ParsedRequest(
        fields.text("model"),
        (prompt,),
        RequestedSampling(params, not limit, bad_words(fields)),
        fields.flag("stream"),
        answer,
        json.dumps(_echo(fields, params, tools)),
    )


def _num_logprobs(fields: BodyFields) -> int | None:
    """Log probabilities are shown where they are asked for, by number or by `include`."""
    top = fields.whole("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    included = fields.items("include")
    for name in included:
        if name not in (LOGPROBS, ENCRYPTED):
            raise InvalidRequest(f"include may have {LOGPROBS} and {ENCRYPTED}", "include")
    return top if top or LOGPROBS in included else None


def _tools(fields: BodyFields) -> ToolFields:
    tools = tools_of(fields, _tool)
    choice, name = _choice(fields.value("tool_choice", "auto"))
    return chosen_tools(tools, choice, name, fields.flag("parallel_tool_calls", default=True))


def _tool(value: object, name: str) -> dict[str, Any]:
    """A function in the form of a chat, which templates know."""
    tool = object_fields(value, name)
    if tool.text("type") != "function":
        message = f"{name}.type must be function: the client calls its tools itself"
        raise InvalidRequest(message, f"{name}.type")
    tool.check_names(RESPONSE_TOOL, {})
    check_function(tool)
    shown = ("name", "description", "parameters", "strict")
    function = {field: tool.value(field) for field in shown if tool.has(field)}
    return {"type": "function", "function": function}


def _choice(value: object) -> tuple[str, str]:
    if isinstance(value, str) and value in CHOICES:
        return value, ""
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("name")
        if isinstance(name, str) and name:
            return NAMED, name
    message = "tool_choice must be none, auto, required, or of type function with a name"
    raise InvalidRequest(message, "tool_choice")


def _variables(fields: BodyFields, tools: ToolFields) -> str:
    reasoning = fields.inner("reasoning")
    reasoning.check_names(REASONING, {})
    known = {"chat_template_kwargs": fields.value("chat_template_kwargs")}
    if reasoning.has("effort"):
        known["reasoning_effort"] = reasoning.choice("effort", "", EFFORTS)
    return template_variables(BodyFields(known), tools.tools)


def _echo(fields: BodyFields, params: SamplingParams, tools: ToolFields) -> dict[str, Any]:
    """The fields of a response that repeat what it was asked with."""
    choice: Any = tools.choice
    if choice == NAMED:
        choice = {"type": "function", "name": tools.name}
    return {
        "instructions": fields.value("instructions"),
        "max_output_tokens": fields.value("max_output_tokens"),
        "metadata": _metadata(fields),
        "parallel_tool_calls": tools.is_parallel,
        "reasoning": {"effort": fields.inner("reasoning").value("effort"), "summary": None},
        "temperature": params.temperature,
        "text": {"format": fields.inner("text").value("format", {"type": "text"})},
        "tool_choice": choice,
        "tools": [{"type": "function", **tool["function"]} for tool in tools.tools],
        "top_logprobs": fields.value("top_logprobs", 0),
        "top_p": params.top_p,
    }


def _metadata(fields: BodyFields) -> dict[str, str]:
    """It comes back with the answer, and is bounded for that reason."""
    found = dict(fields.inner("metadata").items_by_name())
    are_short = all(
        len(key) <= MAX_KEY_CHARS and isinstance(value, str) and len(value) <= MAX_VALUE_CHARS
        for key, value in found.items()
    )
    if len(found) > MAX_METADATA or not are_short:
        message = (
            f"metadata has at most {MAX_METADATA} texts of at most {MAX_VALUE_CHARS} characters,"
            f" with names of at most {MAX_KEY_CHARS}"
        )
        raise InvalidRequest(message, "metadata")
    return found
