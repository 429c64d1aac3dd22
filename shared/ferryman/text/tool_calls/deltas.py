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
    """Text that the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


OutputDelta = ContentDelta | ReasoningDelta | CallStarted | ArgumentsDelta


class _Last(Enum):
    NOTHING = auto()
    CONTENT = auto()
    MARKED = auto()  # a thought or a call


class DeltaSink:
    """Collects deltas in order. White space between content and a call or a thought is layout of
    the format, and belongs to neither. `num_taken` counts all texts and calls ever taken."""

    def __init__(self) -> None:
        self.num_calls = self.num_taken = 0
        self._deltas: list[OutputDelta] = []
        self._space, self._last = "", _Last.NOTHING

    def content(self, text: str) -> None:
        self.num_taken += 1
        said = text.rstrip()
        if not said:
            self._space += text
            return
        whole = text.lstrip() if self._last is _Last.MARKED else self._space + text
        end = len(whole) - len(text) + len(said)
        self._deltas.append(ContentDelta(whole[:end]))
        self._space, self._last = whole[end:], _Last.CONTENT

    def reasoning(self, text: str) -> None:
        self._mark()
        self._deltas.append(ReasoningDelta(text))

    def begin_call(self, name: str) -> None:
        self._mark()
        self._deltas.append(CallStarted(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that began last."""
        self._mark()
        self._deltas.append(ArgumentsDelta(self.num_calls - 1, text))

    def end(self) -> None:
        """The text is over: white space behind content was part of it."""
        if self._space and self._last is not _Last.MARKED:
            self._deltas.append(ContentDelta(self._space))
        self._space = ""

    def drain(self) -> tuple[OutputDelta, ...]:
        """The deltas since the last call; neighbours of one kind are joined."""
        found, self._deltas = joined(self._deltas), []
        return found

    def _mark(self) -> None:
        self.num_taken += 1
        self._space, self._last = "", _Last.MARKED


def joined(deltas: Iterable[OutputDelta]) -> tuple[OutputDelta, ...]:
    """The same deltas, those of one kind that follow one another as one."""
    found: list[OutputDelta] = []
    for delta in deltas:
        match found[-1:], delta:
            case [ContentDelta(before)], ContentDelta(text):
                found[-1] = ContentDelta(before + text)
            case [ReasoningDelta(before)], ReasoningDelta(text):
                found[-1] = ReasoningDelta(before + text)
            case [ArgumentsDelta(index, before)], ArgumentsDelta(_, text):
                found[-1] = ArgumentsDelta(index, before + text)
            case _:
                found.append(delta)
    return tuple(found)
