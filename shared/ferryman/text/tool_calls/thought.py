"""Thoughts between marks at the beginning of an answer, and the answer after them.

A template may have put the first mark into the prompt: then the answer begins with a thought. So
it does where it goes on with a message whose thought is open.
"""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.text.tool_calls.deltas import DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, replayed, text_until


@dataclass(frozen=True, slots=True)
class ContinuedMessage:
    """The text of a message that an answer goes on with; its thought if it has no text."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class PromptTail:
    """The end of a prompt: its last characters, and the message that the answer goes on with."""

    text: str = ""
    continued: ContinuedMessage | None = None


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Words that begin and end a thought. With `is_always_open` an answer begins with one unless
    the prompt has ended it."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_always_open: bool = False

    def is_open_behind(self, prompt: PromptTail) -> bool:
        """Whether an answer to a prompt that ends so begins inside a thought."""
        if prompt.continued is not None:
            return prompt.continued.is_thought or self._is_open_in(prompt.continued.text)
        tail = prompt.text.rstrip()
        if tail.endswith(self.begins):
            return True
        return self.is_always_open and not tail.endswith(self.ends)

    def _is_open_in(self, text: str) -> bool:
        """Whether a message begins with a thought and does not end it."""
        return text.lstrip().startswith(self.begins) and not any(end in text for end in self.ends)


def thought_then(
    sink: DeltaSink, marks: ThoughtMarks, rest: Grammar[None], prompt: PromptTail
) -> Grammar[None]:
    """A thought, if the text begins with one, and then `rest`."""
    is_open = marks.is_open_behind(prompt)
    if prompt.continued is not None:
        # A message has its thought behind it once it has come to its text.
        yield from (_thought(sink, marks, rest) if is_open else rest)
        return
    held, is_over = yield from _opening(marks)
    if held in marks.begins:
        # Some models repeat the mark that the prompt ends with.
        yield from _thought(sink, marks, rest)
    else:
        begun = _thought(sink, marks, rest) if is_open else rest
        yield from replayed(held, begun, is_over=is_over)


def _thought(sink: DeltaSink, marks: ThoughtMarks, rest: Grammar[None]) -> Grammar[None]:
    if (yield from text_until(sink.reasoning, marks.ends)):
        sink.end_thought()
        yield from rest


def _opening(marks: ThoughtMarks) -> Grammar[tuple[str, bool]]:
    """A mark that begins a thought, white space before it left out; or the text that is none, up
    to the character that decides, and whether it is over there."""
    held = ""
    while character := (yield):
        held += character
        word = held.lstrip()
        if word in marks.begins:
            return word, False
        if word and not any(mark.startswith(word) for mark in marks.begins):
            return held, False
    return held, True
