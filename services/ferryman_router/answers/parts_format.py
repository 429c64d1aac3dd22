"""Answers that are sent part by part, as events with names: what their endpoints share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from ferryman.text.tool_calls.deltas import OutputDelta, ReasoningDelta
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.answers.chat_output import OutputReading
from ferryman_router.answers.output_parts import OutputPart, OutputParts, PartEvent
from ferryman_router.answers.response_format import AnsweredChoice, ResponseFormat

ID_BYTES = 12


class PartsFormat(ResponseFormat):
    """One answer to one prompt. A whole answer is put together as a stream of it would be."""

    def __init__(self, answer_id: str, reading: OutputReading) -> None:
        self._answer_id, self._reading = answer_id, reading
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
        held = self._frames((*self._parser.feed(answer.end.text), *self._parser.flush()))
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
        return self._reading.call_id(self._answer_id, 0, part.call)

    def _part_id(self, prefix: str, part: OutputPart) -> str:
        """A name for a part that no other part of any answer has."""
        named = f"{self._answer_id}/{part.index}".encode()
        return f"{prefix}_{blake2b(named, digest_size=ID_BYTES).hexdigest()}"
