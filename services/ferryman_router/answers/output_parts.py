"""An answer as a row of parts, each of one kind: text, a thought, or a call.

The endpoints that send their answers as typed events (Responses, Messages) report when a part
begins, what it gets, and when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from ferryman.text.tool_calls.deltas import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)


class PartKind(Enum):
    """Text for the reader, a thought, or a call."""

    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One part; `index` counts all parts of an answer, `call` its calls. `name` is the called
    function's."""

    index: int
    kind: PartKind
    call: int = -1
    name: str = ""


@dataclass(frozen=True, slots=True)
class PartBegun:
    """A part begins; it has no text yet."""

    part: OutputPart


@dataclass(frozen=True, slots=True)
class PartText:
    """A piece of a part's text, or of a call's arguments."""

    part: OutputPart
    text: str


@dataclass(frozen=True, slots=True)
class PartEnded:
    """A part is over; `text` is the whole of it."""

    part: OutputPart
    text: str


PartEvent = PartBegun | PartText | PartEnded


class OutputParts:
    """Divides the deltas of one answer into parts."""

    def __init__(self) -> None:
        self._part: OutputPart | None = None
        self._texts: list[str] = []
        self._num_parts = 0

    def feed(self, deltas: Iterable[OutputDelta]) -> list[PartEvent]:
        """The events of these deltas, in order."""
        events: list[PartEvent] = []
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    events += self._text(PartKind.TEXT, text)
                case ReasoningDelta(text):
                    events += self._text(PartKind.THOUGHT, text)
                case CallStarted(call, name):
                    events += self._begin(PartKind.CALL, call, name)
                case ArgumentsDelta(_, text):
                    events += self._more(text)
        return events

    def end(self) -> list[PartEvent]:
        """The end of the part that is open, if any."""
        if self._part is None:
            return []
        ended = PartEnded(self._part, "".join(self._texts))
        self._part = None
        return [ended]

    def _text(self, kind: PartKind, text: str) -> list[PartEvent]:
        begun = [] if self._part and self._part.kind is kind else self._begin(kind)
        return [*begun, *self._more(text)]

    def _begin(self, kind: PartKind, call: int = -1, name: str = "") -> list[PartEvent]:
        ended = self.end()
        self._part, self._texts = OutputPart(self._num_parts, kind, call, name), []
        self._num_parts += 1
        return [*ended, PartBegun(self._part)]

    def _more(self, text: str) -> list[PartEvent]:
        assert self._part is not None, "a part begins before its text"
        self._texts.append(text)
        return [PartText(self._part, text)]
