"""A store that is cancelled while a thread copies: its room and its sources stay until the end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import xxhash
from tests.hostcache.attached import StoredPrompt, load, prompt_of, read_all, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman.wire.hostcache.client import HostCacheClient
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)


@dataclass
class BlockingSource:
    """A unit whose copy begins, and writes only when it is let go on."""

    content: bytes
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def copy(self, room: memoryview) -> bytes:
        self.has_begun.set()
        self.may_go_on.wait()
        room[:] = self.content
        self.has_ended.set()
        return xxhash.xxh3_128_digest(room)


def _blocked(prompt: StoredPrompt) -> tuple[BlockingSource, list[UnitSource]]:
    """The prompt's sources, of which the first blocks."""
    (kind, page), *_ = prompt.names
    source = BlockingSource(prompt.content(kind, page))
    return source, [UnitSource(kind, page, source.copy), *prompt.sources[1:]]


async def _heard(client: HostCacheClient) -> None:
    """Waits until the host-cache has received all that the client has reported so far."""
    for _ in range(20):
        await asyncio.sleep(0)
    await client.attachment.released()


def _num_reserved(service: RunningHostCache) -> int:
    return service.host.store.statistics().num_reservations


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_room_goes_back_behind_the_last_byte(
    host_cache: RunningHostCache, num_cancels: int
) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2])
    source, sources = _blocked(prompt)
    async with worker_at(host_cache.address, MANIFEST) as worker:
        storing = asyncio.ensure_future(worker.client.store(prompt.keys, sources))
        await asyncio.to_thread(source.has_begun.wait)
        try:
            for _ in range(num_cancels):
                storing.cancel()
                await _heard(worker.client)
            assert _num_reserved(host_cache) == 1
        finally:
            source.may_go_on.set()
        with suppress(asyncio.CancelledError):
            await storing
        await _heard(worker.client)
        assert _num_reserved(host_cache) == 0
        host_cache.host.store.check_integrity()
        assert await worker.client.store(prompt.keys, prompt.sources) == 4
        assert read_all(worker, prompt, await load(worker, prompt)) == 4


async def test_no_source_is_read_when_a_store_that_was_given_up_has_ended(
    host_cache: RunningHostCache,
) -> None:
    """Its caller holds the device's slots until then and gives them to others right after."""
    prompt = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2])
    source, sources = _blocked(prompt)
    async with worker_at(host_cache.address, MANIFEST) as worker:
        storing = asyncio.ensure_future(worker.client.store(prompt.keys, sources))
        await asyncio.to_thread(source.has_begun.wait)
        storing.cancel()
        await _heard(worker.client)
        ended_early = storing.done()
        source.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        assert not ended_early
        assert source.has_ended.is_set()


async def test_a_lease_that_was_lost_while_a_thread_copies_frees_no_room(
    start_host_cache: StartHostCache,
) -> None:
    """The host-cache's clock goes on while the worker stands still: its room is in quarantine."""
    prompt = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2])
    source, sources = _blocked(prompt)
    async with (
        start_host_cache(lease_seconds=1000.0) as host_cache,
        worker_at(host_cache.address, MANIFEST) as worker,
    ):
        store = host_cache.host.store
        free = {kind: store.num_free(kind) for kind in MANIFEST.kinds}
        storing = asyncio.ensure_future(worker.client.store(prompt.keys, sources))
        await asyncio.to_thread(source.has_begun.wait)
        try:
            store.expire(host_cache.host._clock() + 2000.0)
            counts = store.statistics()
            assert (counts.num_reservations, counts.num_quarantined) == (1, 4)
            assert {kind: store.num_free(kind) for kind in free} != free
        finally:
            source.may_go_on.set()
        assert await storing is None, "what was quarantined does not become visible"
        await _heard(worker.client)
        assert {kind: store.num_free(kind) for kind in free} == free
