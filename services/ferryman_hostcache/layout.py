"""How an arena of a given size is split over the kinds of one model's state.

| full slots ............ | window slots .. | recurrent slots .... |      each part page-aligned
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.cache.capacity import SNAPSHOT_SHARE
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ConfigError

REGION_ALIGNMENT = 4096
WINDOW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Region:
    """The part of the arena that holds all slots of one kind."""

    offset: int
    slot_bytes: int
    num_slots: int

    def offset_of(self, slot: int) -> int:
        return self.offset + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where the slots of every kind lie."""

    regions: Mapping[Kind, Region]

    @property
    def num_slots(self) -> dict[Kind, int]:
        return {kind: region.num_slots for kind, region in self.regions.items()}

    def offset_of(self, kind: Kind, slot: int) -> int:
        return self.regions[kind].offset_of(slot)

    def slot_bytes(self, kind: Kind) -> int:
        return self.regions[kind].slot_bytes


def split_arena(manifest: StateManifest, arena_bytes: int) -> ArenaLayout:
    """Shares for snapshots and windows, the rest for pages. ConfigError if a kind gets no slot."""
    shares = {Kind.FULL: 1.0, Kind.WINDOW: WINDOW_SHARE, Kind.RECURRENT: SNAPSHOT_SHARE}
    whole = sum(shares[kind] for kind in manifest.kinds)
    regions, offset = {}, 0
    for kind in manifest.kinds:
        slot_bytes = manifest.layout(kind).slot_bytes
        region_bytes = int(arena_bytes * shares[kind] / whole)
        region_bytes -= region_bytes % REGION_ALIGNMENT
        regions[kind] = Region(offset, slot_bytes, region_bytes // slot_bytes)
        offset += region_bytes
    _check(regions, arena_bytes)
    return ArenaLayout(regions)


def _check(regions: Mapping[Kind, Region], arena_bytes: int) -> None:
    for kind, region in regions.items():
        if region.num_slots == 0:
            raise ConfigError(
                f"memory_bytes={arena_bytes} leaves no room for one {kind} unit of "
                f"{region.slot_bytes} bytes; raise it"
            )
