"""The index in memory, for tests of one process: the answers of Redis, without a socket."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.resume import resume_set
from ferryman.cache.units import Tier
from ferryman.wire.redis.bucket_folders import with_shared
from ferryman.wire.redis.index import (
    FolderClaim,
    IndexedUnit,
    IndexStatistics,
    NodeLife,
    NodePrefix,
)


class MemoryIndex:
    """A `PrefixIndex` in dictionaries. While `is_away` is set it does not answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_away = False
        self._clock = clock
        self._ends: dict[NodeLife, float] = {}
        self._held: defaultdict[NodeLife, dict[tuple[Kind, PageKey, Tier], IndexedUnit]]
        self._held = defaultdict(dict)
        self._num_hits, self._num_misses, self._num_misses_away = 0, 0, 0

    async def announce(self, node: NodeLife, ttl_seconds: float) -> bool:
        known = [end for life, end in self._ends.items() if life.node_id == node.node_id]
        for life in [life for life in self._ends if life.node_id == node.node_id]:
            del self._ends[life]
        self._ends[node] = self._clock() + ttl_seconds
        return not self.is_away and any(self._clock() < end for end in known)

    async def claim(self, folder: NodeLife, ttl_seconds: float) -> FolderClaim:
        terms = [each.epoch for each in self._ends if each.node_id == folder.node_id]
        if not self.is_away and any(term > folder.epoch for term in terms):
            return FolderClaim.SUPERSEDED
        await self.announce(folder, ttl_seconds)
        is_known = not self.is_away and folder.epoch in terms
        return FolderClaim.KNOWN if is_known else FolderClaim.NEW

    async def withdraw(self, node: NodeLife) -> None:
        self._ends.pop(node, None)

    async def commit(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[IndexedUnit]
    ) -> None:
        self._held[node].update({(unit.kind, unit.key, tier): unit for unit in units})

    async def forget(
        self, node: NodeLife, root: PageKey, tier: Tier, units: Sequence[tuple[Kind, PageKey]]
    ) -> None:
        for kind, key in units:
            self._held[node].pop((kind, key, tier), None)

    async def usable_pages(
        self, chain: Sequence[PageKey], shape: ResumeShape
    ) -> Mapping[str, NodePrefix]:
        if self.is_away:
            self._num_misses_away += 1
            return {}
        living = [node for node, end in self._ends.items() if self._clock() < end]
        holdings = [
            NodePrefix(
                node,
                self._depth(node, chain, shape, (Tier.HOST, Tier.STORAGE)),
                self._depth(node, chain, shape, (Tier.HOST,)),
            )
            for node in living
        ]
        found = {one.node.node_id: one for one in holdings if one.usable_pages}
        self._num_hits += bool(found)
        self._num_misses += not found
        return with_shared(found, living)

    def _depth(
        self, node: NodeLife, chain: Sequence[PageKey], shape: ResumeShape, tiers: tuple[Tier, ...]
    ) -> int:
        pages = {key: page for page, key in enumerate(chain)}
        held: defaultdict[Kind, set[int]] = defaultdict(set)
        for kind, key, tier in self._held[node]:
            if key in pages and tier in tiers:
                held[kind].add(pages[key])
        return usable_depth(len(chain), shape, held)

    async def digests(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], frozenset[bytes]]:
        held = self._held[node]
        found = {
            unit: frozenset(held[*unit, tier].digest for tier in Tier if (*unit, tier) in held)
            for unit in units
        }
        return {} if self.is_away else {unit: said for unit, said in found.items() if said}

    async def stored_units(
        self, node: NodeLife, root: PageKey, units: Sequence[tuple[Kind, PageKey]]
    ) -> Mapping[tuple[Kind, PageKey], IndexedUnit]:
        held = {} if self.is_away else self._held[node]
        stored = ((unit, held.get((*unit, Tier.STORAGE))) for unit in units)
        return {unit: each for unit, each in stored if each}

    def statistics(self) -> IndexStatistics:
        return IndexStatistics(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_misses_away=self._num_misses_away,
            is_away=self.is_away,
        )


def usable_depth(chain_len: int, shape: ResumeShape, held: Mapping[Kind, set[int]]) -> int:
    """The deepest page end at which a resume set is held; `held` has page indexes by kind.

    Simple and slow: the definition that the script in Redis must agree with.
    """
    nothing: set[int] = set()
    full, window = held.get(Kind.FULL, nothing), held.get(Kind.WINDOW, nothing)
    recurrent = held.get(Kind.RECURRENT, nothing)
    for depth in range(chain_len, 0, -1):
        needs = resume_set(shape, depth * shape.page_size)
        has_pages = full.issuperset(range(*needs.full)) and window.issuperset(range(*needs.window))
        if has_pages and (depth - 1 in recurrent or not needs.needs_snapshot):
            return depth
    return 0
