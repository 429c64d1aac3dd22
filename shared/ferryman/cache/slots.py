"""Slots and the leases that keep them alive: pools, holders, generations.

A slot is free exactly when it has no lease. Its generation grows by one at every allocation, so a
handle that is older than the slot's present use raises an error instead of reading the state of
another request.

    total = free + leased        (checked by `check_integrity`, printed by `ledger`)

A slot is what vLLM calls a KV cache block; a lease is its ref count, SGLang's lock ref.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ferryman.cache.manifest import Kind


class Role(StrEnum):
    """The reason why a slot is kept."""

    REQUEST = "request"
    TREE = "tree"
    STORE = "device_to_host"
    LOAD = "host_to_device"
    TRANSFER_IN = "transfer_in"
    TRANSFER_OUT = "transfer_out"
    SLOT_OP = "queued_slot_op"
    PROMPT_END = "prompt_end"
    AUDIT = "audit"


class Holder(NamedTuple):
    """One named party that may hold leases."""

    role: Role
    name: str


TREE = Holder(Role.TREE, "")

Demand = Mapping[Kind, int]


class SlotHandle(NamedTuple):
    """A slot as of one allocation."""

    kind: Kind
    slot: int
    generation: int


class SlotPart(NamedTuple):
    """The bytes [begin, end) of a slot."""

    kind: Kind
    slot: int
    begin: int
    end: int


class PieceCut(NamedTuple):
    """`num_bytes` of part `number` from `offset` on, for `place` of a piece."""

    number: int
    offset: int
    num_bytes: int
    place: int


def filled_pieces(sizes: Sequence[int], piece_bytes: int) -> Iterator[list[PieceCut]]:
    """The cuts of each piece, from parts of so many bytes in their order: all pieces but the last
    are full."""
    cuts, used = list[PieceCut](), 0
    for number, size in enumerate(sizes):
        offset = 0
        while offset < size:
            num_bytes = min(size - offset, piece_bytes - used)
            cuts.append(PieceCut(number, offset, num_bytes, used))
            offset, used = offset + num_bytes, used + num_bytes
            if used == piece_bytes:
                yield cuts
                cuts, used = [], 0
    if cuts:
        yield cuts


class StaleHandle(Exception):
    """The slot of a handle was allocated again since."""

    def __init__(self, handle: SlotHandle, current: int) -> None:
        super().__init__(
            f"{handle.kind} slot {handle.slot}: the handle is of generation {handle.generation}, "
            f"the slot is at {current}"
        )
        self.handle = handle
        self.current = current


class LeaseError(Exception):
    """The released lease is not held, or the slot to lease is free."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The slots of one pool by role; a slot with several holders counts for each of their roles."""

    total: int
    free: int
    leased: int
    by_role: Mapping[str, int]

    @property
    def balances(self) -> bool:
        return self.total == self.free + self.leased


Prepare = Callable[[Kind, int], int]
"""Makes the memory of a slot ready before the slot is given for the first time; returns the number
of slots of that pool, from 0 on, that are ready now: without that slot if memory is short."""


def is_ready(kind: Kind, slot: int) -> int:
    """The `Prepare` of memory that is ready as a whole."""
    return slot + 1


class SlotPool:
    """Fixed-size slots of one kind, with their free list. The slot freed last is reused first: its
    memory is likely still in the processor's cache. Among fresh slots the lowest is given first,
    so memory is used from its beginning on. If it ends too early, the pool ends there too."""

    def __init__(self, kind: Kind, num_slots: int, prepare: Prepare = is_ready) -> None:
        self.kind = kind
        self.num_slots = num_slots
        self._prepare, self._num_ready = prepare, 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._holders: list[list[Holder]] = [[] for _ in range(num_slots)]
        # Counted as leases come and go, because each heartbeat asks for them: a walk over 65,536
        # leased slots held up the event loop for 26 ms.
        self._num_leased, self._num_by_role = 0, dict.fromkeys(Role, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_allocate(self, count: int, holder: Holder) -> tuple[SlotHandle, ...] | None:
        """Leases `count` fresh slots to `holder`; takes none and returns None if fewer are free."""
        if not self.make_ready(count):
            return None
        handles = tuple(self._allocate_one(holder) for _ in range(count))
        self._num_leased += count
        self._num_by_role[holder.role] += count
        return handles

    def make_ready(self, count: int) -> bool:
        """Whether `count` slots are free; prepares the memory of those that are given next."""
        if (last := self.last_fresh(count)) is not None:
            self._num_ready = self._prepare(self.kind, last)
            if last >= self._num_ready:
                self._end_at(self._num_ready)
        return count <= len(self._free)

    def last_fresh(self, count: int) -> int | None:
        """The last of the next `count` slots, if it was never given: its memory may not be there
        yet. None if all have memory, or fewer are free."""
        if not 0 < count <= len(self._free) or self._num_ready >= self.num_slots:
            return None
        last = max(self._free[-count:])
        return last if last >= self._num_ready else None

    def _end_at(self, num_slots: int) -> None:
        """Shortens the pool. No later slot was ever given, so none has a holder."""
        self.num_slots = num_slots
        self._free = [slot for slot in self._free if slot < num_slots]

    def _allocate_one(self, holder: Holder) -> SlotHandle:
        slot = self._free.pop()
        self._generations[slot] += 1
        self._holders[slot].append(holder)
        return SlotHandle(self.kind, slot, self._generations[slot])

    def lease(self, handle: SlotHandle, holder: Holder) -> None:
        """Adds a holder. Raises StaleHandle, or LeaseError when the slot is free."""
        holders = self._current(handle)
        if not holders:
            raise LeaseError(f"{handle} is free and cannot be leased to {holder}")
        self._add(holders, holder)

    def release(self, handle: SlotHandle, holder: Holder) -> bool:
        """Drops one lease; True when that freed the slot. Raises LeaseError if it is not held."""
        holders = self._current(handle)
        if holder not in holders:
            raise LeaseError(f"{holder} holds no lease on {handle}; its holders are {holders}")
        self._drop(holders, holder)
        if holders:
            return False
        self._num_leased -= 1
        self._free.append(handle.slot)
        return True

    def move(self, handle: SlotHandle, giver: Holder, taker: Holder) -> None:
        """Gives one lease of `giver` to `taker`: a slot is donated, and nothing is copied."""
        holders = self._current(handle)
        if giver not in holders:
            raise LeaseError(f"{giver} holds no lease on {handle} to give to {taker}")
        self._drop(holders, giver)
        self._add(holders, taker)

    def _add(self, holders: list[Holder], holder: Holder) -> None:
        for other in holders:
            if other.role is holder.role:
                break
        else:
            self._num_by_role[holder.role] += 1
        holders.append(holder)

    def _drop(self, holders: list[Holder], holder: Holder) -> None:
        holders.remove(holder)
        for other in holders:
            if other.role is holder.role:
                break
        else:
            self._num_by_role[holder.role] -= 1

    def holders(self, handle: SlotHandle) -> tuple[Holder, ...]:
        return tuple(self._current(handle))

    def _current(self, handle: SlotHandle) -> list[Holder]:
        current = self._generations[handle.slot]
        if handle.generation != current:
            raise StaleHandle(handle, current)
        return self._holders[handle.slot]

    def leases(self) -> Iterator[tuple[SlotHandle, Holder]]:
        """Every lease of the pool. Walks all slots."""
        for slot, holders in enumerate(self._holders):
            for holder in holders:
                yield SlotHandle(self.kind, slot, self._generations[slot]), holder

    def ledger(self) -> Ledger:
        by_role = {role.value: count for role, count in self._num_by_role.items() if count}
        return Ledger(
            self.num_slots, self.num_free, self._num_leased, dict(sorted(by_role.items()))
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless free and leased slots add up and no slot is both."""
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.kind}: a slot is free twice"
        leased = {slot for slot, holders in enumerate(self._holders) if holders}
        assert not free & leased, f"{self.kind}: free and leased: {sorted(free & leased)}"
        assert len(free) + len(leased) == self.num_slots, f"{self.kind}: slots are missing"
        assert self._num_leased == len(leased), f"{self.kind}: the ledger counts other slots"


class Pools:
    """The pools of all kinds of one model; a demand is met in all of them or in none."""

    def __init__(self, sizes: Demand, prepare: Prepare = is_ready) -> None:
        self.by_kind = {kind: SlotPool(kind, size, prepare) for kind, size in sizes.items()}

    def __getitem__(self, kind: Kind) -> SlotPool:
        return self.by_kind[kind]

    def shortage(self, demand: Demand) -> dict[Kind, int]:
        """The number of missing slots of each kind; empty when the demand fits."""
        lacks = {kind: count - self.by_kind[kind].num_free for kind, count in demand.items()}
        return {kind: lack for kind, lack in lacks.items() if lack > 0}

    def last_fresh(self, demand: Demand) -> dict[Kind, int]:
        """The last slot of each kind that the demand would take, if it was never given before."""
        last = {kind: self.by_kind[kind].last_fresh(count) for kind, count in demand.items()}
        return {kind: slot for kind, slot in last.items() if slot is not None}

    def try_allocate(
        self, demand: Demand, holder: Holder
    ) -> dict[Kind, tuple[SlotHandle, ...]] | None:
        """Leases the whole demand to `holder` in one transaction, or nothing, and returns None."""
        if self.shortage(demand):
            return None
        # All kinds are made ready before any is leased: memory may be too short for the last.
        ready = [self.by_kind[kind].make_ready(count) for kind, count in demand.items()]
        if not all(ready):
            return None
        return {
            kind: self.by_kind[kind].try_allocate(count, holder) or ()
            for kind, count in demand.items()
        }

    def lease(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        for handle in handles:
            self.by_kind[handle.kind].lease(handle, holder)

    def release(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        for handle in handles:
            self.by_kind[handle.kind].release(handle, holder)

    def move(self, handles: Iterable[SlotHandle], giver: Holder, taker: Holder) -> None:
        for handle in handles:
            self.by_kind[handle.kind].move(handle, giver, taker)

    def leases(self) -> Iterator[tuple[SlotHandle, Holder]]:
        """Every lease of every pool."""
        for pool in self.by_kind.values():
            yield from pool.leases()

    def ledgers(self) -> dict[Kind, Ledger]:
        return {kind: pool.ledger() for kind, pool in self.by_kind.items()}

    def check_integrity(self) -> None:
        for pool in self.by_kind.values():
            pool.check_integrity()
