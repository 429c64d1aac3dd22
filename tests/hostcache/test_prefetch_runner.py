"""Prefetches through a real host-cache: storage and peers, whole, in part, and not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from tests.cluster_keys import KEY
from tests.hostcache.attached import (
    AttachedTestWorker,
    StoredPrompt,
    load,
    prompt_of,
    read_all,
    until_flushed,
    until_stored,
    worker_at,
)
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import PAGE_SIZE, chain, manifest_of

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.units import Tier
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.prefetch_values import (
    Prefetched,
    PrefetchOptions,
    PrefetchPolicy,
    PrefetchShortfall,
)
from ferryman.tiers.storage_values import UnitRead
from ferryman.tiers.values import StoredUnit
from ferryman.wire.codec.caches import policy_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.attachment import context_of
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman_hostcache import fetches
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(*range(1, 9)), snapshots=[3, 7], with_windows=True)
WISH = PrefetchOptions(PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=PAGE_SIZE)
TAGS = CallTags("request", 1)
PATIENCE = 20.0
FULL_BYTES = MANIFEST.layout(Kind.FULL).slot_bytes


async def prefetch(
    worker: AttachedTestWorker, prompt: StoredPrompt = PROMPT, tags: CallTags = TAGS
) -> Prefetched:
    return await worker.client.prefetch(
        prompt.keys, prompt.prompt_len, have_pages=0, tags=tags, patience=PATIENCE
    )


@asynccontextmanager
async def node(
    start: StartHostCache,
    name: str,
    folder: Path | None = None,
    manifest: StateManifest = MANIFEST,
    **settings: Any,
) -> AsyncIterator[tuple[RunningHostCache, AttachedTestWorker]]:
    """A host-cache with a worker that wants every page."""
    if folder:
        settings["storage"] = StorageSettings(folder=str(folder))
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(start(node=name, **settings))
        worker = worker_at(service.address, manifest, f"prefill-{name}", wish=WISH)
        yield service, await stack.enter_async_context(worker)


def assert_quiet(service: RunningHostCache) -> None:
    """Asserts that no reservation, prefetch or storage lease remains."""
    counts = service.host.store.statistics()
    assert counts.num_reservations == counts.num_quarantined == 0
    assert service.lower_tiers.prefetching.statistics().bytes_under_way == 0
    assert service.host.storage.statistics().num_leases == 0
    service.host.store.check_integrity()


async def test_what_was_stored_before_a_restart_comes_back_with_its_origin(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder) as (service, worker):
        assert await worker.client.store(PROMPT.keys, PROMPT.sources) == len(PROMPT.names)
        await until_stored(service, PROMPT)
    async with node(start_host_cache, "one", folder) as (service, worker):
        brought = await prefetch(worker)
        assert (brought.before_pages, brought.asked_pages, brought.brought_pages) == (0, 8, 8)
        assert (brought.granted_pages, brought.is_truncated, brought.reason) == (8, False, "")
        assert brought.traffic[Tier.STORAGE].num_bytes > 0
        mine = await worker.client.acquire(PROMPT.keys, PROMPT.prompt_len, 0, tags=TAGS)
        assert mine.usable_pages == 8
        assert {unit.origin for unit in mine.view.units.values()} == {Tier.STORAGE}
        assert read_all(worker, PROMPT, mine) == len(mine.view.units)
        later = await load(worker, PROMPT)
        assert {unit.origin for unit in later.view.units.values()} == {Tier.HOST}
        assert_quiet(service)


async def test_what_another_node_holds_comes_over(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    async with (
        node(start_host_cache, "holder") as (holder, theirs),
        node(start_host_cache, "asker") as (asker, mine),
    ):
        await theirs.client.store(PROMPT.keys, PROMPT.sources)
        async with asyncio.timeout(120):
            await holder.publisher.flushed()
        brought = await prefetch(mine)
        assert (brought.asked_pages, brought.brought_pages) == (8, 8)
        lease = await mine.client.acquire(PROMPT.keys, PROMPT.prompt_len, 0, tags=TAGS)
        assert {unit.origin for unit in lease.view.units.values()} == {Tier.PEER}
        assert read_all(mine, PROMPT, lease) == len(lease.view.units)
        assert_quiet(asker)
        assert_quiet(holder)


async def test_a_holder_serves_straight_from_its_storage(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    folder = tmp_path / "holder"
    async with node(start_host_cache, "holder", folder) as (holder, theirs):
        await theirs.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(holder, PROMPT)
    async with (
        node(start_host_cache, "holder", folder) as (holder, theirs),
        node(start_host_cache, "asker") as (_, mine),
    ):
        async with asyncio.timeout(120):
            await holder.publisher.flushed()
        brought = await prefetch(mine)
        assert brought.brought_pages == 8
        assert brought.traffic[Tier.PEER].num_units >= 8
        assert holder.host.store.lookup(PROMPT.keys).usable_pages == 0, "its host tier is untouched"
        assert_quiet(holder)


async def test_a_holder_reads_what_lies_together_at_once_and_leaves_out_what_is_spoilt(
    start_host_cache: StartHostCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(start_host_cache, "holder", tmp_path / "holder") as (holder, theirs):
        await theirs.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(holder, PROMPT)
        await until_flushed(holder, PROMPT)
        read, reads = holder.host.storage.read, list[int]()

        async def one_lacking(asked: Sequence[UnitRead]) -> tuple[StoredUnit, ...]:
            reads.append(len(asked))
            found = await read(asked)
            return tuple(unit for unit in found if unit.page_index != 2)

        monkeypatch.setattr(holder.host.storage, "read", one_lacking)
        monkeypatch.setattr(fetches, "AHEAD_BYTES", 5 * FULL_BYTES)
        names = [(Kind.FULL, page) for page in range(8)]
        async with aclosing(
            holder.lower_tiers.fetches.units(MANIFEST.digest, PROMPT.keys, names)
        ) as units:
            found = [(unit.name, bytes(unit.content)) async for unit in units]
        assert found == [(name, PROMPT.content(*name)) for name in names if name[1] != 2]
        assert reads == [5, 3]
        assert_quiet(holder)


async def test_short_of_room_the_deepest_resume_point_that_fits_is_brought(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    manifest = manifest_of(Kind.FULL, Kind.RECURRENT)
    prompt = prompt_of(manifest, chain(*range(1, 25)), snapshots=[11, 23])
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder, manifest) as (service, worker):
        await worker.client.store(prompt.keys, prompt.sources)
        await until_stored(service, prompt)
    small = {"memory_bytes": 8192, "prefetch_share": 1.0}
    async with node(start_host_cache, "one", folder, manifest, **small) as (service, worker):
        assert service.host.store.layout.num_slots[Kind.FULL] == 16
        brought = await prefetch(worker, prompt)
        assert (brought.asked_pages, brought.granted_pages, brought.brought_pages) == (24, 12, 12)
        assert (brought.is_truncated, brought.reason) == (True, PrefetchShortfall.HOST_FULL)
        counts = service.lower_tiers.prefetching.statistics()
        assert counts.num_truncated == 1
        # A message's field takes no boolean.
        assert {type(count) for count in astuple(counts)} == {int}
        lease = await worker.client.acquire(prompt.keys, prompt.prompt_len, 0, tags=TAGS)
        assert lease.usable_pages == 12
        assert read_all(worker, prompt, lease) == len(lease.view.units)
        assert_quiet(service)


async def test_a_peer_that_is_gone_is_a_miss_and_leaves_nothing_behind(
    start_host_cache: StartHostCache, redis_url: str
) -> None:
    async with (
        node(start_host_cache, "asker") as (asker, mine),
        redis_index(redis_url, KEY, lookup_seconds=10) as index,
    ):
        async with node(start_host_cache, "holder") as (holder, theirs):
            await theirs.client.store(PROMPT.keys, PROMPT.sources)
            async with asyncio.timeout(120):
                await holder.publisher.flushed()
            dead = replace(holder.host.identity, address=holder.address)
        await index.announce(dead, 60.0)  # killed, it could not have said goodbye
        brought = await prefetch(mine)
        assert brought.brought_pages == 0
        assert asker.lower_tiers.prefetching.statistics().num_failed_reads > 0, "the peer was asked"
        assert_quiet(asker)


async def test_two_calls_of_one_attempt_join_and_another_attempt_does_not(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    async with node(start_host_cache, "one", tmp_path / "storage") as (service, worker):
        for attempt in (1, 1, 2):
            begin = pb.PrefetchRequest(
                epoch=service.host.identity.epoch,
                context=context_of(CallTags("request", attempt)),
                page_keys=keys_to_bytes(PROMPT.keys),
                max_pages=len(PROMPT.keys),
                policy=policy_to_wire(WISH.policy),
                threshold_tokens=WISH.threshold_tokens,
                phase=pb.PREFETCH_PHASE_START,
            )
            await worker.client.attachment.stub.Prefetch(begin, timeout=PATIENCE)
        assert service.lower_tiers.prefetching.statistics().num_begun == 2
