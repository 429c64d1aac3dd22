"""Calls as Python writes them, in the marks of several models.

pythonic    [name(key="value"), …]                          Gemma 3, Llama 4
            or such a list in a fence of kind `tool_code`
lfm2        <|tool_call_start|>[name(key="value")]<|tool_call_end|>     LFM2, LFM2.5
olmo3       <function_calls>\nname(key="value")\n</function_calls>    Olmo 3

In a fence or between marks calls may also stand on lines, and other models' JSON. Without them a
list at the beginning of an answer is one of calls only if it calls tools that were offered.
"""

from __future__ import annotations

from functools import partial

from ferryman.text.tool_calls.call_object import FENCE as ANY_FENCE
from ferryman.text.tool_calls.call_object import Names, calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Grammar,
    Malformed,
    attempt,
    content,
    expect,
    marked_text,
    replayed,
    skip_space,
    spaced,
)
from ferryman.text.tool_calls.python.call_text import CallText
from ferryman.text.tool_calls.value_types import Parameters

FENCE = "```tool_code"
LFM_BEGIN, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"


def pythonic(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Calls when the text begins with them; otherwise content."""
    following = yield from _bare_lists(sink, parameters.keys())
    if following is None:
        yield from content(sink)
    elif following.endswith(FENCE[0]):
        yield from attempt(sink, following, _fenced(sink))
        yield from content(sink)
    else:
        yield from replayed(following, content(sink))


def lfm2(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between marks; or calls when the text begins with them."""
    return _marked_calls(sink, parameters, LFM_BEGIN, LFM_END)


def olmo3(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between marks; or calls when the text begins with them."""
    return _marked_calls(sink, parameters, OLMO_BEGIN, OLMO_END)


def _marked_calls(sink: DeltaSink, parameters: Parameters, begin: str, end: str) -> Grammar[None]:
    following = yield from _bare_lists(sink, parameters.keys())
    yield from marked_text(sink, {begin: partial(_between_marks, sink)}, (end,), following)


def _bare_lists(sink: DeltaSink, names: Names) -> Grammar[str | None]:
    """Lists of calls at the beginning of a text. Returns the text behind them that was read; None
    where that was content."""
    space, first = yield from spaced()
    while first == "[":
        outcome = yield from attempt(sink, space + first, _listed(sink, names))
        if outcome is None:
            return None
        space, first = outcome
    return space + first


def _listed(sink: DeltaSink, names: Names) -> Grammar[tuple[str, str]]:
    """A list whose bracket was read. Returns what follows: white space, and a character."""
    text = CallText(sink, "[")
    yield from text.read()
    _pass_on(sink, text.values(), names)
    return ("", "") if text.is_over else (yield from spaced())


def _fenced(sink: DeltaSink) -> Grammar[None]:
    """Lists, or calls on lines, up to the end of the fence. The mark names them calls."""
    yield from expect(FENCE[1:])
    first = yield from _calls_before(sink, (yield from skip_space()), FENCE[0])
    if first:
        yield from expect(ANY_FENCE, first)


def _between_marks(sink: DeltaSink) -> Grammar[str]:
    """Lists, or calls on lines, up to a mark; or JSON, as some histories have it. Returns the first
    character of what follows."""
    first = yield from skip_space()
    if first == "{":
        return (yield from calls(sink, first))
    if first != "[":
        return (yield from _calls_before(sink, first, "<"))
    second = yield from skip_space()
    if not second:
        raise Malformed
    if second == "{":
        return (yield from calls(sink, second))
    return (yield from _calls_before(sink, first, "<", second))


def _calls_before(sink: DeltaSink, first: str, end: str, second: str = "") -> Grammar[str]:
    """Calls of which the first begins with these characters. All of them are read before the first
    is passed on. Returns the character `end`, nothing where the text ends."""
    read_calls = list[tuple[str, str]]()
    while first and first != end:
        text = CallText(sink, first)
        yield from replayed(second, text.read())
        read_calls += text.values()
        first, second = "" if text.is_over else (yield from skip_space()), ""
        first = first if first not in (",", ";") else (yield from skip_space())
    _pass_on(sink, read_calls, None)
    return first


def _pass_on(sink: DeltaSink, calls: list[tuple[str, str]], names: Names | None) -> None:
    """Passes calls on. Raises Malformed if there is none, or one of a tool without a name here."""
    if not calls or (names is not None and any(name not in names for name, _ in calls)):
        raise Malformed
    for name, arguments in calls:
        sink.begin_call(name)
        sink.arguments(arguments)
