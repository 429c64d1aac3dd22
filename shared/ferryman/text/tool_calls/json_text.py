"""JSON (RFC 8259) one character at a time: each value is passed on as it is being read."""

from __future__ import annotations

import json
import re

from ferryman.text.tool_calls.grammar import Emit, Grammar, Malformed, expect, skip_space

MAX_DEPTH = 64
MAX_BUFFERED_CHARS = 1 << 16
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


def json_value(first: str, emit: Emit, depth: int = 0) -> Grammar[str]:
    """A value that begins with `first`; returns the first character after it that is no space.
    Raises Malformed for what is no JSON, and for values nested deeper than 64."""
    if first == "{":
        yield from json_object(emit, depth)
    elif first == "[":
        yield from _array(emit, depth)
    elif first == '"':
        yield from json_string(emit)
    elif first in ("t", "f", "n"):
        yield from _literal(first, emit)
    else:
        return (yield from _number(first, emit))
    return (yield from skip_space())


def json_object(emit: Emit, depth: int = 0) -> Grammar[None]:
    """An object whose opening brace was read. Nothing after its end is read."""
    if depth >= MAX_DEPTH:
        raise Malformed
    emit("{")
    character = yield from skip_space()
    while character != "}":
        if character != '"':
            raise Malformed
        yield from json_string(emit)
        yield from expect(":", (yield from skip_space()))
        emit(": ")
        character = yield from json_value((yield from skip_space()), emit, depth + 1)
        if character == ",":
            emit(", ")
            character = yield from skip_space()
            if character == "}":
                raise Malformed
        elif character != "}":
            raise Malformed
    emit("}")


def _array(emit: Emit, depth: int) -> Grammar[None]:
    if depth >= MAX_DEPTH:
        raise Malformed
    emit("[")
    character = yield from skip_space()
    while character != "]":
        character = yield from json_value(character, emit, depth + 1)
        if character == ",":
            emit(", ")
            character = yield from skip_space()
            if character == "]":
                raise Malformed
        elif character != "]":
            raise Malformed
    emit("]")


def json_string(emit: Emit) -> Grammar[None]:
    """A string whose opening quote was read. Control characters are passed on as escapes: models
    write them as they are."""
    emit('"')
    while (character := (yield)) != '"':
        if character == "\\":
            yield from _escape(emit)
        elif character and character < " ":
            emit(json.dumps(character)[1:-1])
        elif character:
            emit(character)
        else:
            raise Malformed
    emit('"')


def _escape(emit: Emit) -> Grammar[None]:
    kind = yield
    if kind == "u":
        digits = ""
        for _ in range(4):
            digit = yield
            if digit not in _HEX:
                raise Malformed
            digits += digit
        emit("\\u" + digits)
    elif kind in _ESCAPED:
        emit("\\" + kind)
    else:
        raise Malformed


def _literal(first: str, emit: Emit) -> Grammar[None]:
    word = {"t": "true", "f": "false", "n": "null"}[first]
    yield from expect(word, first)
    emit(word)


def _number(first: str, emit: Emit) -> Grammar[str]:
    digits, character = "", first
    while character and character in "+-.0123456789eE":
        digits += character
        if len(digits) > MAX_BUFFERED_CHARS:
            raise Malformed
        character = yield
    if not _NUMBER.fullmatch(digits):
        raise Malformed
    emit(digits)
    return character if not character.isspace() else (yield from skip_space())


class TextBuffer:
    """Text that is kept until it is known what it means; Malformed when it grows too long."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._num_chars = 0

    def add(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > MAX_BUFFERED_CHARS:
            raise Malformed
        self._pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def string(self) -> str:
        """The value of a JSON string; Malformed for half characters, which are no text."""
        value = str(json.loads(self.text))
        if not is_text(value):
            raise Malformed
        return value


def is_text(value: str) -> bool:
    """Whether a string is valid Unicode: an escape may stand for half a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
