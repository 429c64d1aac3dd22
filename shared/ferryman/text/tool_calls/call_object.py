"""`{"name": …, "arguments": {…}}`: a call as most formats write it, in any order of its fields."""

from __future__ import annotations

import json

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Emit, Grammar, Malformed, attempt, expect, skip_space
from ferryman.text.tool_calls.json_text import (
    TextBuffer,
    is_text,
    json_object,
    json_string,
    json_value,
)

_ARGUMENTS = ("arguments", "parameters")


class _CallFields:
    """A call of which name and arguments may come in either order. It begins with the second of
    the two, so that half a call is none."""

    def __init__(self, sink: DeltaSink) -> None:
        self._sink, self._early = sink, TextBuffer()
        self._name, self._has_arguments = "", False

    def named(self, name: str) -> None:
        if self._name or not name:
            raise Malformed
        self._name = name
        if self._has_arguments:
            self._sink.begin_call(name)
            self._sink.arguments(self._early.text)

    def take_arguments(self) -> Emit:
        if self._has_arguments:
            raise Malformed
        self._has_arguments = True
        if not self._name:
            return self._early.add
        self._sink.begin_call(self._name)
        return self._sink.arguments

    def close(self) -> None:
        if not self._name:
            raise Malformed
        if not self._has_arguments:
            self.take_arguments()("{}")


def call_object(sink: DeltaSink) -> Grammar[None]:
    """An object whose opening brace was read. Nothing after its end is read.

    Fields that are neither name nor arguments are passed over. The arguments are an object, null,
    or a string that holds an object.
    """
    call, character = _CallFields(sink), (yield from skip_space())
    while character != "}":
        key = TextBuffer()
        if character != '"':
            raise Malformed
        yield from json_string(key.add)
        yield from expect(":", (yield from skip_space()))
        character = yield from _field(call, key.string, (yield from skip_space()))
        if character == ",":
            character = yield from skip_space()
        elif character != "}":
            raise Malformed
    call.close()


def _field(call: _CallFields, key: str, first: str) -> Grammar[str]:
    if key == "name" and first == '"':
        name = TextBuffer()
        yield from json_string(name.add)
        call.named(name.string)
    elif key in _ARGUMENTS and first == "{":
        yield from json_object(call.take_arguments())
    elif key in _ARGUMENTS and first == '"':
        written = TextBuffer()
        yield from json_string(written.add)
        call.take_arguments()(_object_text(written.string))
    elif key in _ARGUMENTS and first == "n":
        yield from expect("null", first)
        call.take_arguments()("{}")
    elif key in (*_ARGUMENTS, "name"):
        raise Malformed
    else:
        return (yield from json_value(first, TextBuffer().add))
    return (yield from skip_space())


def _object_text(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    raw = json.dumps(value, ensure_ascii=False)
    return raw if is_text(raw) else json.dumps(value)


def call_list(sink: DeltaSink) -> Grammar[None]:
    """A list of calls whose opening bracket was read. Nothing after its end is read."""
    character = yield from skip_space()
    while character != "]":
        if character != "{":
            raise Malformed
        yield from call_object(sink)
        character = yield from skip_space()
        if character == ",":
            character = yield from skip_space()
        elif character != "]":
            raise Malformed


def marked_call_list(sink: DeltaSink, mark: str) -> Grammar[None]:
    """A list of calls after `mark`; other text becomes content."""
    yield from attempt(sink, mark, _list_behind_space(sink))


def _list_behind_space(sink: DeltaSink) -> Grammar[None]:
    yield from expect("[", (yield from skip_space()))
    yield from call_list(sink)
