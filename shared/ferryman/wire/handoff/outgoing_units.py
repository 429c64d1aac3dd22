"""Units that leave a worker: how their bytes are read into frames, and hashed on the way.

    units of a batch → cuts of each frame → pieces of their bytes, in order → frame, digest

A slot of the host is read in place. One of a card, or of several ranks, is read by copying, one
frame at a time, so nothing is held between two frames: neither memory of a slot's size, nor a
piece of pinned memory that another hand-off waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotPart, filled_pieces
from ferryman.handoff.values import UnitDigest, WantedUnit


class SlotReader(Protocol):
    """Reads slots that are reached only by copying (`engine.memory.transfer.Transfer`). Every call
    blocks: not for an event loop."""

    def read_parts(
        self, parts: Sequence[SlotPart], take: Callable[[int, int, memoryview], None]
    ) -> None:
        """Passes pieces to `take`: the number of a part, a place in it, the bytes there, which
        stand until `take` returns."""
        ...

    def digest(self, kind: Kind, slot: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class OutgoingUnit:
    """A wanted unit and its bytes, which must not change until decode has answered.

    `slot` is the writer's slot that holds them; NIXL reads them there.
    """

    unit: WantedUnit
    content: memoryview
    slot: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    def digest(self) -> bytes:
        """The digest of all bytes. May block for milliseconds."""
        return xxhash.xxh3_128_digest(self.content)


@dataclass(frozen=True, slots=True)
class CopiedUnit:
    """A wanted unit in a slot that `reader` reads by copying; it must not change either."""

    unit: WantedUnit
    slot: int
    num_bytes: int
    reader: SlotReader

    def digest(self) -> bytes:
        """The digest of all bytes. Blocks for milliseconds."""
        return self.reader.digest(self.unit.kind, self.slot)


AnyUnit = OutgoingUnit | CopiedUnit


@dataclass(frozen=True, slots=True)
class UnitCut:
    """A part of a unit, for the frame at whose place it lies."""

    unit: AnyUnit
    offset: int
    num_bytes: int
    place: int

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self.unit.num_bytes


TakeCut = Callable[[UnitCut, int, memoryview], None]
"""Gets a cut, a place in it, and the bytes from there on, which stand until it returns."""


def frames_of(batch: Sequence[AnyUnit], frame_bytes: int) -> Iterator[list[UnitCut]]:
    """The cuts of each frame: as full as they can be without waiting for the next batch."""
    for cuts in filled_pieces([unit.num_bytes for unit in batch], frame_bytes):
        yield [
            UnitCut(batch[number], offset, num_bytes, place)
            for number, offset, num_bytes, place in cuts
        ]


def must_copy(cuts: Sequence[UnitCut]) -> bool:
    """Whether `read_cuts` blocks for these."""
    return any(isinstance(cut.unit, CopiedUnit) for cut in cuts)


def read_cuts(cuts: Sequence[UnitCut], take: TakeCut) -> None:
    """Passes the bytes of a frame to `take`, in order. All its units are of one worker."""
    copied = [(cut, cut.unit) for cut in cuts if isinstance(cut.unit, CopiedUnit)]
    for cut in cuts:
        if isinstance(cut.unit, OutgoingUnit):
            take(cut, 0, cut.unit.content[cut.offset : cut.offset + cut.num_bytes])
    if copied:
        parts = [
            SlotPart(unit.unit.kind, unit.slot, cut.offset, cut.offset + cut.num_bytes)
            for cut, unit in copied
        ]
        # In one call: small pages share a piece of pinned memory, and a wait for the card.
        copied[0][1].reader.read_parts(
            parts, lambda number, offset, piece: take(copied[number][0], offset, piece)
        )


class UnitDigests:
    """The digests of units whose bytes pass by, in order."""

    def __init__(self) -> None:
        self.digests: list[UnitDigest] = []
        self._open: dict[int, xxhash.xxh3_128] = {}

    def add(self, cut: UnitCut, offset: int, piece: memoryview) -> None:
        """Bytes that lie at `offset` of the cut."""
        unit, begin = cut.unit, cut.offset + offset
        if len(piece) == unit.num_bytes:
            digest = xxhash.xxh3_128_digest(piece)
        else:
            hasher = self._open.setdefault(id(unit), xxhash.xxh3_128())
            hasher.update(piece)
            if begin + len(piece) < unit.num_bytes:
                return
            digest = self._open.pop(id(unit)).digest()
        self.digests.append(UnitDigest(unit.unit.kind, unit.unit.index, digest))
