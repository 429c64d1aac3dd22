"""Slabs: the one tensor of each pool, [num_slots, slot_bytes] of uint8.

A fresh slab holds 0xFF in every byte of its sections, which reads as NaN in every float dtype:
using a slot that was not initialised shows at once, in tests and in production alike. The bytes
between sections are zero in all slots of all workers, so digests do not depend on how a slot is
divided. A worker's slabs are poisoned as their slots are given (`SlabGrowth`): until it is written,
a slab on the host is address space.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind, KindLayout, StateManifest
from ferryman_kernels.cpu.huge_pages import HUGE_PAGE_BYTES, huge_memory

HOST = -1
POISON = 0xFF
# Enough for huge pages, and little enough for the event loop, on which slots are given: a
# millisecond at 2 GB/s, the rate of first touches on a slow machine.
STRETCH_BYTES = HUGE_PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlabAddress:
    """Slot s of a slab lies at `address + s * slot_bytes`; `device` is HOST or a CUDA index.

    For transports that move bytes by address."""

    address: int
    num_bytes: int
    slot_bytes: int
    device: int = HOST

    def address_of(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class ShardedSlab:
    """The slab of each rank for one kind: slot s of the model is slot s of every one of them.

    A model that is not divided has one rank.
    """

    ranks: tuple[SlabAddress, ...]

    @property
    def num_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self.ranks)


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
        cls,
        manifest: StateManifest,
        num_slots: Mapping[Kind, int],
        device: torch.device | str,
        *,
        is_filled: bool = True,
    ) -> Slabs:
        """Slabs for every kind of `manifest`, poisoned if `is_filled`; if not, slots hold anything
        until `fill_slab` has had them."""
        device, by_kind = torch.device(device), {}
        for kind in manifest.kinds:
            layout = manifest.layout(kind)
            shape = (num_slots[kind], layout.slot_bytes)
            slab = _on_host(kind, *shape) if device.type == "cpu" else _on(device, kind, *shape)
            if is_filled:
                fill_slab(slab.tensor, layout)
            by_kind[kind] = slab
        return cls(by_kind)

    @property
    def tensors(self) -> Mapping[Kind, Tensor]:
        return {kind: slab.tensor for kind, slab in self.by_kind.items()}

    @property
    def num_bytes(self) -> int:
        return sum(slab.tensor.numel() for slab in self.by_kind.values())

    def bytes_of(self, kind: Kind, slot: int) -> memoryview:
        """The bytes of one slot in place, writable. Host memory only."""
        return self.by_kind[kind].bytes_of(slot)


class SlabGrowth:
    """The slots of each slab that are poisoned, from 0 on. Slot 0 always is.

    The pool that gives a slot for the first time has it poisoned first. So nothing that uses a slot
    can come before its poison, neither a step nor a hand-off that writes from another process. An
    accelerator's memory is taken when it is allocated, so it is poisoned at once.

    A long prompt's memory takes a tenth of a second if first touches are slow. `prepare_ahead`
    does it on another thread, a stretch at a time, so that `prepare` waits for one at most.
    """

    def __init__(self, manifest: StateManifest, slabs: Slabs) -> None:
        """`slabs` are those of `manifest`, not filled."""
        self._manifest, self._slabs = manifest, slabs
        self._num_ready = dict.fromkeys(slabs.by_kind, 0)
        self._filling = Lock()
        for kind, slab in slabs.by_kind.items():
            if slab.num_slots:
                self._fill_to(kind, _first_stretch(slab))

    def prepare(self, kind: Kind, slot: int) -> int:
        """Poisons all slots below the end of the slot's stretch that are not yet; returns the
        number of poisoned slots."""
        slab = self._slabs.by_kind[kind]
        with self._filling:
            if slot >= self._num_ready[kind]:
                stretch = _stretch_slots(slab)
                self._fill_to(kind, min(slab.num_slots, (slot // stretch + 1) * stretch))
            return self._num_ready[kind]

    def prepare_ahead(self, slots: Mapping[Kind, int]) -> None:
        """The same for a slot of each kind, before they are given."""
        for kind, slot in slots.items():
            begun = self._num_ready[kind]
            while begun <= slot:
                begun = self.prepare(kind, begun)

    def _fill_to(self, kind: Kind, end: int) -> None:
        fresh = self._slabs.by_kind[kind].tensor[self._num_ready[kind] : end]
        fill_slab(fresh, self._manifest.layout(kind))
        self._num_ready[kind] = end


def fill_slab(slab: Tensor, layout: KindLayout) -> None:
    """Fills every section with poison and the gaps with zeros, in a slab or in some of its slots.
    Touches all of that memory."""
    if slab.device.type == "cpu" and slab.is_contiguous():
        # On the calling thread alone: torch's others are busy with steps.
        ctypes.memset(slab.data_ptr(), POISON, slab.numel())
    else:
        slab.fill_(POISON)
    end = 0
    for section in (*layout.sections, None):
        begin = layout.slot_bytes if section is None else section.offset
        slab[:, end:begin] = 0
        end = begin if section is None else begin + section.num_bytes


def places_of(ranks: Sequence[Mapping[Kind, Tensor]]) -> Mapping[Kind, ShardedSlab]:
    """The addresses of the slabs of all ranks, for transports that move bytes by address."""
    return {kind: ShardedSlab(tuple(_place_of(rank[kind]) for rank in ranks)) for kind in ranks[0]}


def _place_of(tensor: Tensor) -> SlabAddress:
    device = HOST if tensor.device.type == "cpu" else tensor.device.index or 0
    return SlabAddress(tensor.data_ptr(), tensor.numel(), tensor.shape[1], device)


def _on(device: torch.device, kind: Kind, num_slots: int, slot_bytes: int) -> Slab:
    tensor = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
    return Slab(kind, tensor, memoryview(b""))


def _on_host(kind: Kind, num_slots: int, slot_bytes: int) -> Slab:
    """Private memory in transparent huge pages, which are made as they are first written.

    Decode attention over 32,768 tokens reads huge pages 16 % faster than pages of 4 KiB.
    """
    num_bytes = num_slots * slot_bytes
    if num_bytes == 0:
        return Slab(kind, torch.empty((num_slots, slot_bytes), dtype=torch.uint8), memoryview(b""))
    content = huge_memory(num_bytes)
    tensor = torch.frombuffer(content, dtype=torch.uint8).view(num_slots, slot_bytes)
    return Slab(kind, tensor, content)


def _first_stretch(slab: Slab) -> int:
    on_host = slab.tensor.device.type == "cpu"
    return min(slab.num_slots, _stretch_slots(slab)) if on_host else slab.num_slots


def _stretch_slots(slab: Slab) -> int:
    return max(1, STRETCH_BYTES // slab.slot_bytes)
