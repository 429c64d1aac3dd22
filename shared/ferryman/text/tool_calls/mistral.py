"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since version 11 of its tokenizer
`[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import call_list
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    expect,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import json_object

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
SPECIAL = frozenset({BEGIN, CALL_ID, ARGUMENTS})
MAX_NAME_CHARS = 256


def mistral(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls behind marks."""
    while (yield from text_until(sink.content, (BEGIN,))):
        yield from attempt(sink, BEGIN, _calls(sink))


def _calls(sink: DeltaSink) -> Grammar[None]:
    first = yield from skip_space()
    if first == "[":
        yield from call_list(sink)
        return
    if not first or first == "{":
        raise Malformed
    rest, mark = yield from word_until((ARGUMENTS, CALL_ID, "{"), MAX_NAME_CHARS)
    if mark == CALL_ID:
        _, mark = yield from word_until((ARGUMENTS, "{"), MAX_NAME_CHARS)
    if mark == ARGUMENTS:
        yield from expect("{", (yield from skip_space()))
    sink.begin_call((first + rest).strip())
    yield from json_object(sink.arguments)
