"""What has been said so far: the pieces of one answer, for whoever listens now or comes back.

A listener gives an `asyncio.Event` and reads on from the piece it has reached; the writer never
waits for a listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ferryman.errors import FerrymanError, InvalidRequest
from ferryman.handoff.usage import CachedTokens
from ferryman.schedule.request import FinishReason


class Piece(NamedTuple):
    """Consecutive tokens, and the text they made certain. `logprobs` is empty or one per token."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; `uncached` counts the prompt's tokens computed, by reason."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens = field(default_factory=CachedTokens)
    uncached: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is whole; `text` is what was held back until its end."""

    reason: FinishReason
    usage: Usage
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer ends here. `stage` is how far the request had come."""

    error: FerrymanError
    stage: str
    offset: int

    @property
    def is_retryable(self) -> bool:
        return self.error.code in ("RESOURCE_EXHAUSTED", "ABORTED", "UNAVAILABLE", "DATA_LOSS")


End = Finished | Broken


class Transcript:
    """All pieces of an answer, and its end when it has one."""

    __slots__ = ("_listeners", "end", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end: End | None = None
        self._listeners: list[asyncio.Event] = []

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def num_tokens(self) -> int:
        if not self.pieces:
            return 0
        last = self.pieces[-1]
        return last.offset + len(last.token_ids)

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for listener in self._listeners:
            listener.set()

    def close(self, end: End) -> None:
        """The first end counts; whatever comes later is absorbed."""
        if self.end is None:
            self.end = end
        for listener in self._listeners:
            listener.set()

    def listen(self, changed: asyncio.Event) -> None:
        self._listeners.append(changed)

    def leave(self, changed: asyncio.Event) -> None:
        self._listeners.remove(changed)

    def piece_index(self, offset: int) -> int:
        """The piece that begins at `offset`; InvalidRequest when none does or will."""
        if offset == self.num_tokens:
            return len(self.pieces)
        for index, piece in enumerate(self.pieces):
            if piece.offset == offset:
                return index
        raise InvalidRequest(
            f"no chunk of this request ended at offset {offset}", "resume_from_offset"
        )
