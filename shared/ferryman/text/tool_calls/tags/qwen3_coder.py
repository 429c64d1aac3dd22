"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: tags for the call and for each argument.

<tool_call><function=name><parameter=key>value</parameter></function></tool_call>

A value is text; the schema of the tool decides whether it means something else. Models forget any
of these tags at times, and write JSON between the outer ones, as other models of Qwen do.
"""

from __future__ import annotations

from collections.abc import Collection
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
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.tags.arguments import (
    MAX_NAME_CHARS,
    TaggedArguments,
    ValueEnd,
    unless_cut,
)
from ferryman.text.tool_calls.value_types import Parameters

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# A value ends at its own tag; where that is missing, at one that begins a line.
_VALUE_ENDS = (PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + END)
_TAGS = (PARAMETER, PARAMETER_END, FUNCTION_END, END, BEGIN, FUNCTION)
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
    arguments = TaggedArguments(sink, parameters.get(name, {}), _TAGS)
    if not first and not sink.is_cut:
        sink.begin_call(name)
        return arguments.at_end_of_text()
    _, tag = yield from word_until(_TAGS, 0, first)
    sink.begin_call(name)
    return (yield from _arguments(sink, arguments, tag))


def _behind_object() -> Grammar[str]:
    """The text behind an object; the tag that ends the function is passed over."""
    _, tag = yield from word_until((FUNCTION_END, END), 0, (yield from skip_space()))
    return tag if tag == END else (yield from skip_space())


def _arguments(sink: DeltaSink, arguments: TaggedArguments, tag: str) -> Grammar[str]:
    """All of them, from the first tag on. Returns as `tagged_call` does."""
    while tag in (PARAMETER, PARAMETER_END):
        if tag == PARAMETER:
            tag = (yield from _parameter(sink, arguments)).strip()
        if tag == PARAMETER_END:
            tag = yield from arguments.beside(_TAGS)
    if not tag:
        return arguments.at_end_of_text()
    arguments.close()
    # Behind a call that another one ends, that one begins.
    return tag if tag in (BEGIN, FUNCTION) else (yield from skip_space())


def _parameter(sink: DeltaSink, arguments: TaggedArguments) -> Grammar[str]:
    """A name and its value; returns the tag that ended it, empty at the end of the text."""
    key = TextBuffer(MAX_NAME_CHARS)
    if not (yield from text_until(key.add, _ENDS_OF_NAMES)):
        return ""
    name = key.text.strip().strip("\"'")
    read = partial(_value, sink)
    return (yield from arguments.argument(name, arguments.types(name), read))


def _value(sink: DeltaSink, emit: Emit) -> Grammar[ValueEnd]:
    text = _TextBetweenLines(emit)
    tag = yield from text_until(text.add, _VALUE_ENDS, None, unless_cut(sink, text.add))
    text.end(is_line_over=tag.startswith("\n"))
    return ValueEnd(bool(tag), tag)


class _TextBetweenLines:
    """A value as its text comes, without the line breaks that stand around it."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._held, self._is_first = emit, "", True

    def add(self, text: str) -> None:
        for character in text:
            self._add(character)

    def _add(self, character: str) -> None:
        held, is_first, self._held, self._is_first = self._held, self._is_first, "", False
        if held:
            self._emit(held)
        if character != "\n":
            self._emit(character)
        elif not is_first:
            self._held = character

    def end(self, *, is_line_over: bool) -> None:
        """The line break before the end stands around the text, unless it was passed over."""
        if is_line_over and self._held:
            self._emit(self._held)
