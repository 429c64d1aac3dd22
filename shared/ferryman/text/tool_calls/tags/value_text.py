"""The text of a value between tags, up to its end.

A value may hold the tags themselves: agents write about tags, and parsers of them. So an end counts
only where something stands behind it that may follow a value, or where the text ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Emit, Grammar, spaced, text_until
from ferryman.text.tool_calls.tags.arguments import ValueEnd, unless_cut

# By each end of a value, the tags that may follow. An end that is a line's beginning always counts.
ValueEnds = Mapping[str, Collection[str]]


def value_text(
    sink: DeltaSink, ends: ValueEnds, taken: str | None, emit: Emit
) -> Grammar[ValueEnd]:
    """Passes a value on, up to one of its ends. The text in `taken` was read already: some
    characters, or the first tag behind a value that has no text, or None."""
    while mark := (yield from text_until(emit, tuple(ends), taken, unless_cut(sink, emit))):
        followers, is_line_over = ends[mark], mark.startswith("\n")
        if not followers:
            return ValueEnd(True, mark.strip(), is_line_over)
        space, behind = yield from tag_behind(followers)
        if not behind or behind in followers:
            return ValueEnd(True, behind, is_line_over)
        emit(mark)
        taken = space + behind
    return ValueEnd(False, "")


def lined_value_text(
    sink: DeltaSink, ends: ValueEnds, taken: str | None, emit: Emit
) -> Grammar[ValueEnd]:
    """The same, without the line breaks around a value that stands on lines of its own."""
    text = _TextOnLines(emit)
    end = yield from value_text(sink, ends, taken, text.add)
    text.end(is_line_over=end.is_line_over)
    return end


def tag_behind(tags: Collection[str]) -> Grammar[tuple[str, str]]:
    """White space, and the tag of these behind it; other text up to the character that shows that
    it is none; nothing where the text ends before that."""
    space, text = yield from spaced()
    while text and text not in tags and any(tag.startswith(text) for tag in tags):
        character = yield
        text = text + character if character else ""
    return space, text


class TextBetweenLines:
    """A value as its text comes, without the line breaks that stand around it."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._held, self._is_first = emit, "", True

    def add(self, text: str) -> None:
        for character in text:
            self._add(character)

    def _add(self, character: str) -> None:
        held, is_first, self._held, self._is_first = self._held, self._is_first, "", False
        if held:
            self._emit(held)
        if character != "\n":
            self._emit(character)
        elif not is_first:
            self._held = character

    def end(self, *, is_line_over: bool) -> None:
        """The line break before the end stands around the text, unless it was passed over."""
        if is_line_over and self._held:
            self._emit(self._held)


class _TextOnLines:
    """A value as its text comes: one that begins with a line break stands between lines."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._is_first = emit, True
        self._between: TextBetweenLines | None = None

    def add(self, text: str) -> None:
        if self._is_first and text.startswith("\n"):
            self._between = TextBetweenLines(self._emit)
        self._is_first = self._is_first and not text
        (self._emit if self._between is None else self._between.add)(text)

    def end(self, *, is_line_over: bool) -> None:
        """The end of the value, before which a line break may have been passed over."""
        if self._between is not None:
            self._between.end(is_line_over=is_line_over)
