"""Beginnings and ends of prefetches, with callers that come and go: right counts, no leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.hostcache.attached import worker_at
from tests.hostcache.test_prefetch_faults import (
    ASK,
    BEST_EFFORT,
    COMPLETE,
    MANIFEST,
    PEER,
    PROMPT,
    TAGS,
    WANTED,
    ScriptedPeer,
    attached,
    finished,
    hangs,
    prefetching_from,
)

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import Stale
from ferryman.tiers.prefetch_values import PrefetchShortfall
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman_hostcache.service import RunningHostCache

SECONDS = 20.0


async def test_best_effort_begins_what_nobody_began_and_waits_for_none_of_it(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        brought = await prefetching.finish(ASK, TAGS, BEST_EFFORT, patience=SECONDS, left=SECONDS)
        assert (brought.brought_pages, peer.num_sent) == (0, 0)
        async with asyncio.timeout(SECONDS):
            await prefetching.start(ASK, TAGS, SECONDS).settled.wait()
        assert host_cache.host.store.usable_pages(PROMPT.keys) == 4, "it serves whoever asks next"


async def test_a_prefetch_begun_for_a_device_that_was_emptied_since_is_begun_again(
    host_cache: RunningHostCache,
) -> None:
    """The router did not know yet that the worker had dropped its pages."""
    peer = ScriptedPeer(PROMPT)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        early = prefetching.start(replace(ASK, have_pages=4), TAGS, SECONDS)
        async with asyncio.timeout(SECONDS):
            await early.settled.wait()
        assert (early.progress.brought, peer.num_sent) == (0, 0), (
            "nothing to gain for who has it all"
        )
        brought = await finished(prefetching)
        assert brought.brought_pages == 4


async def test_another_prompt_under_a_known_id_has_a_prefetch_of_its_own(
    host_cache: RunningHostCache,
) -> None:
    """Clients choose ids, and may use one again."""
    peer = ScriptedPeer(PROMPT)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        other = replace(ASK, keys=(*PROMPT.keys[:-1], PageKey(bytes(16))))
        before = prefetching.start(other, TAGS, SECONDS)
        assert prefetching.start(other, TAGS, SECONDS) is before, "the same joins it"
        assert prefetching.start(ASK, TAGS, SECONDS) is not before
        assert (await finished(prefetching)).brought_pages == 4
        assert prefetching.statistics().num_begun == 2


async def test_a_prefetch_that_another_took_the_place_of_ends(host_cache: RunningHostCache) -> None:
    peer = ScriptedPeer(PROMPT, 3, hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        fuller = prefetching.start(replace(ASK, have_pages=1), TAGS, 1000.0)
        await peer.at_fault.wait()
        prefetching.start(ASK, TAGS, SECONDS)
        async with asyncio.timeout(SECONDS):
            await fuller.settled.wait()
        await finished(prefetching, BEST_EFFORT)


async def test_without_any_worker_a_start_is_refused_and_nothing_runs(
    host_cache: RunningHostCache,
) -> None:
    async with prefetching_from(host_cache, ScriptedPeer(PROMPT)) as prefetching:
        with pytest.raises(Stale):
            prefetching.start(ASK, TAGS, SECONDS)
        assert prefetching.statistics().num_running == 0


async def test_a_caller_that_leaves_while_it_waits_ends_the_prefetch(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT, 5, hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        finish = prefetching.finish(ASK, TAGS, COMPLETE, patience=SECONDS, left=SECONDS)
        waiting = asyncio.create_task(finish)
        await peer.at_fault.wait()
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()
        async with asyncio.timeout(SECONDS):
            await prefetching.start(ASK, TAGS, SECONDS).settled.wait()
        assert prefetching.statistics().num_running == 0
        assert prefetching.bytes_under_way == 0


async def test_what_was_there_before_counts_as_such_however_early_it_ends(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT, lookup_fault=hangs)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        async with worker_at(host_cache.address, MANIFEST, "prefill-00000002") as worker:
            half = [u for u in PROMPT.sources if u.page_index < 2]
            assert await worker.client.store(PROMPT.keys, half)
        brought = await finished(prefetching, BEST_EFFORT)
        assert (brought.before_pages, brought.brought_pages) == (2, 2)


async def test_a_full_table_of_reservations_is_an_answer_with_its_reason(
    host_cache: RunningHostCache,
) -> None:
    peer = ScriptedPeer(PROMPT)
    async with attached(host_cache), prefetching_from(host_cache, peer) as prefetching:
        host_cache.host.store._writers._limit = 0
        brought = await finished(prefetching)
        assert (brought.asked_pages, brought.granted_pages) == (4, 0)
        assert brought.reason == PrefetchShortfall.RATE_LIMITED


class MutualPeers(ScriptedPeer):
    """Two nodes that say what they hold only once both were asked."""

    def __init__(self) -> None:
        super().__init__(PROMPT)
        self.asked: set[str] = set()
        self.both = asyncio.Event()

    async def lookup(self, node: NodeLife, keys: Sequence[PageKey]) -> Mapping[Kind, list[int]]:
        self.asked.add(node.node_id)
        if len(self.asked) == 2:
            self.both.set()
        await self.both.wait()
        return await super().lookup(node, keys)


async def test_peers_are_asked_side_by_side_what_they_hold(host_cache: RunningHostCache) -> None:
    other = NodeLife("peer-2", 8, "127.0.0.1:2")
    async with (
        attached(host_cache),
        prefetching_from(host_cache, MutualPeers(), peers=(PEER, other)) as prefetching,
        asyncio.timeout(SECONDS),
    ):
        assert (await finished(prefetching)).brought_pages == 4


async def test_origins_are_remembered_for_so_many_units_only(host_cache: RunningHostCache) -> None:
    host_cache.host.origins.max_units = WANTED
    async with attached(host_cache), prefetching_from(host_cache, ScriptedPeer(PROMPT)) as from_one:
        await finished(from_one)
        assert len(host_cache.host.origins.of((TAGS.request_id, TAGS.attempt))) == WANTED
        host_cache.host.flush()
        later = CallTags("another", 1)
        await from_one.finish(ASK, later, COMPLETE, patience=SECONDS, left=SECONDS)
        assert not host_cache.host.origins.of((TAGS.request_id, TAGS.attempt))
        assert len(host_cache.host.origins.of((later.request_id, later.attempt))) == WANTED


@pytest.mark.parametrize("page", [1, 3])
async def test_a_unit_that_is_not_the_one_the_index_was_told_of_is_a_counted_miss(
    host_cache: RunningHostCache, page: int
) -> None:
    wrong = [IndexedUnit(Kind.RECURRENT, PROMPT.keys[page], 1, b"another state...")]
    peer = ScriptedPeer(PROMPT)
    async with (
        attached(host_cache),
        prefetching_from(host_cache, peer, misnamed=wrong) as prefetching,
    ):
        brought = await finished(prefetching)
        assert peer.num_sent == WANTED, "its bytes have the digest that they came with"
        assert brought.brought_pages == (2 if page == 3 else 4)
        assert prefetching.statistics().num_mismatched == 1
        held = host_cache.host.store.lookup(PROMPT.keys).pages[Kind.RECURRENT]
        assert page not in held
