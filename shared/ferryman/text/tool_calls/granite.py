"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}]`, and the word of it for models whose
tokenizer has no such token."""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import marked_call_list
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, text_until

MARKS = ("<|tool_call|>", "<tool_call>")
SPECIAL = frozenset({"<|tool_call|>"})


def granite(sink: DeltaSink) -> Grammar[None]:
    """Text, and lists of calls behind marks."""
    while mark := (yield from text_until(sink.content, MARKS)):
        yield from marked_call_list(sink, mark)
