"""The form of an answer, whole or in frames: one class for each API and form."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferryman.cache.keys import TokenIds
from ferryman.schedule.prompt_scores import Position, PromptScores
from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.request.response import OutputFailed

BYTES_PER_ENTRY = 80
# Beyond ASCII; the control characters among them are escaped by JSON itself.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The token ids of a prompt, and their scores in pieces, whole."""

    token_ids: TokenIds
    pieces: Sequence[PromptScores]

    def positions(self, num_shown: int) -> Iterator[Position]:
        """One for each token, with its own log probability and so many of the likeliest."""
        yield None
        for piece in self.pieces:
            columns = slice(1 + num_shown)
            yield from PromptScores(
                piece.first, piece.token_ids[:, columns], piece.logprobs[:, columns], piece.ranks
            ).positions()

    @property
    def num_bytes(self) -> int:
        """About the size of all entries in an answer."""
        return BYTES_PER_ENTRY * sum(piece.token_ids.size for piece in self.pieces)


class AnsweredChoice(NamedTuple):
    """The chunks of a choice and its end; its `prompt` if that is scored."""

    chunks: Sequence[TokenChunk]
    end: GenerateFinished
    prompt: ScoredPrompt | None = None


class ResponseFormat(ABC):
    """Frames are bytes of server-sent events; `index` is the choice. `usage` is what
    `usage_object` makes."""

    @abstractmethod
    def first(self, index: int) -> bytes:
        """The frame before a choice's tokens."""

    def scored(self, index: int, prompt: ScoredPrompt) -> bytes:
        """The frame between `first` and a choice's tokens, if its prompt is scored."""
        return b""

    @abstractmethod
    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        """The frames of a chunk, empty for a chunk of which nothing is shown yet."""

    @abstractmethod
    def last(self, index: int, answer: AnsweredChoice) -> bytes:
        """The frames after a choice's tokens, which the answer has again."""

    @abstractmethod
    def end(self, usage: dict[str, Any]) -> bytes:
        """The frames after those of all choices."""

    @abstractmethod
    def failure(self, broken: OutputFailed) -> bytes:
        """The last frame of a stream that breaks off."""

    @abstractmethod
    def whole(self, answers: Sequence[AnsweredChoice], usage: dict[str, Any]) -> bytes:
        """An answer that is not streamed, with all choices."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """About the size of one token in a whole answer."""


def as_json(value: object) -> bytes:
    """JSON without spaces, in one line."""
    return in_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).encode()


def in_one_line(text: str) -> str:
    """JSON with escapes for what Unicode counts as the end of a line and JSON does not: clients
    that split a stream of events by Unicode's lines would cut an event there."""
    if not text.isascii():
        for character, escape in _LINE_ENDS:
            text = text.replace(character, escape)
    return text


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event with its name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), as_json({"type": name, **fields}))
