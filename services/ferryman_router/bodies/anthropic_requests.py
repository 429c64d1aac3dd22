"""The body of Anthropic's `/v1/messages`, read field by field and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.wire.public import ChatPrompt
from ferryman_router.bodies.answer_fields import answer_options, bad_words
from ferryman_router.bodies.anthropic_messages import goes_on, message_turns
from ferryman_router.bodies.api_fields import (
    COUNT_TOKENS,
    MESSAGES,
    MESSAGES_TOOL,
    NOT_IN_MESSAGES_BODY,
    OUTPUT_CONFIG,
    THINKING,
    TOOL_CHOICE,
)
from ferryman_router.bodies.body_fields import BodyFields
from ferryman_router.bodies.content_parts import object_fields
from ferryman_router.bodies.openai_requests import (
    ParsedRequest,
    parses_special,
    sampling_params,
    with_forced_call,
)
from ferryman_router.bodies.structured_outputs import flat_format
from ferryman_router.bodies.template_fields import EFFORTS, template_variables, whether_to_think
from ferryman_router.bodies.tool_fields import (
    NAMED,
    ToolChoice,
    ToolFields,
    check_function,
    chosen_tools,
    tools_of,
)
from ferryman_router.routing.generate_request import RequestedSampling

_CHOICES = {"auto": "auto", "any": "required", "tool": NAMED, "none": "none"}
_MODES = ("enabled", "disabled", "adaptive")


def message_body(raw: dict[str, Any]) -> ParsedRequest:
    """A body of `/v1/messages`. Raises InvalidRequest, naming the field."""
    fields = BodyFields(raw)
    fields.check_names(MESSAGES, NOT_IN_MESSAGES_BODY)
    if not fields.has("max_tokens"):
        raise InvalidRequest("max_tokens is missing", "max_tokens")
    tools = _tools(fields)
    form = flat_format(_config(fields).inner("format"))
    max_tokens = fields.value("max_tokens")
    params = sampling_params(fields, max_tokens, None, stop="stop_sequences", prescribed=form)
    params = with_forced_call(params, tools)
    answer = answer_options(fields, None, ToolChoice.of(tools))
    return ParsedRequest(
        fields.text("model"),
        (_prompt(fields, tools),),
        RequestedSampling(params, bad_words=bad_words(fields)),
        fields.flag("stream"),
        replace(answer, shows_thoughts=_mode(fields) != "disabled"),
    )


def counted_prompt(fields: BodyFields) -> ChatPrompt:
    """The prompt in a body of `/v1/messages/count_tokens`. Raises InvalidRequest."""
    fields.check_names(COUNT_TOKENS, NOT_IN_MESSAGES_BODY)
    return _prompt(fields, _tools(fields))


def _prompt(fields: BodyFields, tools: ToolFields) -> ChatPrompt:
    turns = message_turns(fields)
    given = fields.inner("chat_template_kwargs").items_by_name()
    if mode := _mode(fields):
        given = {**given, **whether_to_think(mode != "disabled")}
    known: dict[str, Any] = {
        "chat_template_kwargs": given,
        "continue_final_message": goes_on(turns),
    }
    if _config(fields).has("effort"):
        known["reasoning_effort"] = _config(fields).choice("effort", "", EFFORTS)
    variables = template_variables(BodyFields(known), tools.tools)
    return ChatPrompt(turns, parses_special(fields), variables)


def _config(fields: BodyFields) -> BodyFields:
    config = fields.inner("output_config")
    config.check_names(OUTPUT_CONFIG, {})
    return config


def _mode(fields: BodyFields) -> str:
    """Whether the model shall think; empty where the body leaves it to the model."""
    if not fields.has("thinking"):
        return ""
    thinking = fields.inner("thinking")
    thinking.check_names(THINKING, {})
    thinking.whole("budget_tokens", 0, low=0, high=2**31 - 1)
    return thinking.choice("type", "", _MODES)


def _tools(fields: BodyFields) -> ToolFields:
    tools = tools_of(fields, _tool)
    choice = fields.inner("tool_choice")
    choice.check_names(TOOL_CHOICE, {})
    kind = choice.choice("type", "auto", _CHOICES)
    name = choice.text("name") if kind == "tool" else ""
    if kind == "tool" and not name:
        raise InvalidRequest("tool_choice.name is missing", "tool_choice.name")
    is_parallel = not choice.flag("disable_parallel_tool_use")
    return chosen_tools(tools, _CHOICES[kind], name, is_parallel)


def _tool(value: object, name: str) -> dict[str, Any]:
    """A function in the form of a chat, which templates know."""
    tool = object_fields(value, name)
    if tool.text("type", "custom") != "custom":
        message = f"{name}.type must be custom: the client calls its tools itself"
        raise InvalidRequest(message, f"{name}.type")
    tool.check_names(MESSAGES_TOOL, {})
    check_function(tool, "input_schema")
    function: dict[str, Any] = {"name": tool.text("name")}
    if tool.has("description"):
        function["description"] = tool.text("description")
    function["parameters"] = dict(tool.inner("input_schema").items_by_name())
    return {"type": "function", "function": function}
