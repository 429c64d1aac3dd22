"""The interface of a storage tier for the host-cache. Used from the event loop only.

Every method except `read` and `store` returns at once. Failures of the medium raise no error: a
unit that cannot be read is a miss, one that cannot be written is not stored, and both are reported
as effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.storage_values import StorageStatistics, StoredGroup, TierEffect
from ferryman.tiers.values import Residency, StoredUnit, UnitName, UnitStored


@dataclass(frozen=True, slots=True)
class OfferedUnit:
    """A unit to be stored. `memory` must not change until `store` has returned; `digest` is the
    xxh3-128 of its bytes, and bytes with another digest are not stored."""

    kind: Kind
    page_index: int
    memory: memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class UnitRead:
    """A leased unit and the memory for its bytes, which only gets verified bytes."""

    unit: StoredUnit
    memory: memoryview


class StorageTier(Protocol):
    """Units of one model's state in storage, stored in whole groups."""

    @property
    def term(self) -> int:
        """The number of this ownership, above all former ones, if other nodes can read what is
        stored; 0 if they cannot."""

    def attach(self, manifest: StateManifest) -> None:
        """Makes the stored units of this model visible; before, every lookup misses."""

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """The units of a chain that are here; marks nothing as used."""

    def holdings(self) -> Iterator[UnitStored]:
        """Every unit here, in the order of insertion; units dropped during the iteration are left
        out."""

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StoredUnit, ...]:
        """Keeps the named units that are here from eviction, and returns them.

        The lease lasts until `release`, or until its end if it is not renewed. There is no lease
        when none of the units is here. Raises LeaseLost when `lease_id` exists, QueueFull when too
        many do.
        """

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """Prolongs leases; returns those that are gone."""

    def release(self, lease_id: str) -> None:
        """Ends a lease: the reader no longer reads under this name. An unknown name is fine."""

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StoredUnit, ...]:
        """Reads bytes into memory; returns the units whose bytes are the ones stored."""

    async def store(self, keys: Sequence[PageKey], units: Sequence[OfferedUnit]) -> StoredGroup:
        """Stores one group under a chain as a whole: visible when all of it is stored.

        Full pages continue those that are here, so offer all that `lookup` does not list. Raises
        InvalidRequest when a unit's size is not the one in the manifest.
        """

    def flush(self) -> int:
        """Drops every unit without a reader; returns how many."""

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Drops a unit and what stands on it; returns how many, 0 when it is not here."""

    def drop_chain(self, first: PageKey) -> int:
        """Drops the chains that begin with a page, also while they are written; returns how many
        units."""

    def tick(self) -> None:
        """Ends leases whose time is over."""

    def statistics(self) -> StorageStatistics:
        """Counts for gauges."""

    def drain_effects(self) -> tuple[TierEffect, ...]:
        """The effects since the last call, in order."""
