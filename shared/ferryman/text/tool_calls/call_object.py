"""`{"name": …, "arguments": {…}}`: a call as most formats write it, in any order of its fields.

Such calls come alone, on lines, in a list, or in a fence. Behind a mark of a format any name is
called: the client tells the model that there is no such tool. Without a mark the text is a call
only if it names a tool that was offered, and an answer in JSON is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Emit,
    Grammar,
    Malformed,
    attempt,
    expect,
    skip_space,
    spaced,
)
from ferryman.text.tool_calls.json_text import (
    TextBuffer,
    is_text,
    json_object,
    json_string,
    json_value,
    normalised,
)

Names = Collection[str]
TOOL_NAME = re.compile(r"[\w.:/-]+")
MAX_NAME_CHARS = 256  # of a tool, or of one of its parameters
FENCE = "```"
MAX_FENCE_CHARS = 16  # of its language
_ARGUMENTS = ("arguments", "parameters")
_FUNCTION = "function"
# A call without a mark begins with one of these; another object is not held back for its name.
_FIRST_KEYS = ("name", *_ARGUMENTS, _FUNCTION, "type", "id")
_SURPLUS = "}]"


class _CallFields:
    """A call of which name and arguments may come in either order. It begins with the second of
    the two, so that half a call is none."""

    def __init__(self, sink: DeltaSink, names: Names | None) -> None:
        """Any name is called where `names` is None."""
        self._sink, self._names, self._early = sink, names, TextBuffer()
        self._name, self._has_arguments, self._num_keys = "", False, 0
        self._is_nested = False

    @property
    def is_whole(self) -> bool:
        return bool(self._name) and self._has_arguments

    def check_key(self, key: str) -> None:
        """Raises Malformed where what has no mark does not begin as a call."""
        self._num_keys += 1
        if self._names is not None and self._num_keys == 1 and key not in _FIRST_KEYS:
            raise Malformed

    def enter_function(self) -> None:
        """An object within has the fields. Malformed for one within that."""
        if self._is_nested:
            raise Malformed
        self._is_nested = True

    def named(self, name: str) -> None:
        if self._name or not name or (self._names is not None and name not in self._names):
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


def call_object(sink: DeltaSink, names: Names | None = None) -> Grammar[str]:
    """An object whose opening brace was read, and the first character after it that is no space.

    Fields that are neither name nor arguments are passed over. The arguments are an object, null,
    or a string that holds an object or nothing. The brace at the end may be missing.
    """
    call = _CallFields(sink, names)
    character = yield from _fields(call, (yield from skip_space()))
    if character != "}":
        if not call.is_whole:
            raise Malformed
        return character
    call.close()
    return (yield from skip_space())


def _fields(call: _CallFields, character: str) -> Grammar[str]:
    """The fields of an object, and the first character that belongs to none."""
    while character in ('"', "'"):
        key = TextBuffer()
        yield from json_string(key.add, character)
        call.check_key(key.string)
        yield from expect(":", (yield from skip_space()))
        character = yield from _field(call, key.string, (yield from skip_space()))
        if character != ",":
            break
        character = yield from skip_space()
    return character


def _field(call: _CallFields, key: str, first: str) -> Grammar[str]:
    is_string = first in ('"', "'")
    if key in ("name", _FUNCTION) and is_string:
        call.named((yield from _string(first)))
    elif key == _FUNCTION and first == "{":
        call.enter_function()
        yield from expect("}", (yield from _fields(call, (yield from skip_space()))))
    elif key in _ARGUMENTS and first == "{":
        yield from json_object(call.take_arguments())
    elif key in _ARGUMENTS and is_string:
        call.take_arguments()(_object_text((yield from _string(first))))
    elif key in _ARGUMENTS and first in ("n", "N"):
        yield from expect("null" if first == "n" else "None", first)
        call.take_arguments()("{}")
    elif key in (*_ARGUMENTS, "name"):
        raise Malformed
    else:
        return (yield from json_value(first, TextBuffer().add))
    return (yield from skip_space())


def _string(quote: str) -> Grammar[str]:
    written = TextBuffer()
    yield from json_string(written.add, quote)
    return written.string


def _object_text(text: str) -> str:
    """The object that a string holds; nothing is no arguments."""
    if not text.strip():
        return "{}"
    try:
        value = json.loads(normalised(text))
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    raw = json.dumps(value, ensure_ascii=False)
    return raw if is_text(raw) else json.dumps(value)


def call_list(sink: DeltaSink, names: Names | None = None) -> Grammar[None]:
    """A list of calls whose opening bracket was read. Nothing after its end is read."""
    character = yield from skip_space()
    while character != "]":
        if character != "{":
            raise Malformed
        character = yield from call_object(sink, names)
        if character == ",":
            character = yield from skip_space()
        elif character != "]":
            raise Malformed


def calls(
    sink: DeltaSink, first: str, names: Names | None = None, *, is_fenced: bool = False
) -> Grammar[str]:
    """Calls that begin with the character `first`: one, several, or a list, perhaps in a fence.
    Returns the first character behind them that is no space. Malformed if there is no call."""
    if first == FENCE[0] and not is_fenced:
        is_fenced = True
        yield from expect(FENCE, first)
        first = yield from fence_language()
    if first == "[":
        first = yield from skip_space()
    if first != "{":
        raise Malformed
    character = yield from call_object(sink, names)
    return (yield from _more_calls(sink, character, names, is_fenced=is_fenced))


def fence_language() -> Grammar[str]:
    """The first character within a fence; the word behind its mark is passed over."""
    for _ in range(MAX_FENCE_CHARS):
        character = yield
        if not (character.isalpha() or character == "_"):
            return character if not character.isspace() else (yield from skip_space())
    raise Malformed


def _more_calls(
    sink: DeltaSink, character: str, names: Names | None, *, is_fenced: bool
) -> Grammar[str]:
    """The rest behind a call: other calls on lines or behind commas, and marks that end them."""
    while True:
        if character and character in _SURPLUS:
            character = yield from skip_space()
        elif character and character in ",;":
            space, following = yield from spaced()
            if following != "{":
                (sink.content if following else sink.beginning)(character + space)
                return following
            character = following
        elif character == "{":
            outcome = yield from attempt(sink, "{", call_object(sink, names))
            if outcome is None:
                return (yield)
            character = outcome
        elif character == FENCE[0] and is_fenced:
            is_fenced = False
            outcome = yield from attempt(sink, FENCE[0], end_of_fence())
            if outcome is None:
                return (yield)
            character = outcome
        else:
            return character


def end_of_fence() -> Grammar[str]:
    """The rest of the mark that ends a fence. Returns the first character behind it that is no
    space."""
    yield from expect(FENCE, FENCE[0])
    return (yield from skip_space())
