"""The tools of Anthropic's `/v1/messages`, and which of them the model is told of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferryman_router.bodies.field_kinds import (
    ANY,
    FLAG,
    Record,
    Values,
    mapping,
    required,
)
from ferryman_router.bodies.field_table import TOOL_CHOICES
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.tool_fields import (
    BY_CLIENT,
    FUNCTION,
    SCHEMA,
    ToolFields,
    check_type,
    chosen_tools,
    tool_breakpoints,
    tools_of,
)

TOOL_REFERENCE = "tool_reference"
# Tools that Anthropic runs, or whose schemas its own models know: `web_search_20250305`.
_HOSTED = re.compile(r"[a-z_]{1,60}_20\d{6}|mcp_toolset")
_NOT_RUN = "no tool is run or known here by its type alone"
_WITHOUT_EFFECT = "type cache_control eager_input_streaming allowed_callers input_examples"
_TOOL = Record(
    {
        **FUNCTION,
        **dict.fromkeys(_WITHOUT_EFFECT.split(), ANY),
        "input_schema": replace(SCHEMA, default={}),
        "defer_loading": FLAG,
    }
)


def message_tools(values: Values, body: BodyPlace) -> ToolFields:
    """The tools that the model is told of, and the choice. A tool with `defer_loading` is one of
    them when the conversation refers to it. Raises InvalidRequest, naming the field."""
    loaded = frozenset(_references(values["messages"]))

    def read(value: object, place: BodyPlace) -> Sequence[Mapping[str, Any]]:
        return _functions(value, place, loaded)

    tools, choice = tools_of(values, body, read), values["tool_choice"]
    is_named = choice["type"] == "tool"
    name = required(choice, "name", "tool_choice") if is_named else ""
    if choice["name"] is not None and not is_named:
        body.field("tool_choice").field("name").note(f"the type is {choice['type']}")
    is_parallel = not choice["disable_parallel_tool_use"]
    kind = TOOL_CHOICES[choice["type"]]
    fields = chosen_tools(tools, kind, name, body, is_parallel=is_parallel)
    return replace(fields, breakpoints=tool_breakpoints(values["tools"], tools, body))


def _functions(value: object, place: BodyPlace, loaded: frozenset[str]) -> list[dict[str, Any]]:
    """The function in the form of a chat, which templates know; none for a tool that is left out
    or not loaded yet."""
    kind = mapping(value, place).get("type")
    if isinstance(kind, str) and _HOSTED.fullmatch(kind):
        place.leave_out(kind, _NOT_RUN)
        return []
    check_type(value, place, "custom", default="custom", why=BY_CLIENT)
    tool = _TOOL.read(value, place)
    if tool["defer_loading"] and tool["name"] not in loaded:
        return []
    function: dict[str, Any] = {"name": tool["name"]}
    if tool["description"] is not None:
        function["description"] = tool["description"]
    function["parameters"] = dict(tool["input_schema"])
    return [{"type": "function", "function": function}]


def _references(messages: object) -> Iterator[str]:
    """The names in the references of a conversation, whose form is checked when it is read: they
    stand in results of calls."""
    for message in _objects(messages):
        for block in _objects(message.get("content")):
            for part in _objects(block.get("content")):
                name = part.get("tool_name")
                if part.get("type") == TOOL_REFERENCE and isinstance(name, str):
                    yield name


def _objects(value: object) -> list[dict[str, Any]]:
    items = value if isinstance(value, Sequence) else ()
    return [item for item in items if isinstance(item, dict)]
