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
        followers = ends[mark]
        if not followers:
            return ValueEnd(is_whole=True, following=mark.strip())
        space, behind = yield from tag_behind(followers)
        if not behind or behind in followers:
            return ValueEnd(is_whole=True, following=behind)
        emit(mark)
        taken = space + behind
    return ValueEnd(is_whole=False, following="")


def tag_behind(tags: Collection[str]) -> Grammar[tuple[str, str]]:
    """White space, and the tag of these behind it; other text up to the character that shows that
    it is none; nothing where the text ends before that."""
    space, text = yield from spaced()
    while text and text not in tags and any(tag.startswith(text) for tag in tags):
        character = yield
        text = text + character if character else ""
    return space, text
