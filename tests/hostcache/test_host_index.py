"""A host-cache's entries in the index and in the lifecycle log, over the real Redis and NATS."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests.cluster_keys import KEY, key_file_in
from tests.hostcache.attached import load, prompt_of, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.heard import hearing
from tests.servers import running_redis
from tests.tiers.state_shapes import chain, manifest_of
from tests.waiting import until

from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.handoff.lifecycle import check
from ferryman.runtime.embedded import redis_command, start
from ferryman.runtime.lifecycle import decode_event
from ferryman.settings.groups import BusSettings, IndexSettings, ListenSettings
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.redis import redis_index as redis_module
from ferryman.wire.redis.index import PrefixIndex
from ferryman.wire.redis.redis_index import redis_index
from ferryman_hostcache.index_publisher import IndexPublisher
from ferryman_hostcache.service import RunningHostCache, running_host_cache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
SHAPE = ResumeShape.of(MANIFEST)
PROMPT = prompt_of(MANIFEST, chain(7, 8, 9), snapshots=[0, 2])


async def nodes_of(index: PrefixIndex) -> dict[str, int]:
    found = await index.usable_pages(PROMPT.keys, SHAPE)
    return {node_id: holding.usable_pages for node_id, holding in found.items()}


async def until_known(index: PrefixIndex, known: dict[str, int]) -> None:
    async with asyncio.timeout(120):
        while await nodes_of(index) != known:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_index_knows_what_was_stored_and_what_was_dropped(
    host_cache: RunningHostCache, redis_url: str
) -> None:
    async with (
        worker_at(host_cache.address, MANIFEST) as worker,
        redis_index(redis_url, KEY, lookup_seconds=10) as index,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await host_cache.publisher.flushed()
        await until_known(index, {"test-node": 3})
        lease = await load(worker, PROMPT)
        unit = lease.view.units[Kind.RECURRENT, 2]
        worker.arena[unit.offset] ^= 255
        worker.client.release(lease, corrupt=[(unit.kind, unit.key)])
        await worker.client.attachment.released()
        await host_cache.publisher.flushed()
        await until_known(index, {"test-node": 1})


async def test_entries_of_an_earlier_life_are_void(
    start_host_cache: StartHostCache, redis_url: str
) -> None:
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(IndexPublisher, "unregister", not_removed)
        async with start_host_cache() as first, worker_at(first.address, MANIFEST) as worker:
            await worker.client.store(PROMPT.keys, PROMPT.sources)
            await first.publisher.flushed()
    async with redis_index(redis_url, KEY, lookup_seconds=10) as index:
        assert await nodes_of(index) == {"test-node": 3}, "its record outlives it"
    async with redis_index(redis_url, KEY, lookup_seconds=10) as index:
        async with start_host_cache() as second:
            await second.publisher.flushed()
            assert await nodes_of(index) == {}, "a new life holds nothing yet"
        assert await nodes_of(index) == {}, "a life that has left holds nothing"


async def not_removed(_publisher: IndexPublisher) -> None:
    """A killed process does not remove its own entry."""


async def test_an_index_that_comes_back_empty_is_told_everything(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    redis = start(redis_command(tmp_path / "redis"), tmp_path / "redis")
    port = int(redis.url.rpartition(":")[2].partition("/")[0])
    async with (
        start_host_cache(redis_url=redis.url) as host_cache,
        worker_at(host_cache.address, MANIFEST) as worker,
    ):
        await host_cache.publisher.flushed()
        await asyncio.to_thread(redis.stop)
        assert await worker.client.store(PROMPT.keys, PROMPT.sources) == 5
        assert (await load(worker, PROMPT)).usable_pages == 3
        again = await asyncio.to_thread(
            start, redis_command(tmp_path / "redis", port), tmp_path / "redis"
        )
        try:
            await host_cache.publisher.flushed()
            async with redis_index(again.url, KEY, lookup_seconds=10) as index:
                await until_known(index, {"test-node": 3})
        finally:
            await asyncio.to_thread(again.stop)


async def test_an_index_that_was_flushed_is_told_everything_within_seconds(
    start_host_cache: StartHostCache,
) -> None:
    with running_redis() as redis:
        async with (
            start_host_cache(redis_url=redis.url) as host_cache,
            worker_at(host_cache.address, MANIFEST) as worker,
            redis_index(redis.url, KEY, lookup_seconds=10) as index,
        ):
            await worker.client.store(PROMPT.keys, PROMPT.sources)
            await host_cache.publisher.flushed()
            await until_known(index, {"test-node": 3})
            before = host_cache.publisher.statistics().num_refreshes
            await index._client.flushall()
            await until_known(index, {"test-node": 3})
            assert host_cache.publisher.statistics().num_refreshes > before
            (holding,) = (await index.usable_pages(PROMPT.keys, SHAPE)).values()
            assert holding.node.address == host_cache.address


async def test_an_index_that_hung_is_told_what_it_missed(
    start_host_cache: StartHostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "WRITE_SECONDS", 1.0)
    with running_redis() as redis:
        async with (
            start_host_cache(redis_url=redis.url) as host_cache,
            worker_at(host_cache.address, MANIFEST) as worker,
            redis_index(redis.url, KEY, lookup_seconds=10) as index,
        ):
            await host_cache.publisher.flushed()
            redis.process.send_signal(signal.SIGSTOP)
            try:
                assert await worker.client.store(PROMPT.keys, PROMPT.sources) == 5
                assert (await load(worker, PROMPT)).usable_pages == 3
                await until(lambda: host_cache.publisher.is_away)
            finally:
                redis.process.send_signal(signal.SIGCONT)
            await until_known(index, {"test-node": 3})


async def test_the_lifecycle_log_says_what_happened_to_a_request(
    host_cache: RunningHostCache, nats_url: str
) -> None:
    tags = CallTags("req-lifecycle", 1)
    async with (
        hearing(nats_url, Subjects().all_life_of(tags.request_id)) as messages,
        worker_at(host_cache.address, MANIFEST) as worker,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources, tags=tags)
        lease = await worker.client.acquire(PROMPT.keys, PROMPT.prompt_len, 0, tags=tags)
        unit = lease.view.units[Kind.FULL, 2]
        worker.arena[unit.offset] ^= 1
        worker.client.release(lease, corrupt=[(unit.kind, unit.key)])
        events = [decode_event((await anext(messages)).payload) for _ in range(3)]
        assert [event.name for event in events] == ["stored", "loaded", "corrupt"]
        assert [dict(event.facts) for event in events] == [
            {"units": 5, "reserved_units": 5},
            {"usable_pages": 3, "full_units": 3, "recurrent_units": 2},
            {"key": unit.key.hex(), "kind": "full", "tier": "host", "dropped": 2},
        ]
        assert not check(events)


async def test_beats_say_where_the_host_cache_is(
    host_cache: RunningHostCache, nats_url: str
) -> None:
    pattern = Subjects().beat("hostcache", host_cache.worker_id)
    async with hearing(nats_url, pattern) as messages:
        assert b'"node":"test-node"' in (await _next(messages))


async def _next(messages: Messages) -> bytes:
    return (await anext(messages)).payload


async def test_others_are_told_where_it_is_reached_and_not_where_it_listens(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    settings = HostCacheServiceSettings(
        cluster_key_file=key_file_in(tmp_path),
        listen=ListenSettings(host="0.0.0.0"),
        advertise="localhost",
        memory_bytes=1 << 20,
        arena_folder=tmp_path,
        bus=BusSettings(url=nats_url),
        index=IndexSettings(url=redis_url, lookup_seconds=10),
        node="advertised",
    )
    async with (
        running_host_cache(settings) as service,
        redis_index(redis_url, KEY, lookup_seconds=10) as index,
    ):
        assert service.address.startswith("localhost:")
        async with worker_at(service.address, MANIFEST) as worker:
            await worker.client.store(PROMPT.keys, PROMPT.sources)
            await until_known(index, {"advertised": len(PROMPT.keys)})
            found = await index.usable_pages(PROMPT.keys, SHAPE)
            assert {each.node.address for each in found.values()} <= {service.address}
