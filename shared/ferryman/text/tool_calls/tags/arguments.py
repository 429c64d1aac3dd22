"""The JSON of a call whose arguments come as text between tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Emit, Grammar, text_until
from ferryman.text.tool_calls.json_text import TextBuffer, in_quotes
from ferryman.text.tool_calls.value_types import MAX_VALUE_CHARS, STRING, typed_value


class ValueEnd(NamedTuple):
    """The end of a value: whether a tag ended it, and the text behind it that was read: a tag, or
    nothing. Without a tag the text of the answer is over. A tag may begin with a line's end."""

    is_whole: bool
    following: str
    is_line_over: bool = False


ReadValue = Callable[[Emit], Grammar[ValueEnd]]


class TaggedArguments:
    """The arguments of one call as they come. Text is passed on while it is read, any other value
    when it is whole. Text beside the tags in `tags` is no part of the call: it is content behind
    it."""

    def __init__(
        self, sink: DeltaSink, types: Mapping[str, Sequence[str]], tags: Sequence[str]
    ) -> None:
        self._sink, self._types, self._tags = sink, types, tags
        self._before, self._stray = "{", TextBuffer()

    def types(self, name: str, others: Sequence[str] = STRING) -> Sequence[str]:
        """The types that a parameter's value may have; those of `others` where the schema does not
        know it."""
        return self._types.get(name, others)

    def argument(self, name: str, types: Sequence[str], read: ReadValue) -> Grammar[str]:
        """A parameter, whose value `read` passes on. Returns what follows, empty at the end of the
        text."""
        self._sink.arguments(f"{self._before}{json.dumps(name, ensure_ascii=False)}: ")
        self._before = ", "
        if tuple(types) == STRING:
            return (yield from self._string(read))
        return (yield from self._typed(types, read))

    def beside(self, tags: Sequence[str]) -> Grammar[str]:
        """Text up to one of these tags, which is returned; empty at the end of the text."""
        return (yield from text_until(self._stray.add, tuple(tags)))

    def close(self) -> None:
        """Ends the call."""
        self._sink.arguments("{}" if self._before == "{" else "}")
        stray = self._stray.text.strip()
        if stray and not any(tag.startswith(stray) for tag in self._tags):
            self._sink.aside(stray)

    def at_end_of_text(self) -> str:
        """A call whose tags are missing is whole if the model ended there by itself."""
        if not self._sink.is_cut:
            self.close()
        return ""

    def _string(self, read: ReadValue) -> Grammar[str]:
        self._sink.arguments('"')
        is_whole, following, _ = yield from read(self._quoted)
        if is_whole or not self._sink.is_cut:
            self._sink.arguments('"')
        return following

    def _quoted(self, text: str) -> None:
        self._sink.arguments("".join(map(in_quotes, text)))

    def _typed(self, types: Sequence[str], read: ReadValue) -> Grammar[str]:
        buffer = TextBuffer(MAX_VALUE_CHARS)
        is_whole, following, _ = yield from read(buffer.add)
        if is_whole or not self._sink.is_cut:
            self._sink.arguments(typed_value(buffer.text, types))
        return following


def unless_cut(sink: DeltaSink, add: Emit) -> Emit:
    """Takes the beginning of a tag with which the text ends. In one that was cut it is no part of
    the value."""

    def take(held: str) -> None:
        if not sink.is_cut:
            add(held)

    return take
