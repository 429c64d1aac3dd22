"""A prefetch that fails, hangs, gets wrong data or is cut short at any unit: what arrived up to a
resume point counts, and nothing stays taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import xxhash
from tests.doubles.memory_index import MemoryIndex
from tests.hostcache.attached import StoredPrompt, load, prompt_of, read_all, worker_at
from tests.tiers.state_shapes import PAGE_SIZE, chain, manifest_of

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import QueueFull, Unavailable
from ferryman.runtime.background import Background
from ferryman.tiers.prefetch import PrefetchPlanner, Truncate, arena_bytes, in_order
from ferryman.tiers.prefetch_values import (
    DEFAULT_WISH,
    Prefetched,
    PrefetchPolicy,
    PrefetchRequest,
    PrefetchShortfall,
)
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman_hostcache.peers import FetchOrder, FetchSink, PeerClient
from ferryman_hostcache.prefetch_io import PrefetchTiers
from ferryman_hostcache.prefetch_runner import PrefetchRunner
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(1, 2, 3, 4), snapshots=[1, 3], with_windows=True)
# The windows of the two resume points, and all else: what a prefetch of the whole prompt brings.
WANTED = 4 + 4 + 2
PEER = NodeLife("peer", 7, "127.0.0.1:1")
TAGS = CallTags("request", 1)
ASK = PrefetchRequest(PROMPT.keys, 0, 4, PAGE_SIZE)
COMPLETE, BEST_EFFORT = PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.BEST_EFFORT

Fault = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """No fault."""


async def breaks() -> None:
    raise Unavailable("the connection broke")


async def hangs() -> None:
    await asyncio.Event().wait()


@dataclass
class ScriptedPeer:
    """Holds all of the prompt; sends `num_good` units, then `fault` happens."""

    prompt: StoredPrompt
    num_good: int = 99
    fault: Fault = nothing
    lookup_fault: Fault = nothing
    corrupt: int = -1
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.at_fault = asyncio.Event()

    async def lookup(self, node: NodeLife, keys: Sequence[PageKey]) -> Mapping[Kind, list[int]]:
        await self.lookup_fault()
        names = self.prompt.names
        return {kind: [page for one, page in names if one is kind] for kind in MANIFEST.kinds}

    async def fetch(
        self, node: NodeLife, order: FetchOrder, arrivals: FetchSink, *, tags: CallTags
    ) -> None:
        for i, name in enumerate(in_order(tuple(order.rooms))):
            if i == self.num_good:
                self.at_fault.set()
                await self.fault()
            if i == self.corrupt:
                arrivals.on_corrupt(name)
                continue
            content = self.prompt.content(*name)
            np.copyto(np.frombuffer(order.rooms[name], np.uint8), np.frombuffer(content, np.uint8))
            arrivals.on_unit(name, xxhash.xxh3_128_digest(content))
            self.num_sent += 1


@asynccontextmanager
async def prefetching_from(
    service: RunningHostCache,
    peer: ScriptedPeer,
    max_running: int = 4,
    peers: Sequence[NodeLife] = (PEER,),
    misnamed: Sequence[IndexedUnit] = (),
    share: float = 1.0,
) -> AsyncIterator[PrefetchRunner]:
    """Prefetches of this host-cache, whose index knows these peers alone, and is wrong about what
    is `misnamed`."""
    index = MemoryIndex()
    units = [
        IndexedUnit(kind, PROMPT.keys[page], 1, xxhash.xxh3_128_digest(PROMPT.content(kind, page)))
        for kind, page in PROMPT.names
    ]
    for life in peers:
        await index.announce(life, 1000.0)
        await index.commit(life, PROMPT.keys[0], Tier.HOST, units)
        await index.commit(life, PROMPT.keys[0], Tier.HOST, misnamed)
    async with Background() as background:
        yield PrefetchRunner(
            service.host,
            PrefetchTiers(service.host.storage, index, cast(PeerClient, peer), max_peers=2),
            PrefetchPlanner(service.host.life, Truncate, share),
            background,
            wish=DEFAULT_WISH,
            max_running=max_running,
            clock=time.monotonic,
        )


async def finished(
    prefetching: PrefetchRunner, policy: PrefetchPolicy = COMPLETE, patience: float = 20.0
) -> Prefetched:
    """Begun by one call, ended by another, as by a router and a worker."""
    prefetching.start(ASK, TAGS, patience)
    return await prefetching.finish(ASK, TAGS, policy, patience=patience, left=patience)


@asynccontextmanager
async def attached(service: RunningHostCache) -> AsyncIterator[None]:
    """With a worker, without which there is no arena layout; in the end nothing is taken."""
    async with worker_at(service.address, MANIFEST) as worker:
        yield
        found = await load(worker, PROMPT)
        read_all(worker, PROMPT, found)
        worker.client.release(found)
        await worker.client.attachment.released()
    assert_nothing_taken(service)


def assert_nothing_taken(service: RunningHostCache) -> None:
    store = service.host.store
    store.check_integrity()
    assert store.statistics().num_reservations == 0
    for counts in store.statistics().kinds.values():
        assert counts.total == counts.free + counts.resident


def usable(num_units: int) -> int:
    """How far the first units of the order reach."""
    return 4 if num_units >= WANTED else 2 if num_units >= 5 else 0


async def test_without_a_fault_all_of_it_comes(host_cache: RunningHostCache) -> None:
    peer = ScriptedPeer(PROMPT)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        brought = await finished(prefetching)
        assert (brought.brought_pages, brought.reason, peer.num_sent) == (4, "", WANTED)


@pytest.mark.parametrize("fault", [breaks, hangs])
@pytest.mark.parametrize("num_good", range(WANTED))
async def test_what_arrived_before_a_fault_counts_up_to_a_resume_point(
    host_cache: RunningHostCache, num_good: int, fault: Fault
) -> None:
    peer = ScriptedPeer(PROMPT, num_good, fault)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        prefetching.start(ASK, TAGS, 20.0)
        await peer.at_fault.wait()
        brought = await finished(prefetching, BEST_EFFORT if fault is hangs else COMPLETE)
        assert brought.brought_pages == usable(num_good)
        assert brought.reason == (
            PrefetchShortfall.STORAGE_TIMEOUT if fault is hangs else PrefetchShortfall.TIER_FAILED
        )
        assert peer.num_sent == num_good


@pytest.mark.parametrize("corrupt", range(WANTED))
async def test_a_corrupt_unit_is_counted_and_what_needs_it_does_not_count(
    host_cache: RunningHostCache, corrupt: int
) -> None:
    peer = ScriptedPeer(PROMPT, corrupt=corrupt)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        brought = await finished(prefetching)
        in_between = 2 <= corrupt < 5  # of the first resume point, which the second does without
        assert brought.brought_pages == (4 if in_between else usable(corrupt))
        assert brought.reason == ("" if in_between else PrefetchShortfall.TIER_FAILED)
        assert prefetching.statistics().num_corrupt == 1


@pytest.mark.parametrize("fault", [breaks, hangs])
async def test_a_holder_that_does_not_say_what_it_holds_is_a_miss(
    host_cache: RunningHostCache, fault: Fault
) -> None:
    peer = ScriptedPeer(PROMPT, lookup_fault=fault)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        brought = await finished(prefetching, BEST_EFFORT if fault is hangs else COMPLETE)
        assert (brought.asked_pages, brought.brought_pages, peer.num_sent) == (0, 0, 0)


async def test_without_any_finish_it_ends_by_itself(host_cache: RunningHostCache) -> None:
    peer = ScriptedPeer(PROMPT, 6, hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        run = prefetching.start(ASK, TAGS, 0.2)
        async with asyncio.timeout(120):
            await run.settled.wait()
        assert run.progress.result().brought_pages == 2
        assert prefetching.statistics().num_running == 0


async def test_the_end_of_the_process_frees_what_was_under_way(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT, 3, hangs)
    async with attached(host_cache):
        async with prefetching_from(host_cache, peer) as prefetching:
            prefetching.start(ASK, TAGS, 20.0)
            await peer.at_fault.wait()
            assert prefetching.bytes_under_way > 0
        assert_nothing_taken(host_cache)


async def test_room_that_was_lost_meanwhile_is_not_shown_and_comes_back(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT, WANTED - 1, hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        prefetching.start(ASK, TAGS, 20.0)
        await peer.at_fault.wait()
        host_cache.host.store.expire(time.monotonic() + 1000.0)
        brought = await finished(prefetching, BEST_EFFORT)
        assert brought.brought_pages == 0
        assert prefetching.statistics().num_lost == 1


async def test_more_prefetches_than_allowed_are_refused(host_cache: RunningHostCache) -> None:
    peer = ScriptedPeer(PROMPT, 1, hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer, 1) as prefetching:
        run = prefetching.start(ASK, TAGS, 20.0)
        assert prefetching.start(ASK, TAGS, 20.0) is run, "the same attempt joins"
        with pytest.raises(QueueFull):
            prefetching.start(ASK, CallTags("request", 2), 20.0)
        await finished(prefetching, BEST_EFFORT)


async def test_the_share_of_the_host_counts_what_other_prefetches_have_under_way(
    host_cache: RunningHostCache,
) -> None:
    """The share has room for one of them; a second gets it when the first has ended."""
    peer = ScriptedPeer(PROMPT, 1, hangs)
    wanted_bytes = sum(MANIFEST.layout(kind).slot_bytes for kind, _ in PROMPT.names)
    async with attached(host_cache):
        share = 1.1 * wanted_bytes / arena_bytes(host_cache.host.store.layout)
        async with prefetching_from(host_cache, peer, share=share) as prefetching:
            first = prefetching.start(ASK, TAGS, 20.0)
            await peer.at_fault.wait()
            assert prefetching.bytes_under_way == wanted_bytes
            second = prefetching.start(ASK, CallTags("another", 1), 20.0)
            async with asyncio.timeout(120):
                await second.settled.wait()
            assert second.progress.result().granted_pages == 0
            assert second.progress.result().reason == PrefetchShortfall.RATE_LIMITED
            assert prefetching.bytes_under_way == wanted_bytes
            first.stop.set()
            await first.settled.wait()
            peer.num_good = 99
            third_tags = CallTags("third", 1)
            third = await prefetching.finish(ASK, third_tags, COMPLETE, patience=20.0, left=20.0)
            assert (third.granted_pages, third.brought_pages) == (4, 4)
