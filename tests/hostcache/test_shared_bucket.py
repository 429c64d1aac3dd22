"""Nodes with folders in one bucket: what one has stored, another resumes from, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY, key_file_in
from tests.hostcache.attached import (
    AttachedTestWorker,
    StoredPrompt,
    prompt_of,
    read_all,
    until_flushed,
    until_stored,
)
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.heard import hearing
from tests.hostcache.stored import Bucket
from tests.hostcache.test_prefetch_runner import (
    MANIFEST,
    PROMPT,
    TAGS,
    assert_quiet,
    node,
    prefetch,
)
from tests.tiers.state_shapes import chain

from ferryman.cache.manifest import ResumeShape
from ferryman.cache.units import Tier
from ferryman.runtime.lifecycle import decode_event
from ferryman.settings.hostcache import StorageSettings
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.redis.index import PrefixIndex
from ferryman.wire.redis.redis_index import redis_index
from ferryman_hostcache import folder_headers
from ferryman_hostcache.service import RunningHostCache
from ferryman_hostcache.shared_folders import SharedStatistics

SHAPE = ResumeShape.of(MANIFEST)
CLOUD = "one.eu-central-1.compute.internal"  # as clouds call a node
OTHER = prompt_of(MANIFEST, chain(*range(21, 29)), snapshots=[3, 7], with_windows=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_headers, "LOOKUP_SECONDS", 120.0)


def folder_of(bucket: Bucket, name: str) -> str:
    place, _, options = bucket.url.partition("?")
    return f"{place}/{name}?{options}"


def in_bucket(
    start: StartHostCache, bucket: Bucket, name: str, **settings: Any
) -> AbstractAsyncContextManager[tuple[RunningHostCache, AttachedTestWorker]]:
    storage = StorageSettings(folder=folder_of(bucket, name))
    return node(start, name, storage=storage, **settings)


@asynccontextmanager
async def index_of(redis_url: str) -> AsyncIterator[PrefixIndex]:
    async with redis_index(redis_url, KEY, lookup_seconds=10) as index:
        yield index


async def until_shared(
    index: PrefixIndex, service: RunningHostCache, prompt: StoredPrompt, num_units: int = -1
) -> None:
    """Until the index says that a node's folder holds the prompt, or so many units of it."""
    folders = service.lower_tiers.folders
    assert folders
    life = folders.own.life(service.host.storage.term)
    units = [(kind, prompt.keys[page]) for kind, page in prompt.names]
    wanted = len(units) if num_units < 0 else num_units
    async with asyncio.timeout(120):
        while len(await index.stored_units(life, prompt.keys[0], units)) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def store(
    index: PrefixIndex,
    service: RunningHostCache,
    worker: AttachedTestWorker,
    prompt: StoredPrompt = PROMPT,
) -> None:
    await worker.client.store(prompt.keys, prompt.sources)
    await until_stored(service, prompt)
    await until_shared(index, service, prompt)


def counts(service: RunningHostCache) -> SharedStatistics:
    assert service.lower_tiers.folders
    return service.lower_tiers.folders.statistics()


async def test_what_a_node_that_is_gone_has_stored_is_brought_from_its_folder(
    start_host_cache: StartHostCache, bucket: Bucket, redis_url: str, nats_url: str
) -> None:
    """Its next life takes the term over in between: what both lives stored is there."""
    async with index_of(redis_url) as index:
        for prompt in (PROMPT, OTHER):
            async with in_bucket(start_host_cache, bucket, CLOUD) as (service, worker):
                await store(index, service, worker, prompt)
                term = service.host.storage.term
        assert term == 2
        async with (
            in_bucket(start_host_cache, bucket, "two") as (service, worker),
            hearing(nats_url, Subjects().all_life_of(TAGS.request_id)) as messages,
        ):
            async with asyncio.timeout(120):
                while (await index.usable_pages(PROMPT.keys, SHAPE)).get("two") is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            mine = (await index.usable_pages(PROMPT.keys, SHAPE))["two"]
            assert (mine.usable_pages, mine.host_pages, mine.shared_pages) == (0, 0, 8)
            brought = await prefetch(worker)
            assert (brought.asked_pages, brought.brought_pages, brought.reason) == (8, 8, "")
            lease = await worker.client.acquire(PROMPT.keys, PROMPT.prompt_len, 0, tags=TAGS)
            assert {unit.origin for unit in lease.view.units.values()} == {Tier.STORAGE}
            assert read_all(worker, PROMPT, lease) == len(lease.view.units)
            assert counts(service).num_units == brought.traffic[Tier.STORAGE].num_units
            async with asyncio.timeout(120):
                event = decode_event((await anext(messages)).payload)
            assert event.name == "stored"
            assert (event.facts["origin"], event.facts["folder"]) == ("storage", CLOUD)
            assert (await prefetch(worker, OTHER)).brought_pages == 8
            await until_stored(service, PROMPT)  # it is written here, too, as a peer's is
            assert counts(service).num_failures == counts(service).num_gone == 0
            assert_quiet(service)


async def test_what_its_owner_has_dropped_is_a_miss(
    start_host_cache: StartHostCache, bucket: Bucket, redis_url: str
) -> None:
    """The owner lives; the reader knows its headers, and the index does not know of the drop."""
    async with (
        index_of(redis_url) as index,
        in_bucket(start_host_cache, bucket, "one") as (owner, theirs),
        in_bucket(start_host_cache, bucket, "two") as (reader, mine),
    ):
        await store(index, owner, theirs)
        assert (await prefetch(mine)).brought_pages == 8
        headers = counts(reader).num_headers
        await until_stored(reader, PROMPT)
        await until_flushed(reader, PROMPT)
        reader.host.flush_all()
        owner.publisher.publish = lambda changes: None  # type: ignore[method-assign]
        owner.host.flush_all()
        await asyncio.to_thread(_removed, owner)
        assert (await prefetch(mine, tags=CallTags("another", 1))).brought_pages == 0
        assert counts(reader).num_headers == headers
        left = len(PROMPT.names) - counts(reader).num_gone
        assert left < len(PROMPT.names), "it was not tried"
        await until_shared(index, owner, PROMPT, num_units=left)
        assert counts(reader).num_failures == 0
        kinds = reader.host.storage.statistics().kinds.values()
        assert not any(each.num_corrupt for each in kinds)
        assert_quiet(reader)


def _removed(service: RunningHostCache) -> None:
    """Blocks until the owner's writer has done what it was told."""
    storage: Any = service.host.storage
    storage._writer._thread.submit(lambda: None).result(120)


async def test_a_bucket_that_refuses_costs_a_miss(
    start_host_cache: StartHostCache, bucket: Bucket, redis_url: str
) -> None:
    async with index_of(redis_url) as index:
        async with in_bucket(start_host_cache, bucket, "one") as (service, worker):
            await store(index, service, worker)
        async with in_bucket(start_host_cache, bucket, "two") as (service, worker):
            bucket.faults.refusals["GET"] = (403, "AccessDenied")
            assert (await prefetch(worker)).brought_pages == 0
            assert bucket.faults.num_met["GET"] > 0, "nothing was refused"
            assert counts(service).num_failures > 0
            bucket.faults.refusals.clear()
            assert (await prefetch(worker, tags=CallTags("another", 1))).brought_pages == 8
            assert_quiet(service)


async def test_nodes_of_another_cluster_do_not_see_each_other_in_one_bucket(
    start_host_cache: StartHostCache, bucket: Bucket, redis_url: str, tmp_path: Path
) -> None:
    """With one index, as if somebody had mixed them up."""
    async with index_of(redis_url) as index:
        async with in_bucket(start_host_cache, bucket, "one") as (service, worker):
            await store(index, service, worker)
        other_key = key_file_in(tmp_path, STRANGERS_KEY)
        stranger = in_bucket(start_host_cache, bucket, "two", cluster_key_file=other_key)
        async with stranger as (service, worker):
            assert (await prefetch(worker)).brought_pages == 0
            assert counts(service) == SharedStatistics()
