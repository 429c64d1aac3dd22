"""Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS: tags for the call and for each argument.

<tool_call><function=name><parameter=key>value</parameter></function></tool_call>

Seed-OSS has `<seed:tool_call>` around a call, and no line breaks around a value. A value is text;
the schema of the tool decides whether it means something else. Models forget any of these tags at
times, and write JSON between the outer ones, as other models of Qwen do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from ferryman.text.tool_calls.call_object import MAX_NAME_CHARS, calls
from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import (
    Emit,
    Grammar,
    Malformed,
    expect,
    marked_text,
    skip_space,
    text_until,
    word_until,
)
from ferryman.text.tool_calls.json_text import TextBuffer, json_object
from ferryman.text.tool_calls.tags.arguments import (
    ReadValue,
    TaggedArguments,
    ValueEnd,
)
from ferryman.text.tool_calls.tags.value_text import (
    TextBetweenLines,
    ValueEnds,
    lined_value_text,
    value_text,
)
from ferryman.text.tool_calls.value_types import Parameters

BEGIN, END = "<tool_call>", "</tool_call>"
SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_ENDS_OF_NAMES = (">", "\n")  # some forget the first: no name has a line break


@dataclass(frozen=True, slots=True)
class FunctionTags:
    """The outer tags of a model's calls, and a reader of the values that it writes: it gets their
    ends."""

    begin: str
    end: str
    read: Callable[[DeltaSink, ValueEnds, Emit], Grammar[ValueEnd]]

    @property
    def value_ends(self) -> ValueEnds:
        """A value ends at its own tag; where that is missing, at one that begins a line."""
        ends = (PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END, "\n" + self.end)
        return dict.fromkeys(ends, ())

    @property
    def all(self) -> tuple[str, ...]:
        """All tags that may follow one another."""
        return (PARAMETER, PARAMETER_END, FUNCTION_END, self.end, self.begin, FUNCTION)


def qwen3_coder(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    return _tagged_calls(sink, parameters, QWEN)


def seed_oss(sink: DeltaSink, parameters: Parameters) -> Grammar[None]:
    """Text, and calls between tags."""
    return _tagged_calls(sink, parameters, _SEED)


def _tagged_calls(sink: DeltaSink, parameters: Parameters, tags: FunctionTags) -> Grammar[None]:
    openings = {
        tags.begin: partial(marked_call, sink, parameters, tags),
        FUNCTION: partial(tagged_call, sink, parameters, tags=tags),
    }
    yield from marked_text(sink, openings, (tags.end,))


def _between_lines(sink: DeltaSink, ends: ValueEnds, emit: Emit) -> Grammar[ValueEnd]:
    text = TextBetweenLines(emit)
    end = yield from value_text(sink, ends, None, text.add)
    text.end(is_line_over=end.is_line_over)
    return end


def _as_it_is(sink: DeltaSink, ends: ValueEnds, emit: Emit) -> Grammar[ValueEnd]:
    return lined_value_text(sink, ends, None, emit)


QWEN = FunctionTags(BEGIN, END, _between_lines)
_SEED = FunctionTags(SEED_BEGIN, SEED_END, _as_it_is)


def marked_call(sink: DeltaSink, parameters: Parameters, tags: FunctionTags = QWEN) -> Grammar[str]:
    """The call behind the outer tag, in tags or in JSON. Returns what follows the call."""
    first = yield from skip_space()
    if first != FUNCTION[0]:
        return (yield from calls(sink, first))
    yield from expect(FUNCTION, first)
    return (yield from tagged_call(sink, parameters, tags=tags))


def tagged_call(
    sink: DeltaSink,
    parameters: Parameters,
    names: Collection[str] | None = None,
    tags: FunctionTags = QWEN,
) -> Grammar[str]:
    """A call behind `<function=`; of any name where `names` is None. It begins when another tag
    or an object follows. Returns what follows it: a character that is no space, or a tag."""
    name, _ = yield from word_until(_ENDS_OF_NAMES, MAX_NAME_CHARS)
    name = name.strip().strip("\"'")
    if not name or FUNCTION[0] in name or (names is not None and name not in names):
        raise Malformed
    first = yield from skip_space()
    if first == "{":
        sink.begin_call(name)
        yield from json_object(sink.arguments)
        return (yield from _behind_object(tags))
    arguments = TaggedArguments(sink, parameters.get(name, {}), tags.all)
    if not first and not sink.is_cut:
        sink.begin_call(name)
        return arguments.at_end_of_text()
    _, tag = yield from word_until(tags.all, 0, first)
    sink.begin_call(name)
    return (yield from _arguments(arguments, tag, partial(tags.read, sink, tags.value_ends), tags))


def _behind_object(tags: FunctionTags) -> Grammar[str]:
    """The text behind an object; the tag that ends the function is passed over."""
    _, tag = yield from word_until((FUNCTION_END, tags.end), 0, (yield from skip_space()))
    return tag if tag == tags.end else (yield from skip_space())


def _arguments(
    arguments: TaggedArguments, tag: str, read: ReadValue, tags: FunctionTags
) -> Grammar[str]:
    """All of them, from the first tag on. Returns as `tagged_call` does."""
    while tag in (PARAMETER, PARAMETER_END):
        if tag == PARAMETER:
            tag = yield from _parameter(arguments, read)
        if tag == PARAMETER_END:
            tag = yield from arguments.beside(tags.all)
    if not tag:
        return arguments.at_end_of_text()
    arguments.close()
    # Behind a call that another one ends, that one begins.
    return tag if tag in (tags.begin, FUNCTION) else (yield from skip_space())


def _parameter(arguments: TaggedArguments, read: ReadValue) -> Grammar[str]:
    """A name and its value; returns the tag that ended it, empty at the end of the text."""
    key = TextBuffer(MAX_NAME_CHARS)
    if not (yield from text_until(key.add, _ENDS_OF_NAMES)):
        return ""
    name = key.text.strip().strip("\"'")
    return (yield from arguments.argument(name, arguments.types(name), read))
