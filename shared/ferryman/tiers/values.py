"""What the store is asked, what it answers, and what it wants others to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit, Tier

UnitName = tuple[Kind, int]


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One life of one worker that maps the arena."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AcquireAsk:
    """A reader's wish. `have_pages` full pages are on its device; resume points of interest lie
    above `min_pages` and at `max_pages` at most."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    have_pages: int
    min_pages: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Leased units; a lease exists when there are any. `usable_pages` is 0 without resume point."""

    usable_pages: int
    units: tuple[HostUnit, ...]


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A copier's wish: just these units of the chain, as far as they are here."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    names: Sequence[UnitName]


@dataclass(frozen=True, slots=True)
class ReserveAsk:
    """A writer's offer: pages of `keys` per kind, a recurrent unit at the page it ends."""

    lease_id: str
    worker: WorkerLife
    keys: Sequence[PageKey]
    units: Mapping[Kind, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ReservedUnit:
    """Room in the arena for one unit."""

    kind: Kind
    page_index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """What is here of a chain, without any lease: pages per kind, ascending."""

    usable_pages: int
    pages: Mapping[Kind, tuple[int, ...]]


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
    """So many slots could not be had: what is left is leased."""

    kind: Kind
    num_slots: int


Effect = UnitStored | UnitForgotten | EvictionRefused


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
class KindCounts:
    """Units of one kind since the start. A hit is a unit that was leased to a reader."""

    num_hits: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts for gauges and the ledger. Hits and misses are readers', all else is units'."""

    kinds: Mapping[Kind, KindStatistics]
    num_leases: int
    num_reservations: int
    num_quarantined: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_corrupt: int
