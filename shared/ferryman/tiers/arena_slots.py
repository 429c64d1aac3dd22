"""The slots of an arena: the place of each unit, the holders of each slot, the free slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
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
from ferryman.tiers.layout import ArenaLayout
from ferryman.tiers.unit_group import Group, demand_of
from ferryman.tiers.values import KindStatistics, ReservedUnit, StoredUnit, UnitName


class ArenaSlots:
    """A pool of slots for each kind, each slot at its place in the arena."""

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
