"""Thoughts between marks at the beginning of an answer, and the answer after them.

A template may have put the first mark into the prompt: then the answer begins with a thought. So
it does where it goes on with a message whose thought is open.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ferryman.text.tool_calls.deltas import ArgumentsDelta, CallStarted, DeltaSink
from ferryman.text.tool_calls.grammar import Grammar, replayed, text_until

MakeGrammar = Callable[[DeltaSink], Grammar[None]]


@dataclass(frozen=True, slots=True)
class ContinuedMessage:
    """The text of a message that an answer goes on with; its thought if it has no text."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class PromptTail:
    """The end of a prompt: its last characters, and the message that the answer goes on with. Calls
    in the answer have numbers from `first_number` on."""

    text: str = ""
    continued: ContinuedMessage | None = None
    first_number: int = 0


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


class _ThoughtCalls:
    """The calls in a thought. Models rehearse calls there, and those are none; but one may call at
    the end of its thought, and say nothing more, with the mark behind the thought or without: then
    its answer ends with what it calls."""

    def __init__(self, sink: DeltaSink, make: MakeGrammar) -> None:
        self._sink, self._calls = sink, DeltaSink()
        self._grammar = make(self._calls)
        next(self._grammar)

    def add(self, character: str) -> None:
        """Takes a character of the thought."""
        self._sink.reasoning(character)
        self._grammar.send(character)
        if not self._calls.is_behind_call:
            self._calls.drain()

    def end(self) -> None:
        """Takes the end of the thought, which is one of the text to its calls."""
        self._calls.is_cut = self._sink.is_cut
        with suppress(StopIteration):
            self._grammar.send("")

    def pass_on(self) -> None:
        """Passes the calls on with which the thought ended, where the text has ended, too."""
        if not self._calls.is_behind_call or self._sink.is_cut:
            return
        for delta in self._calls.drain():
            if isinstance(delta, CallStarted):
                self._sink.begin_call(delta.name, delta.number)
            elif isinstance(delta, ArgumentsDelta):
                self._sink.arguments(delta.text)


def thought_then(
    sink: DeltaSink,
    marks: ThoughtMarks,
    make: MakeGrammar,
    prompt: PromptTail,
    make_calls: MakeGrammar | None,
) -> Grammar[None]:
    """A thought, if the text begins with one, and then the grammar that `make` makes. That of
    `make_calls` finds calls in the thought; None where nothing can be one."""
    is_open = marks.is_open_behind(prompt)
    if prompt.continued is not None:
        # A message has its thought behind it once it has come to its text.
        yield from (_thought(sink, marks, make, make_calls) if is_open else make(sink))
        return
    held, is_over = yield from _opening(marks)
    if held in marks.begins:
        # Some models repeat the mark that the prompt ends with.
        yield from _thought(sink, marks, make, make_calls)
    else:
        begun = _thought(sink, marks, make, make_calls) if is_open else make(sink)
        yield from replayed(held, begun, is_over=is_over)


def _thought(
    sink: DeltaSink, marks: ThoughtMarks, make: MakeGrammar, make_calls: MakeGrammar | None
) -> Grammar[None]:
    calls = None if make_calls is None else _ThoughtCalls(sink, make_calls)
    emit = sink.reasoning if calls is None else calls.add
    mark = yield from text_until(emit, marks.ends)
    if calls is not None:
        calls.end()
    is_over = not mark
    if mark:
        sink.end_thought()
        is_over = yield from _blank_or(make(sink))
    if calls is not None and is_over:
        calls.pass_on()


def _blank_or(inner: Grammar[None]) -> Grammar[bool]:
    """Gives a text to a grammar. Returns whether it was white space, or nothing at all."""
    next(inner)
    is_blank = True
    while character := (yield):
        is_blank = is_blank and character.isspace()
        inner.send(character)
    with suppress(StopIteration):
        inner.send("")
    return is_blank


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
