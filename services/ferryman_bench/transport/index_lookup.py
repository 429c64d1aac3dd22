"""The time in which the index finds how much of a long prompt each node holds, client included.

A private Redis holds one chain of full pages for every node, and snapshots in one of these places:

    end     the last page has one, as for the next turn of a conversation
    early   only page 6 has one; SNAPSHOTS others belong to other chains with the same first page
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from ferryman.cache.keys import PageKey, as_token_ids, page_keys
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.runtime.embedded import redis_command, started
from ferryman.security.cluster_key import SECRET_BYTES, ClusterKey
from ferryman.wire.redis.index import IndexedUnit, NodeLife, PrefixIndex
from ferryman.wire.redis.redis_index import redis_index

EARLY_PAGE = 6
SNAPSHOTS = 300
TTL_SECONDS = 600.0
BATCH = 512


@dataclass(frozen=True, slots=True)
class LookupTiming:
    """Seconds of one lookup of `num_pages` page keys, held by `num_nodes` nodes."""

    num_pages: int
    num_nodes: int
    snapshot: str
    usable_pages: int
    median: float
    least: float


def measure_lookups(
    *, page_counts: Sequence[int] = (2048, 8192), num_nodes: int = 1, repeats: int = 100
) -> tuple[LookupTiming, ...]:
    """Times lookups of 128 k tokens in pages of 64 and of 16, in a private Redis."""
    with tempfile.TemporaryDirectory() as folder, started(redis_command, Path(folder)) as redis:
        return asyncio.run(_measured(redis.url, page_counts, num_nodes, repeats))


async def _measured(
    url: str, page_counts: Sequence[int], num_nodes: int, repeats: int
) -> tuple[LookupTiming, ...]:
    nodes = [NodeLife(f"node-{number}", number + 1) for number in range(num_nodes)]
    found = []
    async with redis_index(url, ClusterKey(bytes(SECRET_BYTES)), lookup_seconds=10) as index:
        for node in nodes:
            await index.announce(node, TTL_SECONDS)
        for num_pages in page_counts:
            for snapshot, page in (("end", num_pages), ("early", EARLY_PAGE)):
                chain = _chain(f"{num_pages}-{snapshot}", num_pages)
                for node in nodes:
                    await _commit_units(index, node, chain, page)
                usable, seconds = await _timed(index, chain, repeats)
                times = (median(seconds), min(seconds))
                found.append(LookupTiming(num_pages, num_nodes, snapshot, usable, *times))
    return tuple(found)


def _chain(name: str, num_pages: int) -> tuple[PageKey, ...]:
    return page_keys(name.encode(), as_token_ids(range(num_pages)), 1)


async def _commit_units(
    index: PrefixIndex, node: NodeLife, chain: Sequence[PageKey], snapshot_page: int
) -> None:
    units = [_unit(Kind.FULL, key) for key in chain]
    units += [_unit(Kind.RECURRENT, chain[snapshot_page - 1])]
    units += [_unit(Kind.RECURRENT, key) for key in _chain("others", SNAPSHOTS)]
    for at in range(0, len(units), BATCH):
        await index.commit(node, chain[0], Tier.HOST, units[at : at + BATCH])


def _unit(kind: Kind, key: PageKey) -> IndexedUnit:
    return IndexedUnit(kind, key, 1 << 16, bytes(16))


async def _timed(
    index: PrefixIndex, chain: Sequence[PageKey], repeats: int
) -> tuple[int, list[float]]:
    shape = ResumeShape(64, 0, frozenset({Kind.FULL, Kind.RECURRENT}))
    holdings = await index.usable_pages(chain, shape)
    seconds = []
    for _ in range(repeats):
        began = perf_counter()
        await index.usable_pages(chain, shape)
        seconds.append(perf_counter() - began)
    return min((one.usable_pages for one in holdings.values()), default=0), seconds
