"""Requests, answers and effects of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle
from ferryman.cache.units import HostUnit, Tier

UnitName = tuple[Kind, int]


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One process of a worker, which maps the arena."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """A reader's request. `have_pages` full pages are on its device; it wants resume points above
    `min_pages` and at `max_pages` at most."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    have_pages: int
    min_pages: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class AcquireGrant:
    """Leased units; a lease exists when there are any. `usable_pages` is 0 without resume point."""

    usable_pages: int
    units: tuple[HostUnit, ...]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request to copy these units of the chain, as far as they are here."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    names: Sequence[UnitName]


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """A writer's offer: pages of `keys` per kind, a recurrent unit at the page it ends."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    units: Mapping[Kind, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ReservedUnit:
    """A place in the arena for one unit."""

    kind: Kind
    page_index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """The units of a chain that are here, without a lease: pages per kind, ascending."""

    usable_pages: int
    pages: Mapping[Kind, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """One unit in a tier: the `index`-th slot of its pool in its `generation`, or the `index`-th
    unit of the extent whose number is `generation`. It begins at `offset` of the arena or extent.

    `digest` is the xxh3-128 of its bytes, taken when they left the device.
    """

    kind: Kind
    page_index: int
    key: PageKey
    num_bytes: int
    digest: bytes
    generation: int
    index: int
    offset: int

    @property
    def handle(self) -> SlotHandle:
        """Its handle in the tier's tree."""
        return SlotHandle(self.kind, self.index, self.generation)


@dataclass(frozen=True, slots=True)
class UnitStored:
    """A unit became visible; `root` is the key of its chain's first page."""

    kind: Kind
    key: PageKey
    root: PageKey
    num_bytes: int
    digest: bytes
    generation: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class UnitForgotten:
    """A unit is no longer here."""

    kind: Kind
    key: PageKey
    root: PageKey
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class EvictionRefused:
    """`num_slots` slots could not be freed because all remaining units are leased."""

    kind: Kind
    num_slots: int


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds on what one store keeps track of, and how long a lease lives without renewal."""

    lease_seconds: float = 5.0
    max_leases: int = 4096
    max_reservations: int = 256
    max_released_names: int = 4096


@dataclass(frozen=True, slots=True)
class KindStatistics:
    """total = free + resident + reserved + leaving (dropped while a reader had a lease)."""

    total: int
    free: int
    resident: int
    reserved: int
    leased: int
    leaving: int


@dataclass(frozen=True, slots=True)
class UnitCounts:
    """Units and bytes of one kind in one tier, and counts of units since the start. A hit is a
    unit that was leased to a reader; a truncated unit was left out of a stored group for lack of
    room."""

    num_units: int = 0
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_truncated: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts for gauges and the ledger. Hits and misses count readers, all others count units."""

    kinds: Mapping[Kind, KindStatistics]
    num_leases: int
    num_reservations: int
    num_quarantined: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_corrupt: int
