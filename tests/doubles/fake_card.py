"""A card that is none: its slots lie in host memory, and are reached as a card's are.

It counts what costs time on a card: memory of the host that is taken, runs of copies, waits for
them, and the bytes that leave and arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotPart
from ferryman.engine.memory import pinned_pieces
from ferryman.engine.memory.copy_stream import CopyFence, CopyRun, HostSide
from ferryman.engine.memory.pinned_pieces import TakePiece
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.memory.transfer import DeviceTransfer, Landed, ignored


class CountingSide(HostSide):
    """Notes when each run of copies begins, and when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._runs = 0

    def begin(self) -> CopyRun:
        self._runs += 1
        self.log.append(f"{self._runs} begins")
        return _CountedRun(self, self._runs)

    def waited_for(self, number: int) -> None:
        self.log.append(f"{number} ends")

    @property
    def num_runs(self) -> int:
        return self._runs

    @property
    def waits(self) -> list[int]:
        """The runs that were waited for."""
        return [int(line.removesuffix(" ends")) for line in self.log if line.endswith(" ends")]

    @property
    def num_waits(self) -> int:
        return len(self.waits)


class _CountedRun:
    def __init__(self, side: CountingSide, number: int) -> None:
        self._side, self._number = side, number

    def end(self) -> CopyFence:
        return self

    def wait(self) -> None:
        """The queue's business."""

    def finish(self) -> None:
        self._side.waited_for(self._number)

    def seconds(self) -> float:
        return 0.0


@dataclass(slots=True)
class PinnedMemory:
    """The sizes of the host memory that transfers have taken so far."""

    sizes: list[int] = field(default_factory=list)

    @classmethod
    def counted(cls, monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
        memory = cls()

        def taken(num_bytes: int, *, is_pinned: bool) -> Tensor:
            memory.sizes.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8)

        monkeypatch.setattr(pinned_pieces, "_host_memory", taken)
        return memory


@dataclass(frozen=True, slots=True)
class _Tensors:
    tensors: Mapping[Kind, Tensor]


class FakeCard(DeviceTransfer):
    """Slots that lie in `slabs`, [num_slots, slot_bytes] of each kind."""

    def __init__(self, slabs: Mapping[Kind, Any]) -> None:
        self.side = CountingSide()
        tensors = {kind: torch.from_numpy(slab) for kind, slab in slabs.items()}
        super().__init__(cast(Slabs, _Tensors(tensors)), HostSide(), self.side)
        self.bytes_read = self.bytes_landed = self.bytes_hashed_on_landing = self.num_digests = 0

    def read(self, kind: Kind, slot: int) -> memoryview:
        raise AssertionError("this takes memory of a slot's size")

    def read_parts(self, parts: Sequence[SlotPart], take: TakePiece) -> None:
        self.bytes_read += sum(part.end - part.begin for part in parts)
        super().read_parts(parts, take)

    def write(
        self,
        kind: Kind,
        slot: int,
        offset: int,
        content: bytes | memoryview,
        landed: Landed = ignored,
    ) -> None:
        def counted(piece: memoryview) -> None:
            self.bytes_hashed_on_landing += len(piece)
            landed(piece)

        self.bytes_landed += len(content)
        super().write(kind, slot, offset, content, counted)

    def digest(self, kind: Kind, slot: int) -> bytes:
        self.num_digests += 1
        return super().digest(kind, slot)
