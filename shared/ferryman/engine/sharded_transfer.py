"""Bytes in and out of slots that the ranks of a worker share: each slot is the whole model's.

Reading gathers, writing scatters (`cache/shards.py`). What others wrote to their share is there
when their step has been answered, and what is written here is there before they are told of the
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.cache.shards import Recut, Run
from ferryman.engine.transfer import (
    check_digest,
    check_fits,
    check_size,
    copied,
    digest_of,
)


class ShardedTransfer:
    """`slabs[rank][kind]` are the ranks' own; `recuts[kind]` says how they make up a slot."""

    def __init__(
        self, recuts: Mapping[Kind, Recut], slabs: Sequence[Mapping[Kind, Tensor]]
    ) -> None:
        self._recuts = recuts
        self._slabs = slabs

    def read(self, kind: Kind, slot: int) -> memoryview:
        """A copy of the slot's bytes; zero where the layout has none."""
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        whole = torch.zeros(cut.slot_bytes, dtype=torch.uint8)
        for run in cut.gathered:
            whole[run.offset : run.end].copy_(_part(shares, run))
        return memoryview(whole.numpy().data)

    def write(self, kind: Kind, slot: int, offset: int, content: bytes | memoryview) -> None:
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        check_fits(kind, offset, len(content), cut.slot_bytes)
        runs = cut.scattered_within(offset, offset + len(content))
        _scatter(shares, runs, torch.frombuffer(bytearray(content), dtype=torch.uint8), offset)

    def digest(self, kind: Kind, slot: int) -> bytes:
        return digest_of(self.read(kind, slot))

    def store_unit(self, kind: Kind, slot: int, arena: memoryview) -> bytes:
        check_size(kind, len(arena), self._recuts[kind].slot_bytes)
        return copied(arena, self.read(kind, slot))

    def load_unit(self, kind: Kind, slot: int, arena: memoryview, digest: bytes) -> None:
        """Verified in memory of our own: bytes that are not `digest`'s never reach a slot."""
        cut, shares = self._recuts[kind], self._shares(kind, slot)
        check_size(kind, len(arena), cut.slot_bytes)
        arrived = torch.empty(cut.slot_bytes, dtype=torch.uint8)
        check_digest(kind, slot, copied(memoryview(arrived.numpy().data), arena), digest)
        _scatter(shares, cut.scattered, arrived, 0)

    def _shares(self, kind: Kind, slot: int) -> list[Tensor]:
        """The slot's bytes at each rank."""
        num_slots = self._slabs[0][kind].shape[0]
        if not 0 <= slot < num_slots:
            raise IndexError(f"the {kind} slabs have no slot {slot} of {num_slots}")
        return [slabs[kind][slot] for slabs in self._slabs]


def _part(shares: Sequence[Tensor], run: Run) -> Tensor:
    return shares[run.rank][run.rank_offset : run.rank_offset + run.num_bytes]


def _scatter(shares: Sequence[Tensor], runs: Iterable[Run], content: Tensor, at: int) -> None:
    """`content` are the bytes of a whole slot from `at` on."""
    for run in runs:
        _part(shares, run).copy_(content[run.offset - at : run.end - at])
