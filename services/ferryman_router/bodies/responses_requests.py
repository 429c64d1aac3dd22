"""The body of `/v1/responses`, read field by field and checked. Nothing of a response is stored:
each body has the whole conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.field_kinds import ANY, Record, Values
from ferryman_router.bodies.field_readers import LOGPROBS
from ferryman_router.bodies.field_table import BODIES
from ferryman_router.bodies.openai_requests import parses_special
from ferryman_router.bodies.parsed_request import ParsedRequest, answer_options, sampling_params
from ferryman_router.bodies.responses_input import input_turns
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.template_fields import template_variables
from ferryman_router.bodies.tool_fields import (
    BY_CLIENT,
    CHOICES,
    FUNCTION,
    NAMED,
    SCHEMA,
    ToolFields,
    check_type,
    chosen_tools,
    tools_of,
)
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

_TOOL = Record({"type": ANY, **FUNCTION, "parameters": SCHEMA})


def response_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/responses`; without a limit it may use all the room there is."""
    api, values = Api.RESPONSES, BODIES[Api.RESPONSES].read(raw)
    tools, limit = _tools(values), values["max_output_tokens"]
    # Log probabilities are shown if they are asked for, by number or by `include`.
    top = values["top_logprobs"]
    num_logprobs = top if top or LOGPROBS in values["include"] else None
    form = flat_format(values["text"]["format"], "text.format")
    params = sampling_params(api, values, limit or 1, num_logprobs, tools=tools, prescribed=form)
    variables = template_variables(
        {
            "chat_template_kwargs": values["chat_template_kwargs"],
            "reasoning_effort": values["reasoning"]["effort"],
        },
        tools.tools,
    )
    # The events have no place for a usage on the way; the last one always has it.
    answer = replace(answer_options(api, values, num_logprobs, tools), includes_usage_always=False)
    return ParsedRequest(
        api,
        values["model"],
        (ChatPrompt(input_turns(values), parses_special(values), variables),),
        RequestedSampling(params, not limit, values["bad_words"]),
        values["stream"],
        answer,
        json.dumps(_echo(values, params, tools)),
    )


def _tools(values: Values) -> ToolFields:
    tools, wanted = tools_of(values, _tool), values["tool_choice"]
    choice, name = _choice("auto" if wanted is None else wanted)
    return chosen_tools(tools, choice, name, values["parallel_tool_calls"])


def _tool(value: object, name: str) -> dict[str, Any]:
    """A function in the form of a chat, which templates know."""
    check_type(value, name, "function", why=BY_CLIENT)
    tool = _TOOL.read(value, name)
    fields = ("name", "description", "parameters", "strict")
    function = {field: tool[field] for field in fields if tool[field] is not None}
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


def _echo(values: Values, params: SamplingParams, tools: ToolFields) -> dict[str, Any]:
    """The fields of a response that repeat what it was asked with."""
    choice: Any = tools.choice
    form = values["text"]["format"]
    if choice == NAMED:
        choice = {"type": "function", "name": tools.name}
    return {
        "instructions": values["instructions"],
        "max_output_tokens": values["max_output_tokens"],
        "metadata": values["metadata"],
        "parallel_tool_calls": tools.is_parallel,
        "reasoning": {"effort": values["reasoning"]["effort"], "summary": None},
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form},
        "tool_choice": choice,
        "tools": [{"type": "function", **tool["function"]} for tool in tools.tools],
        "top_logprobs": values["top_logprobs"],
        "top_p": params.top_p,
    }
