"""The split of an arena of a given size over the kinds of one model's state, and its slots.

| full slots ............ | window slots .. | recurrent slots .... |      each part page-aligned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.slots import (
    TREE,
    Demand,
    Holder,
    Pools,
    Prepare,
    Role,
    SlotHandle,
    is_ready,
)
from ferryman.errors import ConfigError
from ferryman.tiers.unit_group import Group, demand_of
from ferryman.tiers.values import KindStatistics, ReservedUnit, StoredUnit, UnitName

REGION_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """The part of the arena that holds all slots of one kind."""

    offset: int
    slot_bytes: int
    num_slots: int

    def offset_of(self, slot: int) -> int:
        return self.offset + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The places of the slots of every kind."""

    regions: Mapping[Kind, PoolRegion]

    @property
    def num_slots(self) -> dict[Kind, int]:
        return {kind: region.num_slots for kind, region in self.regions.items()}

    def offset_of(self, kind: Kind, slot: int) -> int:
        return self.regions[kind].offset_of(slot)

    def slot_bytes(self, kind: Kind) -> int:
        return self.regions[kind].slot_bytes


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """The share of one kind in the arena."""

    kind: Kind
    num_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The split of one total, and its capacity in tokens (full pages) and in snapshots."""

    pools: tuple[PoolBudget, ...]
    num_tokens: int
    num_snapshots: int

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools)


def budget_of(manifest: StateManifest, layout: ArenaLayout) -> Budget:
    """The budget of a layout. A model without full pages counts its window pages as tokens."""
    slots = layout.num_slots
    paged = next((kind for kind in (Kind.FULL, Kind.WINDOW) if kind in slots), None)
    return Budget(
        tuple(PoolBudget(kind, n * layout.slot_bytes(kind), n) for kind, n in slots.items()),
        slots[paged] * manifest.page_size if paged else 0,
        slots.get(Kind.RECURRENT, 0),
    )


# Default share of an arena for snapshots: half.
SNAPSHOT_SHARE = 0.5
# Full and window pages divide the rest of the arena by these weights. Window pages are needed only
# near resume points.
PAGE_WEIGHTS = {Kind.FULL: 1.0, Kind.WINDOW: 0.25}


def split_arena(manifest: StateManifest, arena_bytes: int, snapshot_share: float) -> ArenaLayout:
    """`snapshot_share` is the part for snapshots. Raises ConfigError if a kind gets no slot."""
    shares = kind_shares(manifest.kinds, snapshot_share)
    regions, offset = {}, 0
    for kind in manifest.kinds:
        slot_bytes = manifest.layout(kind).slot_bytes
        region_bytes = int(arena_bytes * shares[kind])
        region_bytes -= region_bytes % REGION_ALIGNMENT
        regions[kind] = PoolRegion(offset, slot_bytes, region_bytes // slot_bytes)
        offset += region_bytes
    _check(regions, arena_bytes)
    return ArenaLayout(regions)


def kind_shares(kinds: Sequence[Kind], snapshot_share: float) -> dict[Kind, float]:
    """Shares that add up to 1. Without pages, or without snapshots, the others get everything."""
    weights = {kind: PAGE_WEIGHTS[kind] for kind in kinds if kind in PAGE_WEIGHTS}
    if Kind.RECURRENT not in kinds:
        snapshot_share = 0.0
    elif not weights:
        snapshot_share = 1.0
    rest = (1.0 - snapshot_share) / (sum(weights.values()) or 1.0)
    shares = {kind: weight * rest for kind, weight in weights.items()}
    return {kind: shares.get(kind, snapshot_share) for kind in kinds}


def _check(regions: Mapping[Kind, PoolRegion], arena_bytes: int) -> None:
    for kind, region in regions.items():
        if region.num_slots == 0:
            raise ConfigError(
                f"memory_bytes={arena_bytes} leaves no room for one {kind} unit of "
                f"{region.slot_bytes} bytes; raise it"
            )


class ArenaSlots:
    """A pool of slots for each kind, each slot at its place in the arena: the place of each unit,
    the holders of each slot, the free slots."""

    def __init__(self, layout: ArenaLayout, prepare: Prepare = is_ready) -> None:
        self.layout, self.pools = layout, Pools(layout.num_slots, prepare)

    # Slots of the tree.

    def is_unused(self, unit: SlotHandle) -> bool:
        return self.pools[unit.kind].holders(unit) == (TREE,)

    def give_back(self, units: Iterable[SlotHandle]) -> None:
        self.pools.release(units, TREE)

    # Places of units.

    def unit(self, name: UnitName, key: PageKey, slot: SlotHandle, digest: bytes) -> StoredUnit:
        """A unit whose bytes have been written to a slot."""
        room = self.room(name, slot)
        return StoredUnit(
            room.kind,
            room.page_index,
            key,
            room.num_bytes,
            digest,
            slot.generation,
            slot.slot,
            room.offset,
        )

    def room(self, name: UnitName, slot: SlotHandle) -> ReservedUnit:
        """The place in the arena for a unit to be written."""
        kind, page = name
        offset, num_bytes = self.layout.offset_of(kind, slot.slot), self.layout.slot_bytes(kind)
        return ReservedUnit(kind, page, offset, num_bytes)

    # Room for new units.

    def may_fit(self, demand: Demand, reused: Sequence[SlotHandle]) -> bool:
        """Whether the pools are large enough for `demand` and `reused` together."""
        kept = Counter(handle.kind for handle in reused)
        return all(
            count + kept[kind] <= self.pools[kind].num_slots for kind, count in demand.items()
        )

    def try_take(self, group: Group, holder: Holder) -> dict[UnitName, SlotHandle]:
        """A slot for each unit of a group; none unless there is one for each."""
        taken = self.pools.try_allocate(demand_of(group), holder) or {}
        free = {kind: iter(slots) for kind, slots in taken.items()}
        return {(kind, page): next(free[kind]) for kind, page in group} if taken else {}

    def free_slots(self) -> Mapping[Kind, int]:
        return {kind: self.pools[kind].num_free for kind in self.layout.regions}

    def statistics(self, kind: Kind) -> KindStatistics:
        """Reads every slot of the kind."""
        ledger = self.pools[kind].ledger()
        resident = ledger.by_role.get(Role.TREE, 0)
        reserved = ledger.by_role.get(Role.TRANSFER_IN, 0)
        leased = ledger.by_role.get(Role.LOAD, 0)
        leaving = ledger.leased - resident - reserved
        return KindStatistics(ledger.total, ledger.free, resident, reserved, leased, leaving)
