"""Slabs: the one tensor behind each pool, [num_slots, slot_bytes] of uint8.

A fresh slab holds 0xFF in every byte of its sections, which reads as NaN in every float dtype:
using a slot that was not initialised shows at once, in tests and in production alike. The bytes
between sections are zero in all slots of all workers, so digests do not depend on how a slot is
divided.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman.engine.slab_address import HOST, SlabAddress

POISON = 0xFF
HUGE_PAGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Slab:
    """The bytes of one pool. `memory` is the same bytes for the host; empty on an accelerator."""

    kind: Kind
    tensor: Tensor
    memory: memoryview

    @property
    def num_slots(self) -> int:
        return self.tensor.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self.tensor.shape[1]

    def bytes_of(self, slot: int) -> memoryview:
        """The slot's bytes in place, writable. Host memory only."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"the {self.kind} slab has no slot {slot} of {self.num_slots}")
        if not self.memory:
            raise TypeError(f"the {self.kind} slab lies on {self.tensor.device}, not on the host")
        return self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


@dataclass(frozen=True, slots=True)
class Slabs:
    """One slab per state kind of a model."""

    by_kind: Mapping[Kind, Slab]

    @classmethod
    def allocate(
        cls, manifest: StateManifest, num_slots: Mapping[Kind, int], device: torch.device | str
    ) -> Slabs:
        """Slabs for every kind of `manifest`, prefaulted and poisoned."""
        device, by_kind = torch.device(device), {}
        for kind in manifest.kinds:
            layout = manifest.layout(kind)
            shape = (num_slots[kind], layout.slot_bytes)
            slab = _on_host(kind, *shape) if device.type == "cpu" else _on(device, kind, *shape)
            fill_slab(slab.tensor, layout)
            by_kind[kind] = slab
        return cls(by_kind)

    @property
    def tensors(self) -> Mapping[Kind, Tensor]:
        return {kind: slab.tensor for kind, slab in self.by_kind.items()}

    @property
    def places(self) -> Mapping[Kind, SlabAddress]:
        """The addresses of the slabs, for transports that move bytes by address."""
        return {kind: _place_of(slab.tensor) for kind, slab in self.by_kind.items()}

    @property
    def num_bytes(self) -> int:
        return sum(slab.tensor.numel() for slab in self.by_kind.values())

    def bytes_of(self, kind: Kind, slot: int) -> memoryview:
        """The bytes of one slot in place, writable. Host memory only."""
        return self.by_kind[kind].bytes_of(slot)


def fill_slab(slab: Tensor, layout: KindLayout) -> None:
    """Fills every section with poison and the gaps with zeros. Touches all memory of the slab."""
    slab.fill_(POISON)
    end = 0
    for section in (*layout.sections, None):
        begin = layout.slot_bytes if section is None else section.offset
        slab[:, end:begin] = 0
        end = begin if section is None else begin + section.num_bytes


def _place_of(tensor: Tensor) -> SlabAddress:
    device = HOST if tensor.device.type == "cpu" else tensor.device.index or 0
    return SlabAddress(tensor.data_ptr(), tensor.numel(), tensor.shape[1], device)


def _on(device: torch.device, kind: Kind, num_slots: int, slot_bytes: int) -> Slab:
    tensor = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
    return Slab(kind, tensor, memoryview(b""))


def _on_host(kind: Kind, num_slots: int, slot_bytes: int) -> Slab:
    """Private memory in transparent huge pages; filling it allocates its pages (`fill_slab`).

    Measured with 4 KiB pages first touch runs at 2.7 GB/s, with huge pages at 15 (performance.md).
    """
    num_bytes = num_slots * slot_bytes
    if num_bytes == 0:
        return Slab(kind, torch.empty((num_slots, slot_bytes), dtype=torch.uint8), memoryview(b""))
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise_huge_pages(region)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    tensor = whole[begin : begin + num_bytes].view(num_slots, slot_bytes)
    return Slab(kind, tensor, memoryview(region)[begin : begin + num_bytes])


def _advise_huge_pages(region: mmap.mmap) -> None:
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them: slower to fault in, otherwise the same
        return
