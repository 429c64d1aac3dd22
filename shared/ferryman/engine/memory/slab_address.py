"""The addresses of slots, for transports that move their bytes by address. Uses no tensor."""

from __future__ import annotations

from dataclasses import dataclass

HOST = -1


@dataclass(frozen=True, slots=True)
class SlabAddress:
    """Slot s of a slab lies at `address + s * slot_bytes`; `device` is HOST or a CUDA index."""

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
