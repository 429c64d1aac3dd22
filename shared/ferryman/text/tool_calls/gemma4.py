"""Gemma 4: a call as a word, with arguments that are nearly JSON, between marks.

<|tool_call>call:name{key:<|"|>text<|"|>,number:1,list:[true,{key:null}]}<tool_call|>

Keys have no quotes, and a text has a mark on both sides. The model also writes JSON's quotes or
Python's, leaves the first or the last mark of a text out, or writes `name(key=value)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ferryman.text.tool_calls.call_object import MAX_NAME_CHARS, TOOL_NAME, calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Emit,
    Grammar,
    Malformed,
    marked_text,
    skip_space,
    text_until,
    until_mark,
    word_until,
)
from ferryman.text.tool_calls.json_text import (
    CLOSERS,
    MAX_DEPTH,
    OpenText,
    TextBuffer,
    in_quotes,
    json_string,
)
from ferryman.text.tool_calls.value_types import (
    MAX_VALUE_CHARS,
    NO_STRINGS,
    STRING,
    Parameters,
    typed_value,
)

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
SPECIAL = frozenset({BEGIN, END, QUOTE})
_WORD = "call:"
_SIGNS = (":", "=")


def gemma4(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between marks."""
    reader = _CallReader(sink, parameters)
    yield from marked_text(sink, {BEGIN: reader.read}, (END,))


class _CallReader:
    """The calls in an answer."""

    def __init__(self, sink: DeltaSink, parameters: Parameters) -> None:
        self._sink, self._parameters = sink, parameters

    def read(self) -> Grammar[str]:
        """A call whose mark was read. Returns what follows: a character that is no space, or a
        mark."""
        text = TextBuffer(MAX_NAME_CHARS)
        mark = yield from text_until(text.add, ("{", "(", END, BEGIN))
        head = text.text.strip()
        if mark == "{" and not head:
            return (yield from calls(self._sink, mark))
        name = self._name(head)
        if mark in ("{", "("):
            self._sink.begin_call(name)
            reader = _ArgumentReader(self._sink, self._parameters.get(name, {}))
            return (yield from reader.read())
        is_over = not mark and not self._sink.is_cut and name in self._parameters
        if mark != END and not is_over:
            raise Malformed
        self._sink.begin_call(name)
        self._sink.arguments("{}")
        return mark

    def _name(self, head: str) -> str:
        """The tool's name, with or without the namespaces that a model puts before it. Raises
        Malformed."""
        name = head.removeprefix(_WORD).strip()
        last = name.rpartition(":")[2]
        if name not in self._parameters and last in self._parameters:
            return last
        if name not in self._parameters and (name == head or not TOOL_NAME.fullmatch(name)):
            raise Malformed
        return name


class _ArgumentReader:
    """The arguments of one call as they come."""

    def __init__(self, sink: DeltaSink, types: Mapping[str, Sequence[str]]) -> None:
        self._sink, self._types = sink, types

    def read(self) -> Grammar[str]:
        """All of them, behind their first brace. Returns what follows the call."""
        character = yield from self._members(self._types, self._sink.arguments, 0)
        while character in CLOSERS:
            character = yield from self._behind()
        return character

    def _members(self, types: Mapping[str, Sequence[str]], emit: Emit, depth: int) -> Grammar[str]:
        """The members of an object whose brace was read, and what follows its end. Any bracket, or
        the end of the call, ends it."""
        _check(depth)
        emit("{")
        character, comma = (yield from skip_space()), ""
        while True:
            mark = (yield from _mark()) if character == "<" else character
            if mark == END or mark in CLOSERS:
                break
            key = _next_key(mark) or (yield from _key(mark))
            emit(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            comma, kinds = ", ", types.get(key, NO_STRINGS)
            character = yield from self._value((yield from skip_space()), kinds, emit, depth)
            if character == ",":
                character = yield from skip_space()
        emit("}")
        return mark if mark == END else (yield from self._behind())

    def _items(self, emit: Emit, depth: int) -> Grammar[str]:
        _check(depth)
        emit("[")
        character, comma = (yield from skip_space()), ""
        while not (character == END or character in CLOSERS):
            emit(comma)
            comma = ", "
            character = yield from self._value(character, NO_STRINGS, emit, depth)
            if character == ",":
                character = yield from skip_space()
        emit("]")
        return character if character == END else (yield from self._behind())

    def _value(self, first: str, types: Sequence[str], emit: Emit, depth: int) -> Grammar[str]:
        """A value that begins with this character. Returns what follows it: a character that is no
        space, the mark behind the call, or the beginning of the next parameter."""
        if not first:
            raise Malformed
        if first == "{":
            return (yield from self._members({}, emit, depth + 1))
        if first == "[":
            return (yield from self._items(emit, depth + 1))
        if first in ('"', "'"):
            text = OpenText(emit, depth)
            return (yield from self._ended(text, until_mark(END, json_string(text.add, first))))
        if first == "<":
            return (yield from self._marked(OpenText(emit, depth), emit))
        return (yield from self._bare(first, types, emit))

    def _marked(self, text: OpenText, emit: Emit) -> Grammar[str]:
        """A text between marks, of whose first one a character was read."""
        mark = yield from _mark()
        if mark == END:
            emit("null")
            return mark
        if mark != QUOTE:
            raise Malformed
        return (yield from self._ended(text, _up_to_quote(text)))

    def _ended(self, text: OpenText, inner: Grammar[str]) -> Grammar[str]:
        """A text that `inner` reads, up to the mark behind the call if it has no end of its own."""
        if (yield from inner) == END:
            text.leave_open()
            return END
        return (yield from self._behind())

    def _bare(self, first: str, types: Sequence[str], emit: Emit) -> Grammar[str]:
        """A number, a word, or a text whose first mark is missing."""
        text = TextBuffer(MAX_VALUE_CHARS)
        if is_text := tuple(types) == STRING:
            mark = yield from self._text(text.add, first)
        else:
            mark = yield from text_until(text.add, (QUOTE, END, ",", *CLOSERS), first)
        if not mark and self._sink.is_cut:
            raise Malformed
        value = text.text.rstrip()
        if is_text and mark in ("", END):
            value = value[:-1] if value.endswith(("}", ")")) else value
        emit(f'"{_quoted(value)}"' if mark == QUOTE else typed_value(value, types))
        return (yield from self._behind()) if mark == QUOTE else mark or END

    def _text(self, emit: Emit, first: str) -> Grammar[str]:
        """A text without its first mark. It may have commas, and ends at a mark, or where the next
        parameter begins: then that is returned, from the comma to the sign behind the key."""
        mark = yield from text_until(emit, (QUOTE, END, ","), first)
        while mark == ",":
            key = TextBuffer(MAX_VALUE_CHARS)
            mark = yield from text_until(key.add, (QUOTE, END, ",", *_SIGNS))
            if mark in _SIGNS and key.text.removeprefix(" ") in self._types:
                return f",{key.text}{mark}"
            emit(f",{key.text}")
            if mark in _SIGNS:
                mark = yield from text_until(emit, (QUOTE, END, ","), mark)
        return mark

    def _behind(self) -> Grammar[str]:
        """The character behind a value. A mark of a text that was not begun is passed over."""
        character = QUOTE
        while character == QUOTE:
            character = yield from skip_space()
            if character == "<":
                character = yield from _mark()
        return character


def _up_to_quote(text: OpenText) -> Grammar[str]:
    """A text behind a mark, and the mark that ends it. Raises Malformed at the end of all."""
    text.add('"')
    ends = (QUOTE, END)
    mark = yield from text_until(lambda piece: text.add(_quoted(piece)), ends, None, _left_out)
    if not mark:
        raise Malformed
    if mark == QUOTE:
        text.add('"')
    return mark


def _next_key(mark: str) -> str:
    """The key with which a text without its first mark ended; none for another mark."""
    return mark[1:-1].removeprefix(" ") if mark.startswith(",") else ""


def _key(first: str) -> Grammar[str]:
    """A key that begins with this character or mark, and the sign behind it."""
    if first == QUOTE:
        text = TextBuffer(MAX_NAME_CHARS)
        yield from text_until(text.add, (QUOTE,))
        yield from word_until(_SIGNS, 0, (yield from skip_space()))
        return text.text
    if first in ('"', "'"):
        text = TextBuffer(MAX_NAME_CHARS)
        yield from json_string(text.add, first)
        yield from word_until(_SIGNS, 0, (yield from skip_space()))
        return text.string
    if not first:
        raise Malformed
    key, _ = yield from word_until(_SIGNS, MAX_NAME_CHARS, first)
    return key.strip()


def _mark() -> Grammar[str]:
    """The mark of which the first character was read; other text where it is none, nothing where
    the text ends."""
    text = "<"
    while text not in (QUOTE, END) and any(mark.startswith(text) for mark in (QUOTE, END)):
        character = yield
        if not character:
            return ""
        text += character
    return text


def _left_out(held: str) -> None:
    """Takes the beginning of a mark with which an answer ends."""


def _quoted(text: str) -> str:
    return "".join(map(in_quotes, text))


def _check(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Malformed
