"""The form of an answer, whole or in frames: one class for each way in which clients are told."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ferryman.wire.public import GenerateFinished, TokenChunk
from ferryman_router.response import OutputFailed

Answered = tuple[Sequence[TokenChunk], GenerateFinished]


class ResponseFormat(ABC):
    """Frames are bytes of server-sent events; `index` is the choice. `usage` is what
    `usage_object` makes."""

    @abstractmethod
    def first(self, index: int) -> bytes:
        """The frame before a choice's tokens."""

    @abstractmethod
    def tokens(self, index: int, chunk: TokenChunk) -> bytes:
        """The frames of a chunk, empty for a chunk of which nothing is shown yet."""

    @abstractmethod
    def last(self, index: int, end: GenerateFinished) -> bytes:
        """The frames behind a choice's tokens."""

    @abstractmethod
    def end(self, usage: dict[str, Any]) -> bytes:
        """The frames behind those of all choices."""

    @abstractmethod
    def failure(self, broken: OutputFailed) -> bytes:
        """The last frame of a stream that breaks off."""

    @abstractmethod
    def whole(self, answers: Sequence[Answered], usage: dict[str, Any]) -> bytes:
        """An answer that is not streamed, with all choices."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """About the size of one token in a whole answer."""


def as_json(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """A server-sent event with its name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), as_json({"type": name, **fields}))
