"""Pieces of pinned memory through which slots leave a card.

    card     fills one piece   fills the other    fills the first again
    thread                     takes the first    takes the other          (copies it on, hashes it)

A pair of pieces belongs to one reader at a time, and there are few pairs: a reader waits for one in
place of memory of its own. No reader waits for anything but the card while it has a pair, so each
pair comes back soon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import LifoQueue

import torch
from torch import Tensor

from ferryman.cache.slots import PieceCut, filled_pieces
from ferryman.engine.memory.copy_stream import CopyFence, CopySide

log = logging.getLogger(__name__)

LEAVING_BYTES = 1 << 20
"""Bytes of a piece: a card fills it in 20 µs, which nothing overlaps with at the first piece of a
frame. A frame of lent memory has four of them."""
NUM_PAIRS = 4
"""Readers at the same time."""

TakePiece = Callable[[int, int, memoryview], None]
"""Gets the number of a part, a place in that part, and the bytes from there on, which it may use
until it returns."""


class PinnedPairs:
    """A bounded number of pairs of pieces, shared by all reads of a card's slots."""

    def __init__(self, side: CopySide, *, is_pinned: bool) -> None:
        # The last pair that came back is lent first, so memory is pinned only for as many readers
        # as there ever are at once.
        self._free: LifoQueue[_PinnedPair] = LifoQueue()
        for _ in range(NUM_PAIRS):
            self._free.put(_PinnedPair(side, is_pinned=is_pinned))

    def read(self, parts: Sequence[Tensor], take: TakePiece) -> None:
        """Passes the bytes of `parts`, each [num_bytes] of a slot, to `take` in their order.

        Blocks until a pair is free. An error of `take` ends the read, and the pair comes back.
        """
        pair = self._free.get()
        try:
            pair.read(parts, take)
        finally:
            self._free.put(pair)


class _PinnedPair:
    """Two pieces, one of which is taken while the card fills the other one."""

    def __init__(self, side: CopySide, *, is_pinned: bool) -> None:
        self._side, self._is_pinned = side, is_pinned
        self._pieces: list[Tensor] = []

    def read(self, parts: Sequence[Tensor], take: TakePiece) -> None:
        if not self._pieces:
            self._pieces = [
                pinned_or_plain(LEAVING_BYTES, is_pinned=self._is_pinned) for _ in range(2)
            ]
        filling: _Filling | None = None
        try:
            pieces = filled_pieces([len(part) for part in parts], LEAVING_BYTES)
            for turn, cuts in enumerate(pieces):
                before, filling = filling, self._fill(self._pieces[turn % 2], parts, cuts)
                if before is not None:
                    before.take(take)
            if filling is not None:
                filling.take(take)
        finally:
            # After an error the card may still fill a piece that the next reader would get.
            if filling is not None:
                filling.finish()

    def _fill(self, piece: Tensor, parts: Sequence[Tensor], cuts: Sequence[PieceCut]) -> _Filling:
        """Begins to fill a piece: many small parts have one fence."""
        with self._side.entered():
            run = self._side.begin()
            for number, offset, num_bytes, place in cuts:
                source = parts[number][offset : offset + num_bytes]
                piece[place : place + num_bytes].copy_(source, non_blocking=True)
            return _Filling(piece, cuts, run.end())


@dataclass(slots=True)
class _Filling:
    """A piece that the card fills, or has filled."""

    piece: Tensor
    cuts: Sequence[PieceCut]
    fence: CopyFence
    is_over: bool = False

    def finish(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.fence.finish()

    def take(self, take: TakePiece) -> None:
        self.finish()
        content = memoryview(self.piece.numpy().data)
        for number, offset, num_bytes, place in self.cuts:
            take(number, offset, content[place : place + num_bytes])


def pinned_or_plain(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Memory of the host, not pinned if the machine pins no more: copies are slower then."""
    try:
        return _host_memory(num_bytes, is_pinned=is_pinned)
    except RuntimeError as error:
        log.warning("no pinned memory of %d bytes, so copies are slower: %s", num_bytes, error)
        return _host_memory(num_bytes, is_pinned=False)


def _host_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
