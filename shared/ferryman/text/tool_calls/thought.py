"""Thoughts between marks at the beginning of an answer, and the answer after them.

A template may have put the first mark into the prompt: then the answer begins with a thought.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, replayed, text_until


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Words that begin and end a thought. With `is_always_open` an answer begins with one unless
    the prompt has ended it."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_always_open: bool = False

    def is_open_behind(self, prompt_tail: str) -> bool:
        """Whether an answer to a prompt that ends so begins inside a thought."""
        tail = prompt_tail.rstrip()
        if tail.endswith(self.begins):
            return True
        return self.is_always_open and not tail.endswith(self.ends)


def thought_then(
    sink: DeltaSink, marks: ThoughtMarks, rest: Grammar[None], *, is_open: bool
) -> Grammar[None]:
    """A thought, if the text begins with one, and then `rest`."""
    if is_open:
        # Some models repeat the mark that the prompt ends with.
        held = yield from _opening(marks)
        if held not in marks.begins:
            yield from replayed(held, _thought(sink, marks, rest))
            return
    else:
        held = yield from _opening(marks)
        if held not in marks.begins:
            yield from replayed(held, rest)
            return
    yield from _thought(sink, marks, rest)


def _thought(sink: DeltaSink, marks: ThoughtMarks, rest: Grammar[None]) -> Grammar[None]:
    if (yield from text_until(sink.reasoning, marks.ends)):
        yield from rest


def _opening(marks: ThoughtMarks) -> Grammar[str]:
    """A mark that begins a thought, white space before it left out; or the text that is none, up
    to the character that decides."""
    held = ""
    while character := (yield):
        held += character
        word = held.lstrip()
        if word in marks.begins:
            return word
        if word and not any(mark.startswith(word) for mark in marks.begins):
            return held
    return held
