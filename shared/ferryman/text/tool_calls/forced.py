"""A call that the request demands: the answer is its JSON, without any marks.

A named tool       {…}, its arguments
any tool           [{"name": …, "parameters": {…}}, …]
"""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import call_list
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, attempt, content, expect, skip_space
from ferryman.text.tool_calls.json_text import json_object


def named_call(sink: DeltaSink, name: str) -> Grammar[None]:
    """The arguments of the tool `name`; what follows them is content."""
    yield from attempt(sink, "", _arguments(sink, name))
    yield from content(sink)


def required_calls(sink: DeltaSink) -> Grammar[None]:
    """A list of calls; what follows it is content."""
    yield from attempt(sink, "", _list(sink))
    yield from content(sink)


def _arguments(sink: DeltaSink, name: str) -> Grammar[None]:
    yield from expect("{", (yield from skip_space()))
    sink.begin_call(name)
    yield from json_object(sink.arguments)


def _list(sink: DeltaSink) -> Grammar[None]:
    yield from expect("[", (yield from skip_space()))
    yield from call_list(sink)
