"""Where slots lie, for whoever moves their bytes by address. No tensor is named here."""

from __future__ import annotations

from dataclasses import dataclass

HOST = -1


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Slot s of a slab lies at `address + s * slot_bytes`; `device` is HOST or a CUDA index."""

    address: int
    num_bytes: int
    slot_bytes: int
    device: int = HOST

    def address_of(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes
