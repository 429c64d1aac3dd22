"""What has been said so far: the chunks of one answer, for whoever listens now or comes back.

A listener gives an `asyncio.Event` and reads on from the chunk it has reached; the writer never
waits for a listener.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ferryman.errors import FerrymanError, InvalidRequest
from ferryman.wire.public import GenerateFinished, TokenChunk


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer ends here. `stage` is how far the request had come."""

    error: FerrymanError
    stage: str
    offset: int

    @property
    def is_retryable(self) -> bool:
        return self.error.code in ("RESOURCE_EXHAUSTED", "ABORTED", "UNAVAILABLE", "DATA_LOSS")


End = GenerateFinished | Broken


class Transcript:
    """All chunks of an answer, and its end when it has one."""

    __slots__ = ("_listeners", "chunks", "end")

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.end: End | None = None
        self._listeners: list[asyncio.Event] = []

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def num_tokens(self) -> int:
        if not self.chunks:
            return 0
        last = self.chunks[-1]
        return last.offset + len(last.token_ids)

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
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

    def chunk_index(self, offset: int) -> int:
        """The chunk that begins at `offset`; InvalidRequest when none does or will."""
        if offset == self.num_tokens:
            return len(self.chunks)
        for index, chunk in enumerate(self.chunks):
            if chunk.offset == offset:
                return index
        raise InvalidRequest(
            f"no chunk of this request ended at offset {offset}", "resume_from_offset"
        )
