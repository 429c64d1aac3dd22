"""The body of Anthropic's `/v1/messages`, read field by field and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.anthropic_messages import goes_on, message_turns
from ferryman_router.bodies.field_kinds import ANY, Record, Values, required
from ferryman_router.bodies.field_table import BODIES, TOOL_CHOICES
from ferryman_router.bodies.openai_requests import parses_special
from ferryman_router.bodies.parsed_request import ParsedRequest, answer_options, sampling_params
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.template_fields import template_variables, whether_to_think
from ferryman_router.bodies.tool_fields import (
    BY_CLIENT,
    FUNCTION,
    SCHEMA,
    ToolFields,
    check_type,
    chosen_tools,
    tools_of,
)
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.routing.generate_request import RequestedSampling

_SCHEMA = replace(SCHEMA, default={})
_TOOL = Record({"type": ANY, **FUNCTION, "input_schema": _SCHEMA, "cache_control": ANY})


def message_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/messages`. Raises InvalidRequest, naming the field."""
    api, values = Api.MESSAGES, BODIES[Api.MESSAGES].read(raw)
    if values["max_tokens"] is None:
        raise InvalidRequest("max_tokens is missing", "max_tokens")
    tools = _tools(values)
    form = flat_format(values["output_config"]["format"], "output_config.format")
    limit = values["max_tokens"]
    params = sampling_params(api, values, limit, None, tools=tools, prescribed=form)
    answer = answer_options(api, values, None, tools)
    return ParsedRequest(
        api,
        values["model"],
        (_prompt(values, tools),),
        RequestedSampling(params, bad_words=values["bad_words"]),
        values["stream"],
        replace(answer, shows_thoughts=_mode(values) != "disabled"),
    )


def counted_prompt(values: Values) -> ChatPrompt:
    """The prompt in a body of `/v1/messages/count_tokens`. Raises InvalidRequest."""
    return _prompt(values, _tools(values))


def _prompt(values: Values, tools: ToolFields) -> ChatPrompt:
    turns, variables = message_turns(values), values["chat_template_kwargs"]
    if mode := _mode(values):
        variables = {**variables, **whether_to_think(mode != "disabled")}
    for_template = {
        "chat_template_kwargs": variables,
        "continue_final_message": goes_on(turns),
        "reasoning_effort": values["output_config"]["effort"],
    }
    text = template_variables(for_template, tools.tools)
    return ChatPrompt(turns, parses_special(values), text)


def _mode(values: Values) -> str:
    """Whether the model shall think; empty if the body leaves it to the model."""
    return str(values["thinking"]["type"]) if values["thinking"] else ""


def _tools(values: Values) -> ToolFields:
    tools, choice = tools_of(values, _tool), values["tool_choice"]
    is_named = choice["type"] == "tool"
    name = required(choice, "name", "tool_choice") if is_named else ""
    is_parallel = not choice["disable_parallel_tool_use"]
    return chosen_tools(tools, TOOL_CHOICES[choice["type"]], name, is_parallel)


def _tool(value: object, name: str) -> dict[str, Any]:
    """A function in the form of a chat, which templates know."""
    check_type(value, name, "custom", default="custom", why=BY_CLIENT)
    tool = _TOOL.read(value, name)
    function = {"name": tool["name"]}
    if tool["description"] is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": dict(tool["input_schema"])}}
