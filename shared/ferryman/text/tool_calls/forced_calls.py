"""Calls that a request demands. Their grammar has nothing but them, and no marks.

{…}                                        the arguments of a tool that is named
[{"name": …, "parameters": {…}}, …]        calls of any tools

A model held to the grammar writes nothing else, but its answer may be cut anywhere. The form around
calls is no text for a reader then: names and brackets that came before the cut are left out.
"""

from __future__ import annotations

from ferryman.text.tool_calls.call_object import call_list
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    content,
    expect,
    skip_space,
)
from ferryman.text.tool_calls.json_text import json_object


def named_call(sink: DeltaSink, name: str) -> Grammar[None]:
    """The arguments of the tool `name`; what follows them is content."""
    yield from attempt(sink, "", _unless_cut(_named_arguments(sink, name)))
    yield from content(sink)


def _named_arguments(sink: DeltaSink, name: str) -> Grammar[None]:
    yield from expect("{", (yield from skip_space()))
    sink.begin_call(name)
    yield from json_object(sink.arguments)


def required_calls(sink: DeltaSink) -> Grammar[None]:
    """A list of calls; what follows it is content."""
    yield from attempt(sink, "", _unless_cut(_required_list(sink)))
    yield from content(sink)


def _required_list(sink: DeltaSink) -> Grammar[None]:
    yield from expect("[", (yield from skip_space()))
    yield from call_list(sink)


def _unless_cut(inner: Grammar[None]) -> Grammar[None]:
    """A grammar that ends well where the text does, whatever it still expects there."""
    character = ""
    try:
        next(inner)
        while True:
            character = yield
            inner.send(character)
    except StopIteration:
        return
    except Malformed:
        if character:
            raise
