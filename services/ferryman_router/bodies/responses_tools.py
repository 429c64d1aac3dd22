"""The tools of `/v1/responses`: functions, groups of them, and tools whose input is free text.

Templates know functions alone. A function of a namespace goes by a name made of both, and a custom
tool by a function with one text. Calls go back to the client in its own words, so the answer needs
to know which name came from what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import GrammarKind, OutputGrammar
from ferryman_router.bodies.field_kinds import (
    ANY,
    SOME_OBJECT,
    TEXT,
    Record,
    Values,
    choice,
    list_of,
    mapping,
    record,
    required,
    text,
)
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.tool_fields import (
    BY_CLIENT,
    CUSTOM_INPUT,
    FUNCTION,
    MAX_TOOLS,
    SCHEMA,
    ToolFields,
    ToolSource,
    chosen_tools,
    function_name,
    tool_choice,
    tools_of,
)

HOSTED = (
    "web_search web_search_preview file_search code_interpreter computer computer_use_preview"
    " image_generation local_shell shell apply_patch mcp tool_search"
).split()
_HOSTED = re.compile(rf"(?:{'|'.join(HOSTED)})(?:_20\d\d_\d\d_\d\d)?")
_NOT_RUN = "tools are called by the client"
_MORE: Mapping[str, Any] = {"type": ANY, "defer_loading": ANY}
_AS_IN_CHATS = dict.fromkeys(("function", "custom"), "its fields stand beside its type here")
_FUNCTION = Record({**FUNCTION, **_MORE, "parameters": SCHEMA}, _AS_IN_CHATS)
_CUSTOM = Record({**FUNCTION, **_MORE, "format": SOME_OBJECT}, _AS_IN_CHATS)
_FORMAT = record(
    type=choice("text", "grammar", default="text"),
    syntax=choice("lark", "regex"),
    definition=TEXT,
)
_MADE = {"lark": OutputGrammar.context_free, "regex": OutputGrammar.regex}
_NOT_HELD = "told to the model, and enforced where tool_choice names the tool"
_NAMESPACE = Record(
    {
        "type": ANY,
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "tools": list_of({"type": "object"}, MAX_TOOLS),
    }
)
_TYPES = ("function", "custom", "namespace")
_CHOICES = dict.fromkeys(("function", "custom"), record("type", name=TEXT, namespace=TEXT))


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function of a namespace: the one that Codex makes where
    it has to."""
    if not namespace:
        return name
    is_apart = namespace.endswith("_") or name.startswith("_")
    return f"{namespace}{'' if is_apart else '__'}{name}"


class ResponseTools:
    """The tools of one body as they are read: `echo` has them as the client sent them, `sources`
    where each function's name comes from, if it is not the client's own."""

    def __init__(self) -> None:
        self.echo: list[dict[str, Any]] = []
        self.sources: dict[str, ToolSource] = {}
        self._grammars: dict[str, tuple[OutputGrammar, BodyPlace]] = {}

    def fields(self, values: Values, body: BodyPlace) -> ToolFields:
        """The tools and the choice. Raises InvalidRequest, naming the field."""
        tools = tools_of(values, body, self._read)
        otherwise = "of type function or custom with a name"
        place = body.field("tool_choice")
        choice, name = tool_choice(values["tool_choice"], place, _CHOICES, _chosen, otherwise)
        is_parallel = values["parallel_tool_calls"]
        fields = chosen_tools(tools, choice, name, body, is_parallel=is_parallel)
        return replace(fields, sources=self.sources, free_text=self._enforced(fields))

    def _enforced(self, fields: ToolFields) -> OutputGrammar | None:
        """The grammar of the input that a choice demands. A model that chooses itself is told of a
        grammar and not held to it, which is noted; a demanded call is held to its schema, and that
        has a regex as its pattern."""
        for grammar, place in self._grammars.values():
            is_held = fields.choice == "required" and grammar.kind is GrammarKind.REGEX
            if fields.choice in ("auto", "required") and not is_held:
                place.note(_NOT_HELD)
        return self._grammars[fields.name][0] if fields.name in self._grammars else None

    def _read(self, value: object, place: BodyPlace) -> list[dict[str, Any]]:
        """The functions of a tool, in the form of a chat."""
        kind = _type_of(value, place)
        if _HOSTED.fullmatch(kind):
            place.leave_out(kind, _NOT_RUN)
            return []
        if kind != "namespace":
            echo, function, form = _one(kind, value, place)
            if kind == "custom":
                self.sources[function["name"]] = {"type": kind}
                self._read_grammar(function["name"], form, place)
            self.echo.append(echo)
            return [_as_in_a_chat(function)]
        return self._of_namespace(_NAMESPACE.read(value, place), place)

    def _of_namespace(self, group: Values, place: BodyPlace) -> list[dict[str, Any]]:
        """The functions of a namespace. The first one's description begins with that of all."""
        echoes, functions = [], []
        for index, value in enumerate(group["tools"]):
            inner = place.field("tools").item(index)
            kind = _type_of(value, inner)
            if kind not in ("function", "custom"):
                message = f"{inner}.type must be function or custom"
                raise InvalidRequest(message, f"{inner}.type")
            echo, function, form = _one(kind, value, inner)
            name = function_name(flat_name(group["name"], function["name"]), inner.field("name"))
            self.sources[name] = {
                "type": kind,
                "namespace": group["name"],
                "name": function["name"],
            }
            self._read_grammar(name, form, inner)
            echoes.append(echo)
            functions.append({**function, "name": name})
        if functions and group["description"]:
            texts = (group["description"], functions[0].get("description"))
            functions[0]["description"] = "\n\n".join(filter(None, texts))
        named = {name: group[name] for name in ("name", "description") if group[name] is not None}
        self.echo.append({"type": "namespace", **named, "tools": echoes})
        return [_as_in_a_chat(function) for function in functions]

    def _read_grammar(self, name: str, form: Values, place: BodyPlace) -> None:
        """The grammar of a custom tool's input, if its form has one. Raises InvalidRequest."""
        if form["type"] != "grammar":
            return
        place = place.field("format")
        syntax = required(form, "syntax", place)
        try:
            grammar = _MADE[syntax](required(form, "definition", place))
        except InvalidRequest as error:
            field = f"{place}.definition"
            raise InvalidRequest(f"{field}: {error}", field) from None
        self._grammars[name] = (grammar, place)


def echoed_choice(fields: ToolFields) -> dict[str, str]:
    """The named tool of a choice in the client's words."""
    source = fields.sources.get(fields.name, {})
    return {"type": "function", "name": fields.name, **source}


def _type_of(value: object, place: BodyPlace) -> str:
    kind = mapping(value, place).get("type")
    kind = str(text("" if kind is None else kind, f"{place}.type"))
    if kind not in _TYPES and not _HOSTED.fullmatch(kind):
        message = f"{place}.type must be {', '.join(_TYPES)}{BY_CLIENT}"
        raise InvalidRequest(message, f"{place}.type")
    return kind


def _one(
    kind: str, value: object, place: BodyPlace
) -> tuple[dict[str, Any], dict[str, Any], Values]:
    """A function or a custom tool: as the client sent it, as the template gets it, and the form of
    its input."""
    tool = (_FUNCTION if kind == "function" else _CUSTOM).read(value, place)
    names = ("name", "description", "parameters", "strict", "format")
    fields = {name: tool[name] for name in names if tool.get(name) is not None}
    echo = {"type": kind, **fields}
    form = _FORMAT.read(tool.get("format") or {}, place.field("format"))
    if kind == "function":
        return echo, fields, form
    description = "\n\n".join(filter(None, (tool["description"], _told_format(form))))
    more = {"description": description} if description else {}
    return echo, {"name": tool["name"], **more, "parameters": _input_schema(form)}, form


def _told_format(form: Values) -> str:
    """The words about the form of a custom tool's input, for its description."""
    if form["type"] != "grammar":
        return ""
    return f"The input has this form ({form['syntax']}):\n{form['definition']}"


def _input_schema(form: Values) -> dict[str, Any]:
    """The schema of the function that a custom tool is for a model."""
    is_regex = form["type"] == "grammar" and form["syntax"] == "regex"
    pattern = {"pattern": f"^(?:{form['definition']})$"} if is_regex else {}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", **pattern}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _as_in_a_chat(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _chosen(choice: Values) -> str | None:
    """The name by which the model knows the function of a choice."""
    return flat_name(choice["namespace"], choice["name"]) if choice["name"] else None
