"""The tools of a chat, and whether the model may, must, or must not call one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar, check_depth
from ferryman.schedule.schemas.json_schema import (
    unknown_formats,
    with_references_under,
    without_nulls,
)
from ferryman.text.marked_turn import ToolBreakpoint
from ferryman.text.tool_calls.formats import (
    FreeTextTool,
    FreeTools,
    NamedTool,
    NoTools,
    OutputSyntax,
    SomeTool,
    ToolUse,
)
from ferryman.text.tool_calls.value_types import Parameters, parameter_types
from ferryman_router.bodies.field_kinds import (
    FLAG,
    OBJECT,
    TEXT,
    FieldKind,
    Record,
    Values,
    mapping,
    text,
)
from ferryman_router.bodies.field_readers import cache_mark
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.structured_outputs import note_formats

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 << 10
BY_CLIENT = ": the client calls its tools itself"
CHOICES = ("none", "auto", "required")
NAMED = "named"
_DEMANDS = (NAMED, "required")
CUSTOM_INPUT = "input"  # the one parameter of a custom tool
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# If a schema has one of these, `properties` are not all that it allows.
_OPEN_FIELDS = frozenset(
    "additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf if $ref".split()
)

# A reference within a schema of its own name would not be one into the whole.
_NAMES = frozenset({"$id", "$schema"})

# The `type`, `namespace` and `name` by which a client calls a tool, as far as they are not a
# function's.
ToolSource = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ToolFields:
    """The tools as the template shows them, and the choice: one of CHOICES, or NAMED and a name.
    `sources` has the tool of the client by the name that the model knows, if that is another. The
    named tool's input may have a grammar: then `free_text`, which the answer is. The ends of some
    are `breakpoints`."""

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    name: str = ""
    is_parallel: bool = True
    sources: Mapping[str, ToolSource] = field(default_factory=dict)
    free_text: OutputGrammar | None = None
    breakpoints: tuple[ToolBreakpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The reading of an answer: plain values, which travel as JSON. `parameters` are the types of
    each tool's parameters; `sources` are as in ToolFields; `text_of` is the parameter of the named
    tool that the answer is the text of, empty for arguments in JSON."""

    choice: str = "none"
    name: str = ""
    parameters: Parameters = field(default_factory=dict)
    is_parallel: bool = True
    sources: Mapping[str, ToolSource] = field(default_factory=dict)
    text_of: str = ""

    @classmethod
    def of(cls, fields: ToolFields) -> ToolChoice:
        parameters: Parameters = {}
        if fields.choice == "auto":
            functions = [tool["function"] for tool in fields.tools]
            parameters = {
                function["name"]: parameter_types(function.get("parameters"))
                for function in functions
            }
        name, is_parallel = fields.name, fields.is_parallel
        text_of = CUSTOM_INPUT if fields.free_text is not None else ""
        return cls(fields.choice, name, parameters, is_parallel, fields.sources, text_of)

    @property
    def use(self) -> ToolUse:
        if self.choice == NAMED:
            return FreeTextTool(self.name, self.text_of) if self.text_of else NamedTool(self.name)
        if self.choice == "required":
            return SomeTool()
        return FreeTools(self.parameters) if self.choice == "auto" else NoTools()


NO_TOOLS = ToolFields()


def tools_of(
    values: Values,
    body: BodyPlace,
    read: Callable[[object, BodyPlace], Sequence[Mapping[str, Any]]],
) -> tuple[Mapping[str, Any], ...]:
    """The functions of a body as templates know them; `read` gets a tool and its place, and gives
    its functions."""
    tools = values["tools"]
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are taken", "tools")
    place = body.field("tools")
    functions = [function for i, tool in enumerate(tools) for function in read(tool, place.item(i))]
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} functions are taken", "tools")
    return tuple(functions)


def tool_breakpoints(
    sent: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], body: BodyPlace
) -> tuple[ToolBreakpoint, ...]:
    """The marks of the tools that were `sent`, each at the last of `tools` up to it: a tool that is
    left out marks the end of the one before. Raises InvalidRequest, naming the field."""
    indices = {str(tool["function"]["name"]): index for index, tool in enumerate(tools)}
    marks, last = list[ToolBreakpoint](), -1
    for number, tool in enumerate(sent):
        function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        last = indices.get(str(function.get("name")), last)
        if (mark := tool.get("cache_control")) is not None:
            place = body.field("tools").item(number).field("cache_control")
            marks.append(ToolBreakpoint(last, cache_mark(mark, place)))
    return tuple(mark for mark in marks if mark.tool_index >= 0)


def chosen_tools(
    tools: tuple[Mapping[str, Any], ...],
    choice: str,
    name: str,
    body: BodyPlace,
    *,
    is_parallel: bool,
) -> ToolFields:
    """The tools and the choice, checked together; InvalidRequest names what is wrong."""
    if len(json.dumps(tools)) > MAX_TOOLS_CHARS:
        raise InvalidRequest(f"tools have at most {MAX_TOOLS_CHARS} characters of JSON", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have one name", "tools")
    if name and name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}, which is no tool", "tool_choice")
    if not tools and choice != "none":
        # Clients send `auto` without any tools; a call cannot be demanded then.
        if choice != "auto":
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        choice = "none"
    if choice in _DEMANDS:
        for tool in tools:
            _note_formats(tool["function"], body)
    return ToolFields(tools, choice, name, is_parallel)


def _note_formats(function: Mapping[str, Any], body: BodyPlace) -> None:
    """A call that is demanded is held to its tool's schema, but for formats that are not known."""
    parameters = function.get("parameters") or {}
    check_depth(parameters, GrammarKind.JSON_SCHEMA)
    note_formats(unknown_formats(parameters), body.field(f"tools.{function['name']}"))


def check_type(tool: Any, name: str, wanted: str, *, default: str = "", why: str = "") -> None:
    """Refuses a tool of another type, before its other fields are looked at."""
    kind = mapping(tool, name).get("type")
    if text(default if kind is None else kind, f"{name}.type") != wanted:
        raise InvalidRequest(f"{name}.type must be {wanted}{why}", f"{name}.type")


def function_name(value: Any, name: str) -> str:
    if not _NAME.fullmatch(text(value, name)):
        message = f"{name} must be 1 to 128 letters, digits or any of _.:/-"
        raise InvalidRequest(message, name)
    return str(value)


def _schema(value: Any, name: str) -> Any:
    """A schema as it is: templates go through its properties."""
    if (properties := mapping(value, name).get("properties")) is not None:
        mapping(properties, f"{name}.properties")
    return value


SCHEMA = FieldKind(OBJECT.schema, _schema)
FUNCTION: Mapping[str, FieldKind] = {
    "name": FieldKind(TEXT.schema, function_name, missing=""),
    "description": replace(TEXT, default=None),
    "strict": replace(FLAG, default=None),
}


def tool_choice(
    value: object,
    place: BodyPlace,
    kinds: Mapping[str, Record],
    name_of: Callable[[Values], str | None],
    otherwise: str,
) -> tuple[str, str]:
    """The choice, and the name of the function if it is one: then an object of a type in `kinds`,
    of whose fields `name_of` makes the name. `otherwise` ends the message of InvalidRequest."""
    if value is None:
        return "auto", ""
    if isinstance(value, str) and value in CHOICES:
        return value, ""
    kind = value.get("type") if isinstance(value, dict) else None
    if (
        isinstance(kind, str)
        and kind in kinds
        and (name := name_of(kinds[kind].read(value, place)))
    ):
        return NAMED, name
    message = f"tool_choice must be none, auto, required, or {otherwise}"
    raise InvalidRequest(message, "tool_choice")


def check_offered(choice: ToolChoice, syntax: OutputSyntax, chat_template: str) -> None:
    """Refuses tools that the template would not show, and calls that no parser would read. A call
    that is demanded needs neither: its grammar is the format."""
    if choice.choice != "auto":
        return
    if "tools" not in chat_template:
        raise InvalidRequest("the chat template of this model takes no tools", "tools")
    if syntax.tools is None:
        message = (
            "how this model writes calls is not known here; the router's --tool-parser says so"
        )
        raise InvalidRequest(message, "tools")


def forced_grammar(fields: ToolFields) -> OutputGrammar | None:
    """The grammar of an answer that has to be a call; None for one that need not be. Raises
    InvalidRequest for a schema that is too large or no schema."""
    if fields.choice not in _DEMANDS:
        return None
    if fields.free_text is not None:
        return fields.free_text
    functions = [tool["function"] for tool in fields.tools]
    try:
        if fields.choice == NAMED:
            (named,) = (function for function in functions if function["name"] == fields.name)
            return OutputGrammar.json_schema(_arguments_schema(named))
        return OutputGrammar.json_schema(_calls_schema(functions, fields.is_parallel))
    except InvalidRequest as error:
        raise InvalidRequest(f"the schemas of the tools: {error}", "tools") from error


def _calls_schema(functions: Sequence[Mapping[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """A list of calls. Two tools may have different definitions of one name, so each schema stays
    whole, in a place of its own."""
    names = [str(function["name"]) for function in functions]
    schemas = [_arguments_schema(function) for function in functions]
    most = {} if is_parallel else {"maxItems": 1}
    calls = [_call_schema(name, f"#/$defs/{index}") for index, name in enumerate(names)]
    moved = (with_references_under(schema, f"/$defs/{i}") for i, schema in enumerate(schemas))
    return {
        "type": "array",
        "minItems": 1,
        **most,
        "items": {"anyOf": calls},
        "$defs": {str(index): schema for index, schema in enumerate(moved)},
    }


def _call_schema(name: str, reference: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [name]},
            "parameters": {"$ref": reference},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Without `properties` there are
    none: a function takes no others than it says, though a schema without the keyword would."""
    parameters = function.get("parameters") or {}
    check_depth(parameters, GrammarKind.JSON_SCHEMA)
    schema = {
        name: value for name, value in without_nulls(parameters).items() if name not in _NAMES
    }
    if not _OPEN_FIELDS & schema.keys():
        schema = {"properties": {}, **schema, "additionalProperties": False}
    return {**schema, "type": "object"}
