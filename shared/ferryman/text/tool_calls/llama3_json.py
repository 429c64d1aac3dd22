"""Llama 3.1 to 3.3: the whole answer is `{"name": …, "parameters": {…}}`, several with `;` between
them, perhaps behind `<|python_tag|>`. In the middle of a text there is no call."""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import call_object
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    expect,
    skip_space,
    text_until,
)

BEGIN = "<|python_tag|>"
SPECIAL = frozenset({BEGIN})


def llama3_json(sink: DeltaSink) -> Grammar[None]:
    """Calls when the text begins with one; otherwise text, up to a mark."""
    space = ""
    while (first := (yield)).isspace():
        space += first
    if first == "{":
        yield from attempt(sink, space + first, _calls(sink))
    elif first == "<":
        is_mark = yield from attempt(sink, space + first, _mark())
        if is_mark:
            yield from attempt(sink, BEGIN, _first_call(sink))
    else:
        sink.content(space + first)
        if not first:
            return
    while (yield from text_until(sink.content, (BEGIN,))):
        yield from attempt(sink, BEGIN, _first_call(sink))


def _mark() -> Grammar[bool]:
    yield from expect(BEGIN[1:])
    return True


def _first_call(sink: DeltaSink) -> Grammar[None]:
    yield from expect("{", (yield from skip_space()))
    yield from _calls(sink)


def _calls(sink: DeltaSink) -> Grammar[None]:
    yield from call_object(sink)
    while (character := (yield from skip_space())) == ";":
        character = yield from skip_space()
        if not character:
            return
        yield from expect("{", character)
        yield from call_object(sink)
    if character:
        raise Malformed
