"""Hermes, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

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

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls between marks; several calls may share one pair of marks."""
    while (yield from text_until(sink.content, (BEGIN,))):
        yield from attempt(sink, BEGIN, _calls(sink))


def _calls(sink: DeltaSink) -> Grammar[None]:
    character = yield from skip_space()
    if character != "{":
        raise Malformed
    while character == "{":
        yield from call_object(sink)
        character = yield from skip_space()
    # A model may end its turn without the last mark.
    if character:
        yield from expect(END, character)
