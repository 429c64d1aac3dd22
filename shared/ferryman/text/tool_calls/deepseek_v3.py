"""DeepSeek V3 and V3.1: calls between marks that are tokens.

V3     <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{…}\\n```<｜tool▁call▁end｜>
V3.1   <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    attempt,
    expect,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import json_object

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SPECIAL = frozenset({CALLS, CALLS_END, CALL, CALL_END, SEPARATOR})
MAX_NAME_CHARS = 256


def deepseek_v3(sink: DeltaSink) -> Grammar[None]:
    """Text, and calls; the mark before and behind all calls is passed over."""
    while mark := (yield from text_until(sink.content, (CALLS, CALL, CALLS_END))):
        if mark == CALL:
            yield from attempt(sink, CALL, _call(sink))


def _call(sink: DeltaSink) -> Grammar[None]:
    kind, _ = yield from word_until((SEPARATOR,), MAX_NAME_CHARS)
    first, fence = "", ""
    if kind.strip() == "function":
        first = yield from skip_space()
    if first in ("", "{"):
        name = kind
        if not first:
            first = yield from skip_space()
    else:
        rest, fence = yield from word_until(("```json",), MAX_NAME_CHARS)
        name, first = first + rest, (yield from skip_space())
    yield from expect("{", first)
    sink.begin_call(name.strip())
    yield from json_object(sink.arguments)
    character = yield from skip_space()
    if fence and character == "`":
        yield from expect("```", character)
        character = yield from skip_space()
    if character:
        yield from expect(CALL_END, character)
