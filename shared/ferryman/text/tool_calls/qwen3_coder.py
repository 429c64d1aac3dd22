"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: tags for the call and for each argument.

<tool_call><function=name><parameter=key>value</parameter></function></tool_call>

A value is text; the schema of the tool decides whether it means something else. Models forget any
of these tags at times, and write JSON between the outer ones, as other models of Qwen do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ferryman.text.tool_calls.call_object import calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Emit,
    Grammar,
    Malformed,
    expect,
    marked_text,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import TextBuffer, in_quotes, json_object
from ferryman.text.tool_calls.value_types import MAX_VALUE_CHARS, Parameters, typed_value

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
# A value ends at its own tag; where that is missing, at one that begins a line.
_VALUE_ENDS = (PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + END)
_TAGS = (PARAMETER, PARAMETER_END, FUNCTION_END, END, BEGIN, FUNCTION)
_STRING = ("string",)
_ENDS_OF_NAMES = (">", "\n")  # some forget the first: no name has a line break


def qwen3_coder(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    openings = {
        BEGIN: partial(marked_call, sink, parameters),
        FUNCTION: partial(tagged_call, sink, parameters),
    }
    yield from marked_text(sink, openings, (END,))


def marked_call(sink: DeltaSink, parameters: Parameters) -> Grammar[str]:
    """The call behind the outer tag, in tags or in JSON. Returns what follows the call."""
    first = yield from skip_space()
    if first != FUNCTION[0]:
        return (yield from calls(sink, first))
    yield from expect(FUNCTION, first)
    return (yield from tagged_call(sink, parameters))


def tagged_call(
    sink: DeltaSink, parameters: Parameters, names: Collection[str] | None = None
) -> Grammar[str]:
    """A call behind `<function=`; of any name where `names` is None. It begins when another tag
    or an object follows. Returns what follows it: a character that is no space, or a tag."""
    name, _ = yield from word_until(_ENDS_OF_NAMES, MAX_NAME_CHARS)
    name = name.strip().strip("\"'")
    if not name or FUNCTION[0] in name or (names is not None and name not in names):
        raise Malformed
    first = yield from skip_space()
    if first == "{":
        sink.begin_call(name)
        yield from json_object(sink.arguments)
        return (yield from _behind_object())
    arguments = _TaggedArguments(sink, parameters.get(name, {}))
    if not first and not sink.is_cut:
        sink.begin_call(name)
        return arguments.at_end_of_text()
    _, tag = yield from word_until(_TAGS, 0, first)
    sink.begin_call(name)
    return (yield from arguments.read(tag))


def _behind_object() -> Grammar[str]:
    """The text behind an object; the tag that ends the function is passed over."""
    _, tag = yield from word_until((FUNCTION_END, END), 0, (yield from skip_space()))
    return tag if tag == END else (yield from skip_space())


class _TaggedArguments:
    """The arguments of one call as they come. Text is passed on while it is read, any other value
    when it is whole."""

    def __init__(self, sink: DeltaSink, types: Mapping[str, Sequence[str]]) -> None:
        self._sink, self._types = sink, types
        self._before, self._stray = "{", TextBuffer()

    def read(self, tag: str) -> Grammar[str]:
        """All of them, from the first tag on. Text between them is no part of the call: it is
        content behind it. Returns as `tagged_call` does."""
        while tag in (PARAMETER, PARAMETER_END):
            if tag == PARAMETER:
                tag = (yield from self._parameter()).strip()
            if tag == PARAMETER_END:
                tag = yield from text_until(self._stray.add, _TAGS)
        if not tag:
            return self.at_end_of_text()
        self._close()
        # Behind a call that another one ends, that one begins.
        return tag if tag in (BEGIN, FUNCTION) else (yield from skip_space())

    def at_end_of_text(self) -> str:
        """A call whose tags are missing is whole if the model ended there by itself."""
        if not self._sink.is_cut:
            self._close()
        return ""

    def _close(self) -> None:
        self._sink.arguments("{}" if self._before == "{" else "}")
        stray = self._stray.text.strip()
        if stray and not any(tag.startswith(stray) for tag in _TAGS):
            self._sink.aside(stray)

    def _parameter(self) -> Grammar[str]:
        """A name and its value; returns the tag that ended it, empty at the end of the text."""
        key = TextBuffer(MAX_NAME_CHARS)
        if not (yield from text_until(key.add, _ENDS_OF_NAMES)):
            return ""
        name = key.text.strip().strip("\"'")
        self._sink.arguments(f"{self._before}{json.dumps(name, ensure_ascii=False)}: ")
        self._before = ", "
        types = self._types.get(name, _STRING)
        if tuple(types) == _STRING:
            return (yield from self._string())
        return (yield from self._typed(types))

    def _string(self) -> Grammar[str]:
        value = _StreamedText(self._sink.arguments)
        tag = yield from text_until(value.add, _VALUE_ENDS, None, self._unless_cut(value.add))
        value.end(is_line_over=tag.startswith("\n"))
        if tag or not self._sink.is_cut:
            self._sink.arguments('"')
        return tag

    def _typed(self, types: Sequence[str]) -> Grammar[str]:
        buffer = TextBuffer(MAX_VALUE_CHARS)
        tag = yield from text_until(buffer.add, _VALUE_ENDS)
        if tag or not self._sink.is_cut:
            text = buffer.text.removeprefix("\n")
            text = text if tag.startswith("\n") else text.removesuffix("\n")
            self._sink.arguments(typed_value(text, types))
        return tag

    def _unless_cut(self, add: Emit) -> Emit:
        """Takes the beginning of a tag with which the text ends. In one that was cut it is no part
        of the value."""

        def take(held: str) -> None:
            for character in "" if self._sink.is_cut else held:
                add(character)

        return take


class _StreamedText:
    """A JSON string as its text comes, without the line breaks that stand around it; the quote at
    its end is the caller's."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._held, self._is_first = emit, "", True
        emit('"')

    def add(self, character: str) -> None:
        held, is_first, self._held, self._is_first = self._held, self._is_first, "", False
        if held:
            self._emit(in_quotes(held))
        if character != "\n":
            self._emit(in_quotes(character))
        elif not is_first:
            self._held = character

    def end(self, *, is_line_over: bool) -> None:
        """The line break before the end stands around the text, unless it was passed over."""
        if is_line_over and self._held:
            self._emit(in_quotes(self._held))
