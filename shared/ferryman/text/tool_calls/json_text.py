"""JSON (RFC 8259) one character at a time: each value is passed on as it is being read.

Models also write what is nearly JSON: a comma before the end, a string in single quotes, Python's
words, a backslash that escapes nothing, a line break within a string. It is passed on as the JSON
that it means, so what is passed on is always the beginning of a JSON value.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

from ferryman.text.tool_calls.grammar import Emit, Grammar, Malformed, expect, skip_space

MAX_DEPTH = 64
MAX_BUFFERED_CHARS = 1 << 16
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
CLOSERS = ("}", ")", "]")
_QUOTES = ('"', "'")
# By their first letters: JSON's words, and Python's for the same.
_WORDS = {
    **{word[0]: (word, word) for word in ("true", "false", "null")},
    **{"T": ("True", "true"), "F": ("False", "false"), "N": ("None", "null")},
}


def json_value(first: str, emit: Emit, depth: int = 0) -> Grammar[str]:
    """A value that begins with `first`; returns the first character after it that is no space.
    Raises Malformed for what is no JSON, and for values nested deeper than 64."""
    if first == "{":
        yield from json_object(emit, depth)
    elif first == "[":
        yield from _array(emit, depth)
    elif first in _QUOTES:
        yield from json_string(emit, first)
    elif first in _WORDS:
        word, meaning = _WORDS[first]
        yield from expect(word, first)
        emit(meaning)
    else:
        return (yield from _number(first, emit))
    return (yield from skip_space())


def json_object(emit: Emit, depth: int = 0) -> Grammar[None]:
    """An object whose opening brace was read. Nothing after its end is read."""
    if depth >= MAX_DEPTH:
        raise Malformed
    emit("{")
    character, comma = (yield from skip_space()), ""
    while character != "}":
        if character not in _QUOTES:
            raise Malformed
        emit(comma)
        yield from json_string(emit, character)
        yield from expect(":", (yield from skip_space()))
        emit(": ")
        character = yield from json_value((yield from skip_space()), emit, depth + 1)
        character, comma = (yield from _behind_item(character, "}")), ", "
    emit("}")


def _array(emit: Emit, depth: int) -> Grammar[None]:
    if depth >= MAX_DEPTH:
        raise Malformed
    emit("[")
    character, comma = (yield from skip_space()), ""
    while character != "]":
        if not character:
            raise Malformed
        emit(comma)
        character = yield from json_value(character, emit, depth + 1)
        character, comma = (yield from _behind_item(character, "]")), ", "
    emit("]")


def _behind_item(character: str, end: str) -> Grammar[str]:
    """The end, or the character that begins the next item. A comma may come before the end."""
    if character == ",":
        return (yield from skip_space())
    if character != end:
        raise Malformed
    return end


def json_string(emit: Emit, quote: str = '"') -> Grammar[None]:
    """A string whose opening quote was read. Control characters are passed on as escapes: models
    write them as they are."""
    emit('"')
    character = yield
    while character != quote:
        if not character:
            raise Malformed
        if character == "\\":
            character = yield from _escape(emit)
            continue
        emit(in_quotes(character))
        character = yield
    emit('"')


def in_quotes(character: str) -> str:
    """A character as it stands in a JSON string."""
    if character in '"\\' or character < " ":
        return json.dumps(character)[1:-1]
    return character


def _escape(emit: Emit) -> Grammar[str]:
    """An escape, and the character after it. A backslash that escapes nothing is one."""
    kind = yield
    if not kind:
        raise Malformed
    if kind == "u":
        return (yield from _code_point(emit))
    if kind in _ESCAPED:
        emit("\\" + kind)
    elif kind == "'":
        emit(kind)
    else:
        emit("\\\\" + in_quotes(kind))
    return (yield)


def _code_point(emit: Emit) -> Grammar[str]:
    digits = ""
    while (digit := (yield)) in _HEX and len(digits) < 4:
        digits += digit
    if not digit and len(digits) < 4:
        raise Malformed  # it may have gone on
    emit(("\\u" if len(digits) == 4 else "\\\\u") + digits)
    return digit


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


def normalised(text: str, max_chars: int = MAX_BUFFERED_CHARS) -> str:
    """The JSON of a whole text that is one value, nearly JSON or JSON. Raises Malformed."""
    buffer = TextBuffer(max_chars)
    reader = _whole(buffer)
    next(reader)
    with suppress(StopIteration):
        for character in (*text, ""):
            reader.send(character)
    return buffer.text


def _whole(buffer: TextBuffer) -> Grammar[None]:
    if (yield from json_value((yield from skip_space()), buffer.add)):
        raise Malformed


class TextBuffer:
    """Text that is kept until it is known what it means; Malformed when it grows too long."""

    def __init__(self, max_chars: int = MAX_BUFFERED_CHARS) -> None:
        self._pieces: list[str] = []
        self._num_chars, self._max_chars = 0, max_chars

    def add(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > self._max_chars:
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


class OpenText:
    """A JSON string that is passed on as it comes, but for the brackets at its end: if the call
    ends there, they are those of the `depth` objects around it and of the call."""

    def __init__(self, emit: Emit, depth: int) -> None:
        self._emit, self._max_held, self._held = emit, depth + 1, ""

    def add(self, text: str) -> None:
        if text in CLOSERS:
            self._held += text
            text = self._held[: -self._max_held]
            self._held = self._held[-self._max_held :]
        else:
            text, self._held = self._held + text, ""
        if text:
            self._emit(text)

    def leave_open(self) -> None:
        """Ends it without what is held back."""
        self._emit('"')


def is_text(value: str) -> bool:
    """Whether a string is valid Unicode: an escape may stand for half a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
