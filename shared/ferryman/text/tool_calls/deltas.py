"""The parts into which a model's text falls, and the sink that a grammar writes them to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins; `index` counts the calls of one answer from 0, `number` those of the whole
    conversation, in steps of any size."""

    index: int
    name: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


OutputDelta = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta


class _Last(Enum):
    NOTHING = auto()
    CONTENT = auto()
    THOUGHT = auto()
    CALL = auto()


_MARKED = (_Last.THOUGHT, _Last.CALL)


class DeltaSink:
    """Collects deltas in order. White space between content and a call or a thought is layout of
    the format, and belongs to neither. `num_taken` counts all texts and calls ever taken. At the
    end of a text `is_cut` says whether the model would have gone on. The first call has at least
    the number `first_number`."""

    def __init__(self, first_number: int = 0) -> None:
        self.num_calls = self.num_taken = 0
        self._next_number = first_number
        self.is_cut = False
        self._deltas: list[OutputDelta] = []
        self._space, self._last = "", _Last.NOTHING

    def content(self, text: str) -> None:
        self.num_taken += 1
        trimmed = text.rstrip()
        if not trimmed:
            self._space += text
            return
        whole = text.lstrip() if self._last in _MARKED else self._space + text
        end = len(whole) - len(text) + len(trimmed)
        self._deltas.append(ContentDelta(whole[:end]))
        self._space, self._last = whole[end:], _Last.CONTENT

    @property
    def is_behind_call(self) -> bool:
        """Whether nothing but white space came behind a call."""
        return self._last is _Last.CALL

    def aside(self, text: str) -> None:
        """Content that a model wrote within a call, behind the call. Marks may still follow."""
        self.content(text)
        self._last = _Last.CALL

    def hides(self, taken: str, *, has_begun: bool) -> bool:
        """Whether nothing is shown of a call that is not whole where the text ends: it `has_begun`,
        or came no further than the mark `taken` and what stands behind it."""
        return (has_begun or self.is_cut) and self.is_behind_call

    def beginning(self, held: str) -> None:
        """The beginning of a mark, or of another call, with which the text ends. An answer that was
        cut there shows nothing of it behind a call."""
        if not self.hides(held, has_begun=False):
            self.content(held)

    def layout(self, mark: str) -> None:
        """A mark that belongs to a format behind a call, and is content anywhere else."""
        if not self.is_behind_call:
            self.content(mark)

    def reasoning(self, text: str) -> None:
        self._mark(_Last.THOUGHT)
        self._deltas.append(ReasoningDelta(text))

    def end_thought(self) -> None:
        """The mark behind a thought, which may have been empty."""
        self._mark(_Last.THOUGHT)

    def begin_call(self, name: str, number: int | None = None) -> None:
        """A call, with the number that the model gave it unless an earlier call has it."""
        self._mark(_Last.CALL)
        number = max(self._next_number, number or 0)
        self._deltas.append(CallStarted(self.num_calls, name, number))
        self.num_calls += 1
        self._next_number = number + 1

    def arguments(self, text: str) -> None:
        """Arguments of the call that began last."""
        self._mark(_Last.CALL)
        self._deltas.append(ArgumentsDelta(self.num_calls - 1, text))

    def end(self) -> None:
        """Ends the text: white space after content was part of it."""
        if self._space and self._last not in _MARKED:
            self._deltas.append(ContentDelta(self._space))
        self._space = ""

    def drain(self) -> tuple[OutputDelta, ...]:
        """The deltas since the last call; neighbours of one kind are joined."""
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    def _mark(self, last: _Last) -> None:
        self.num_taken += 1
        self._space, self._last = "", last


def joined(deltas: Iterable[OutputDelta]) -> tuple[OutputDelta, ...]:
    """The same deltas, those of one kind that follow one another as one."""
    merged: list[OutputDelta] = []
    for delta in deltas:
        match merged[-1:], delta:
            case [ContentDelta(before)], ContentDelta(text):
                merged[-1] = ContentDelta(before + text)
            case [ReasoningDelta(before)], ReasoningDelta(text):
                merged[-1] = ReasoningDelta(before + text)
            case [ArgumentsDelta(index, before)], ArgumentsDelta(_, text):
                merged[-1] = ArgumentsDelta(index, before + text)
            case _:
                merged.append(delta)
    return tuple(merged)
