"""An answer as a row of parts, each of one kind: text, a thought, or a call.

The endpoints that send their answers as typed events (Responses, Messages) report when a part
begins, what it gets, and when it ends. `PartsFormat` is what those two have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import Any

from ferryman.text.tool_calls.deltas import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
)
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.answers.chat_output import OutputReading, last_deltas
from ferryman_router.answers.response_format import AnsweredChoice, ResponseFormat
from ferryman_router.answers.response_header import ResponseHeader


class PartKind(Enum):
    """Text for the reader, a thought, or a call."""

    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()


NO_CALL = CallStarted(-1, "")


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One part; `index` counts all parts of an answer. `called` is the call that it is, if it is
    one."""

    index: int
    kind: PartKind
    called: CallStarted = NO_CALL

    @property
    def name(self) -> str:
        """The called function's, empty where none is called."""
        return self.called.name


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
                case CallStarted() as called:
                    events += self._begin(PartKind.CALL, called)
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

    def _begin(self, kind: PartKind, called: CallStarted = NO_CALL) -> list[PartEvent]:
        ended = self.end()
        self._part, self._texts = OutputPart(self._num_parts, kind, called), []
        self._num_parts += 1
        return [*ended, PartBegun(self._part)]

    def _more(self, text: str) -> list[PartEvent]:
        assert self._part is not None, "a part begins before its text"
        self._texts.append(text)
        return [PartText(self._part, text)]


ID_BYTES = 12


class PartsFormat(ResponseFormat):
    """One answer to one prompt. A whole answer is put together as a stream of it would be."""

    def __init__(self, heading: ResponseHeader, reading: OutputReading) -> None:
        self._heading, self._reading = heading, reading
        self._parser = reading.parser(0)
        self._parts = OutputParts()
        self._num_tokens = self._num_thought = 0

    @abstractmethod
    def _told(self, event: PartEvent) -> bytes:
        """The frames of an event, which is noted for the whole answer too."""

    @abstractmethod
    def _finish(self, end: GenerateFinished) -> None:
        """Notes how the answer ended."""

    @abstractmethod
    def _whole(self, usage: dict[str, Any]) -> bytes: ...

    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        deltas = self._parser.feed(chunk.text)
        self._num_tokens += len(chunk.token_ids)
        if any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self._num_thought = self._num_tokens
        return self._frames(deltas)

    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        self._finish(answer.end)
        held = self._frames(last_deltas(self._parser, answer.end))
        return held + b"".join(map(self._told, self._parts.end()))

    def whole(self, answers: Sequence[AnsweredChoice], usage: dict[str, Any]) -> bytes:
        (answer,) = answers
        for chunk in answer.chunks:
            self.tokens(0, chunk)
        self.last(0, answer)
        return self._whole(usage)

    def _frames(self, deltas: Iterable[OutputDelta]) -> bytes:
        events = self._parts.feed(self._reading.shown(deltas))
        return b"".join(map(self._told, events))

    def _call_id(self, part: OutputPart) -> str:
        return self._reading.call_id(self._heading.answer_id, 0, part.called)

    def _part_id(self, prefix: str, part: OutputPart) -> str:
        """A name for a part that no other part of any answer has."""
        named = f"{self._heading.answer_id}/{part.index}".encode()
        return f"{prefix}_{blake2b(named, digest_size=ID_BYTES).hexdigest()}"
