"""GLM 4.5 to 5: a name, then tags for the name and the value of each argument.

<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

GLM 4.5 and 4.6 break the line between these. The schema of the tool decides whether a value means
something else than its text. Models forget or repeat any of these tags at times.
"""

from __future__ import annotations

from functools import partial

from ferryman.text.tool_calls.call_object import MAX_NAME_CHARS, TOOL_NAME, calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    marked_text,
    skip_space,
    text_until,
)
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.tags.arguments import TaggedArguments
from ferryman.text.tool_calls.tags.value_text import tag_behind, value_text
from ferryman.text.tool_calls.value_types import Parameters

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
SPECIAL = frozenset({BEGIN, END, KEY, KEY_END, VALUE, VALUE_END})
_TAGS = (KEY, KEY_END, VALUE, VALUE_END, END, BEGIN)
_VALUE_ENDS = {
    VALUE_END: (KEY, END, BEGIN, VALUE_END),
    "\n" + KEY: (),
    "\n" + END: (BEGIN,),
    END: (BEGIN,),
}


def glm45(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    calls_behind = _MarkedCalls(sink, parameters)
    yield from marked_text(sink, {BEGIN: calls_behind.read}, (END,))


class _MarkedCalls:
    """The calls behind an outer tag."""

    def __init__(self, sink: DeltaSink, parameters: Parameters) -> None:
        self._sink, self._parameters = sink, parameters

    def read(self) -> Grammar[str]:
        """A call, and those that begin before it has ended. Returns what follows: a character that
        is no space, or a tag."""
        text, mark = yield from _head()
        while mark == BEGIN:
            # It may stand where the first tag of an argument belongs.
            key, mark = yield from _head()
            if mark == KEY_END:
                return (yield from self._arguments(text, key))
            self._begun(text).close()
            text = key
        if mark == KEY:
            return (yield from self._arguments(text, ""))
        if mark == KEY_END:
            return (yield from self._arguments(*self._parted(text)))
        if mark == "{":
            return (yield from self._object(text))
        return (yield from self._without_arguments(text, mark))

    def _begun(self, name: str) -> TaggedArguments:
        if not TOOL_NAME.fullmatch(name):
            raise Malformed
        self._sink.begin_call(name)
        return TaggedArguments(self._sink, self._parameters.get(name, {}), _TAGS)

    def _parted(self, text: str) -> tuple[str, str]:
        """The names of a tool and of a parameter that no tag parts."""
        name = max(filter(text.startswith, self._parameters), key=len, default="")
        key = text[len(name) :].strip()
        if not name or not key:
            raise Malformed
        return name, key

    def _object(self, name: str) -> Grammar[str]:
        """JSON: the arguments behind a name, or all of a call."""
        if not name:
            return (yield from calls(self._sink, "{"))
        self._begun(name)
        yield from json_object(self._sink.arguments)
        return (yield from skip_space())

    def _without_arguments(self, name: str, mark: str) -> Grammar[str]:
        is_over = not mark and not self._sink.is_cut and name in self._parameters
        if mark != END and not is_over:
            raise Malformed
        self._begun(name).close()
        return (yield from skip_space()) if mark else ""

    def _arguments(self, name: str, key: str) -> Grammar[str]:
        """The arguments behind the first key; its text was read already if it is not empty."""
        arguments = self._begun(name)
        tag = yield from (self._value(arguments, key) if key else self._pair(arguments))
        while tag not in ("", END, BEGIN):
            tag = yield from (self._pair(arguments) if tag == KEY else arguments.beside(_TAGS))
        if not tag:
            return arguments.at_end_of_text()
        arguments.close()
        return tag if tag == BEGIN else (yield from skip_space())

    def _pair(self, arguments: TaggedArguments) -> Grammar[str]:
        """A key whose tag was read, and its value. Returns the tag that follows, empty at the end
        of the text. A key without a value is none."""
        text, mark = "", KEY
        while mark == KEY:
            text, mark = yield from _text_before(_TAGS)
        if mark == KEY_END:
            return (yield from self._value(arguments, text))
        if mark == VALUE:
            return (yield from self._text(arguments, text, None))
        return mark

    def _value(self, arguments: TaggedArguments, key: str) -> Grammar[str]:
        """The value behind the end of a key, with or without its first tag."""
        behind = KEY_END
        while behind == KEY_END:
            _, behind = yield from tag_behind(_TAGS)
        if behind in ("", KEY, END, BEGIN):
            return behind
        return (yield from self._text(arguments, key, None if behind == VALUE else behind))

    def _text(self, arguments: TaggedArguments, key: str, taken: str | None) -> Grammar[str]:
        read = partial(value_text, self._sink, _VALUE_ENDS, taken)
        return (yield from arguments.argument(key, arguments.types(key), read))


def _head() -> Grammar[tuple[str, str]]:
    """The name behind an outer tag, and the mark behind that; none at the end of the text."""
    return (yield from _text_before((*_TAGS, "{")))


def _text_before(marks: tuple[str, ...]) -> Grammar[tuple[str, str]]:
    text = TextBuffer(MAX_NAME_CHARS)
    mark = yield from text_until(text.add, marks)
    return text.text.strip(), mark
