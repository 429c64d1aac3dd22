"""A host tier without processes: the real store's decisions over bytes in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.tiers.layout import ArenaLayout, PoolRegion
from ferryman.tiers.store import HostStore
from ferryman.tiers.values import ReserveRequest, StoreLimits, UnitName, WorkerLife
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.copy_pace import ALL_AT_ONCE, CopyPace

ME = WorkerLife("decode-00000001", 1)


class StoredHost:
    """A host-cache as a worker's backups see it. `offered` has the units of every offer; the next
    `num_failing` offers fail. `paths` has the last key of each."""

    def __init__(self, manifest: StateManifest, slots: Mapping[Kind, int]) -> None:
        self._manifest, self._slots = manifest, slots
        self._numbers = count(1)
        self.num_attaches = self.num_times_usable = 0
        self.node_id = "local"
        self.num_failing = 0
        self.offered: list[list[UnitName]] = []
        self.paths: list[PageKey] = []
        self.content: dict[tuple[Kind, PageKey], bytes] = {}
        self.restart()

    def restart(self) -> None:
        """Another life, and empty."""
        regions, offset = {}, 0
        for kind, num_slots in self._slots.items():
            slot_bytes = self._manifest.layout(kind).slot_bytes
            regions[kind] = PoolRegion(offset, slot_bytes, num_slots)
            offset += slot_bytes * num_slots
        self.store_ = HostStore(self._manifest, ArenaLayout(regions), StoreLimits())
        self.content.clear()
        self.num_attaches += 1
        self.num_times_usable += 1

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
        pace: CopyPace = ALL_AT_ONCE,
    ) -> int | None:
        sources = {(unit.kind, unit.page_index): unit for unit in units}
        self.offered.append(list(sources))
        self.paths.append(keys[-1])
        if not self.node_id or self.num_failing:
            self.num_failing = max(0, self.num_failing - 1)
            return None
        asked: dict[Kind, list[int]] = {}
        for kind, page in sources:
            asked.setdefault(kind, []).append(page)
        lease_id = f"lease-{next(self._numbers)}"
        room = self.store_.reserve(ReserveRequest(lease_id, ME, keys, asked), 0.0)
        digests: dict[UnitName, bytes] = {}
        sizes = [unit.num_bytes for unit in room]
        while len(digests) < len(room):
            first = len(digests)
            for unit in room[first : first + await pace.next_run(sizes, first)]:
                content = bytearray(unit.num_bytes)
                name = unit.kind, unit.page_index
                digests[name] = sources[name].copy(memoryview(content))
                self.content[unit.kind, keys[unit.page_index]] = bytes(content)
        return self.store_.commit(lease_id, digests, 0.0) if room else 0

    def drop_chain(self, first: PageKey) -> None:
        self.store_.drop_chain(first)

    def usable_pages(self, keys: Sequence[PageKey]) -> int:
        return self.store_.lookup(keys).usable_pages
