"""Grammars as generators: each takes one character at a time, and "" is the end of the text.

    def grammar(sink):
        while (yield from content_until(sink.content, ("<call>",))):
            yield from attempt(sink, "<call>", call(sink))

A text that is not as a grammar expects raises Malformed inside; `attempt` makes content of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping
from contextlib import suppress
from typing import TypeVar

from ferryman.text.tool_calls.deltas import DeltaSink, OutputDelta

T = TypeVar("T")
Grammar = Generator[None, str, T]
Emit = Callable[[str], None]


class Malformed(Exception):
    """The text is not what the grammar expects here."""


_OPENINGS = " \t\r\n[{"  # of a form in JSON


class KnownCallsSink(DeltaSink):
    """A sink for an answer that is calls of these names, or of a form. The first that it says
    decides: the form's text may have calls in it."""

    def __init__(self, names: Container[str], first_number: int = 0) -> None:
        super().__init__(first_number)
        self._names, self._is_form = names, False

    def content(self, text: str) -> None:
        self._is_form = self._is_form or bool(text.strip() and not self.num_calls)
        super().content(text)

    def begin_call(self, name: str, number: int | None = None) -> None:
        """Raises Malformed for another name, and within a form."""
        if self._is_form or name not in self._names:
            raise Malformed
        super().begin_call(name, number)

    def hides(self, taken: str, *, has_begun: bool) -> bool:
        """The beginning of a call is no form, unless a form may begin alike."""
        is_mark = len(taken.strip(_OPENINGS)) > 1
        is_call = self.is_cut and is_mark and not self._is_form
        return is_call or super().hides(taken, has_begun=has_begun)


class OutputParser:
    """Feeds text to a grammar. Never raises for what the text is."""

    def __init__(self, make: Callable[[DeltaSink], Grammar[None]], sink: DeltaSink) -> None:
        self._sink = sink
        self._grammar = make(sink)
        next(self._grammar)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def feed(self, text: str) -> tuple[OutputDelta, ...]:
        """The deltas that are certain now."""
        for character in text:
            self._grammar.send(character)
        return self._sink.drain()

    def flush(self, *, is_cut: bool = False) -> tuple[OutputDelta, ...]:
        """The deltas that were held back, as the end of the text. Feed nothing afterwards. A
        call that the model left open is closed where the model ended by itself; in a text that
        `is_cut` it stays open."""
        self._sink.is_cut = is_cut
        with suppress(StopIteration):
            self._grammar.send("")
        self._sink.end()
        return self._sink.drain()


def content(sink: DeltaSink) -> Grammar[None]:
    """All of the rest is content."""
    while character := (yield):
        sink.content(character)


def text_until(
    emit: Emit, marks: tuple[str, ...], taken: str | None = None, emit_last: Emit | None = None
) -> Grammar[str]:
    """Emits text up to a mark, and returns that; "" at the end of the text. No mark may begin
    another one. The text in `taken` was read already: the end, some characters, or a whole mark.
    `emit_last` gets the beginning of a mark with which the text ends, if not `emit` does."""
    held, first = "", frozenset(mark[0] for mark in marks)
    while text := ((yield) if taken is None else taken):
        taken = None
        for character in text:
            if not held and character not in first:
                emit(character)
                continue
            held += character
            while held and not any(mark.startswith(held) for mark in marks):
                emit(held[0])
                held = held[1:]
            if held in marks:
                return held
    if held and emit_last is not None:
        emit_last(held)
        return ""
    for character in held:
        emit(character)
    return ""


def marked_text(
    sink: DeltaSink,
    openings: Mapping[str, Callable[[], Grammar[str]]],
    ends: tuple[str, ...] = (),
    following: str | None = None,
) -> Grammar[None]:
    """Content, and what stands behind the marks of `openings`: their grammars return what follows,
    a character or a mark. `ends` are left out behind a call."""
    marks = (*openings, *ends)

    while mark := (yield from text_until(sink.content, marks, following, sink.beginning)):
        following = None
        if mark in ends:
            sink.layout(mark)
        else:
            following = yield from attempt(sink, mark, openings[mark]())


def word_until(
    marks: tuple[str, ...], max_chars: int, taken: str | None = None
) -> Grammar[tuple[str, str]]:
    """The text before a mark, and the mark. Malformed when it is too long or the text ends. The
    text in `taken` was read already."""
    word: list[str] = []

    def take(character: str) -> None:
        if len(word) >= max_chars:
            raise Malformed
        word.append(character)

    mark = yield from text_until(take, marks, taken)
    if not mark:
        raise Malformed
    return "".join(word), mark


def skip_space() -> Grammar[str]:
    """The first character that is no white space."""
    _, character = yield from spaced()
    return character


def spaced() -> Grammar[tuple[str, str]]:
    """White space, and the first character that is none."""
    space = ""
    while (character := (yield)).isspace():
        space += character
    return space, character


def expect(text: str, character: str | None = None) -> Grammar[None]:
    """Takes exactly `text`, whose first character may have been read already."""
    for wanted in text:
        if character is None:
            character = yield
        if character != wanted:
            raise Malformed
        character = None


def attempt(sink: DeltaSink, taken: str, inner: Grammar[T]) -> Grammar[T | None]:
    """Runs a grammar after the mark `taken`. If the text is not as it expects, the part that
    went into no call becomes content, and the result is None. Where the text ends within a call,
    what was not passed on of that is no content."""
    pending, num_taken, character = [taken], sink.num_taken, ""
    num_calls = sink.num_calls
    try:
        next(inner)
        while True:
            character = yield
            if sink.num_taken != num_taken:
                pending, num_taken = [], sink.num_taken
            pending.append(character)
            inner.send(character)
    except StopIteration as over:
        result: T = over.value
        return result
    except Malformed:
        if not character and sink.hides(taken, has_begun=sink.num_calls > num_calls):
            return None
        # The character that showed it may have ended a number, which was taken then.
        for piece in pending if sink.num_taken == num_taken else [character]:
            sink.content(piece)
        return None


def until_mark(mark: str, inner: Grammar[None]) -> Grammar[str]:
    """Gives text to a grammar up to a mark, and returns that; nothing if the grammar ends before.
    The characters of the mark must not end it."""
    next(inner)
    held = ""
    try:
        while character := (yield):
            held += character
            while held and not mark.startswith(held):
                inner.send(held[0])
                held = held[1:]
            if held == mark:
                return mark
        inner.send("")
    except StopIteration:
        return ""
    raise Malformed


def replayed(text: str, inner: Grammar[None], *, is_over: bool = False) -> Grammar[None]:
    """Gives `text` to a grammar before what comes; nothing comes if the text `is_over`."""
    try:
        next(inner)
        for character in text:
            inner.send(character)
        if is_over:
            inner.send("")
        while True:
            inner.send((yield))
    except StopIteration:
        return
