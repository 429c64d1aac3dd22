"""What the host-cache asks of a storage tier. All of it is touched from the event loop only.

Every method but `read` and `store` returns at once. Nothing here fails on account of the disk: what
cannot be read is a miss, what cannot be written is not stored, and both are told as effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.storage_values import (
    StorageEffect,
    StorageStatistics,
    StorageUnit,
    StoredGroup,
)
from ferryman.tiers.values import Residency, UnitName, UnitStored


@dataclass(frozen=True, slots=True)
class OfferedUnit:
    """A unit to be stored. `memory` stays as it is until `store` has returned; `digest` is the
    xxh3-128 of its bytes, and bytes that have another are not stored."""

    kind: Kind
    page_index: int
    memory: memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class UnitRead:
    """A leased unit and where its bytes go; `memory` is written only with bytes that verified."""

    unit: StorageUnit
    memory: memoryview


class StorageTier(Protocol):
    """Units of one model's state on a disk, and whole groups of them at a time."""

    def attach(self, manifest: StateManifest) -> None:
        """Make visible what the folder holds of this model; before, everything is a miss."""

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        """What is here of a chain; touches nothing."""

    def holdings(self) -> Iterator[UnitStored]:
        """Everything here, in the order in which it came; what goes while this is read is not."""

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StorageUnit, ...]:
        """Keep from eviction those of the units named that are here, and say which they are.

        Until `release`, or the lease's end if it is not renewed. No lease where none is here.
        Raises LeaseLost when `lease_id` exists, QueueFull when too many do.
        """

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        """Prolong leases; says which are gone."""

    def release(self, lease_id: str) -> None:
        """The reader reads no more under this name; a name unknown is fine."""

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StorageUnit, ...]:
        """Bring bytes into memory; answers those units whose bytes are the ones stored."""

    async def store(self, keys: Sequence[PageKey], units: Sequence[OfferedUnit]) -> StoredGroup:
        """Store one group under a chain as a whole: visible when all of it is on disk.

        Full pages attach where those here end, so offer all that `lookup` does not list. Raises
        InvalidRequest when a unit has not the bytes that the manifest gives its kind.
        """

    def flush(self) -> int:
        """Give up all that nobody reads; how many units went."""

    def drop(self, kind: Kind, key: PageKey) -> int:
        """Give up a unit and what stands on it; how many went. 0 when it is not here."""

    def tick(self) -> None:
        """Ends leases whose time is over."""

    def statistics(self) -> StorageStatistics:
        """Counts for gauges."""

    def drain_effects(self) -> tuple[StorageEffect, ...]:
        """What happened since the last call, in order."""
