"""Kimi K2 and Kimi Linear: a section of calls, each with an id that has the tool's name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}
<|tool_call_end|>…<|tool_calls_section_end|>

The number counts the calls of a conversation. A model that finds other ids in its history writes
others, and some leave the section's marks out.
"""

from __future__ import annotations

import re
from functools import partial

from ferryman.text.tool_calls.call_object import Names
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    marked_text,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.value_types import Parameters

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_SECTIONS = (SECTION, "<|tool_call_section_begin|>")
_ENDS = (CALL_END, SECTION_END, "<|tool_call_section_end|>")
_BEHIND = (*_ENDS, CALL)
SPECIAL = frozenset({*_SECTIONS, *_ENDS, CALL, ARGUMENTS})
MAX_ID_CHARS = 512
_ID = re.compile(r"(?:functions\.)?([\w./:-]+):(\d{1,9})")
_UNNUMBERED = re.compile(r"functions\.([\w./:-]+)")
_PREFIX = re.compile(r"\Afunctions[._]?")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
_NUMBER = re.compile(r"[:_]?(\d{0,9})")


def kimi_k2(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls; the marks around all calls are passed over."""
    names = parameters.keys()
    openings = dict.fromkeys(_SECTIONS, partial(_section, sink, names))
    openings[CALL] = partial(_call, sink, names)
    yield from marked_text(sink, openings, _ENDS)


def _section(sink: DeltaSink, names: Names) -> Grammar[str]:
    """The first call of a section, whose mark may be missing. Returns what follows it."""
    head, mark = yield from _head((CALL, ARGUMENTS, *_ENDS))
    if mark == CALL and not head:
        return (yield from _call(sink, names))
    if mark != ARGUMENTS:
        raise Malformed
    return (yield from _arguments(sink, names, head, (yield from skip_space())))


def _call(sink: DeltaSink, names: Names) -> Grammar[str]:
    """A call whose mark was read. Returns what follows it: a character that is no space, or a
    mark."""
    head, mark = yield from _head((ARGUMENTS, "{", *_BEHIND))
    first = (yield from skip_space()) if mark == ARGUMENTS else mark
    return (yield from _arguments(sink, names, head, first))


def _head(marks: tuple[str, ...]) -> Grammar[tuple[str, str]]:
    """The id of a call, and the mark behind it; none at the end of the text."""
    head = TextBuffer(MAX_ID_CHARS)
    mark = yield from text_until(head.add, marks)
    return head.text.strip(), mark


def _arguments(sink: DeltaSink, names: Names, head: str, first: str) -> Grammar[str]:
    """A call with this id and arguments that begin with `first`: an object, or a mark instead.
    Returns what follows."""
    name, number = _named(head, names)
    if first == "{":
        sink.begin_call(name, number)
        yield from json_object(sink.arguments)
        return (yield from skip_space())
    if not first and (sink.is_cut or name not in names):
        raise Malformed
    mark = first
    if first and first not in _BEHIND:
        _, mark = yield from word_until(_BEHIND, 0, first)
    sink.begin_call(name, number)
    sink.arguments("{}")
    return mark


def _named(call_id: str, names: Names) -> tuple[str, int | None]:
    """The tool's name in an id, and the number if there is one. Raises Malformed."""
    if call_id in names:
        return call_id, None
    if match := _ID.fullmatch(call_id):
        return match[1], int(match[2])
    for text in (_PREFIX.sub("", call_id), call_id):
        for name in sorted(names, key=len, reverse=True):
            number = _NUMBER.fullmatch(text, len(name))
            if number and plain(text[: len(name)]) == plain(name):
                return name, int(number[1]) if number[1] else None
    match = _UNNUMBERED.fullmatch(call_id)
    if match is None:
        raise Malformed
    return match[1], None


def plain(name: str) -> str:
    """An id or a name of letters, digits, dashes and underscores alone, as some clients take it."""
    return _NOT_PLAIN.sub("_", name)
