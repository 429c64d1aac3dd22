"""The storage tier of a host-cache without a folder: nothing is ever here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.storage_values import (
    NOTHING_STORED,
    StorageEffect,
    StorageStatistics,
    StorageUnit,
    StoredGroup,
)
from ferryman.tiers.values import Residency, UnitName, UnitStored
from ferryman_hostcache.storage.tier import OfferedUnit, UnitRead


class NoStorage:
    """Answers every question at once: nothing, none, no."""

    def attach(self, manifest: StateManifest) -> None:
        """There is nothing to make visible."""

    def lookup(self, keys: Sequence[PageKey]) -> Residency:
        return Residency(0, {})

    def holdings(self) -> Iterator[UnitStored]:
        return iter(())

    def lease(
        self, lease_id: str, keys: Sequence[PageKey], names: Iterable[UnitName]
    ) -> tuple[StorageUnit, ...]:
        return ()

    def renew(self, lease_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(lease_ids)

    def release(self, lease_id: str) -> None:
        """There are no leases."""

    async def read(self, reads: Sequence[UnitRead]) -> tuple[StorageUnit, ...]:
        return ()

    async def store(self, keys: Sequence[PageKey], units: Sequence[OfferedUnit]) -> StoredGroup:
        return NOTHING_STORED

    def flush(self) -> int:
        return 0

    def drop(self, kind: Kind, key: PageKey) -> int:
        return 0

    def tick(self) -> None:
        """No time passes here."""

    def statistics(self) -> StorageStatistics:
        return StorageStatistics({})

    def drain_effects(self) -> tuple[StorageEffect, ...]:
        return ()
