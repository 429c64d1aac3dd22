"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: tags for the call and for each argument.

<tool_call><function=name><parameter=key>value</parameter></function></tool_call>

A value is text; the schema of the tool decides whether it means something else.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    expect,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import MAX_BUFFERED_CHARS

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
# By the name of a tool: the schema of each of its parameters.
Parameters = Mapping[str, Mapping[str, Any]]


def qwen3_coder(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags. Models forget the outer tag at times."""
    while mark := (yield from text_until(sink.content, (BEGIN, FUNCTION))):
        yield from attempt(sink, mark, _call(sink, mark, parameters))


def _call(sink: DeltaSink, mark: str, parameters: Parameters) -> Grammar[None]:
    if mark == BEGIN:
        yield from expect(FUNCTION, (yield from skip_space()))
    name, _ = yield from word_until((">",), MAX_NAME_CHARS)
    if not name.strip():
        raise Malformed
    sink.begin_call(name.strip())
    yield from _arguments(sink, parameters.get(name.strip(), {}))
    if mark == BEGIN and (character := (yield from skip_space())):
        yield from expect(END, character)


def _arguments(sink: DeltaSink, schemas: Mapping[str, Any]) -> Grammar[None]:
    """Up to the tag that ends the call. Each argument is passed on when its value is whole."""
    before = "{"
    while True:
        yield from expect("<", (yield from skip_space()))
        kind = yield
        if kind == "/":
            yield from expect(FUNCTION_END[2:])
            sink.arguments("{}" if before == "{" else "}")
            return
        yield from expect(PARAMETER[1:], kind)
        key, _ = yield from word_until((">",), MAX_NAME_CHARS)
        text, _ = yield from word_until((PARAMETER_END,), MAX_BUFFERED_CHARS)
        value = _value(text.removeprefix("\n").removesuffix("\n"), schemas.get(key.strip()))
        sink.arguments(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: {value}")
        before = ", "


def _value(text: str, schema: object) -> str:
    """JSON of a value. Text that is not of a type that the schema names stays a string."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            encoded = json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if not kinds or _name_of(value) & kinds:
            return encoded
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: object) -> set[str]:
    """The types a schema names; none: any. A parameter that the tool does not have is a string."""
    if not isinstance(schema, Mapping):
        return {"string"}
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set()
    if isinstance(named, list):
        kinds = {kind for kind in named if isinstance(kind, str)}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice)
    return kinds


def _name_of(value: object) -> set[str]:
    if value is None:
        return {"null"}
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    name = names.get(type(value), "string")
    return {name, "number"} if name == "integer" else {name}
