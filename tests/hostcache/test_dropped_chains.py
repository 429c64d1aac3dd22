"""State that gave NaN or infinity, as a worker reports it: every tier of its node drops it.

Its bytes are those that were written, so no digest shows the fault.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.hostcache.attached import load, prompt_of, read_all, until_stored, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.heard import hearing
from tests.hostcache.test_prefetch_runner import MANIFEST, PROMPT, assert_quiet, node, prefetch
from tests.hostcache.test_trouble_is_published import EVENTS, next_event
from tests.tiers.state_shapes import chain
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.handoff.lifecycle import check
from ferryman.wire.hostcache.arena_copy import UnitSource
from ferryman_hostcache.host import DISTRUST_SECONDS
from ferryman_hostcache.service import RunningHostCache

FORK = prompt_of(MANIFEST, (*PROMPT.keys[:2], *chain(99)), snapshots=[2], with_windows=True)
OTHER = prompt_of(MANIFEST, chain(70, 71), snapshots=[1], with_windows=True)
FIRST = PROMPT.keys[0]


async def test_host_and_storage_drop_it_and_all_that_stands_on_it(
    start_host_cache: StartHostCache, tmp_path: Path, nats_url: str
) -> None:
    folder = tmp_path / "storage"
    async with (
        hearing(nats_url, EVENTS) as messages,
        node(start_host_cache, "one", folder) as (service, worker),
    ):
        for prompt in (PROMPT, FORK, OTHER):
            await worker.client.store(prompt.keys, prompt.sources)
            await until_stored(service, prompt)
        lease = await load(worker, PROMPT)
        worker.client.drop_chain(FIRST)
        await worker.client.attachment.released()
        told = [await next_event(messages) for _ in range(2)]
        assert not check(told)
        assert [event.facts["tier"] for event in told] == [Tier.HOST, Tier.STORAGE]
        for event in told:
            assert (event.name, event.facts["cause"]) == ("corrupt", "non_finite")
            assert int(str(event.facts["dropped"])) > len(PROMPT.names)
        worker.client.release(lease)
        for prompt in (PROMPT, FORK):
            assert (await load(worker, prompt)).usable_pages == 0
            assert service.host.storage.lookup(prompt.keys).usable_pages == 0
        assert (await load(worker, OTHER)).usable_pages == 2
        assert await worker.client.store(PROMPT.keys, PROMPT.sources) == len(PROMPT.names)
        assert read_all(worker, PROMPT, await load(worker, PROMPT)) > 0
        service.host.drop_chain(FIRST)
    async with node(start_host_cache, "one", folder) as (service, worker):
        assert (await prefetch(worker)).asked_pages == 0, "it does not come back with the next life"
        assert (await prefetch(worker, OTHER)).brought_pages == 2
        assert_quiet(service)


async def test_what_is_being_written_of_it_does_not_become_visible(
    host_cache: RunningHostCache,
) -> None:
    may_go_on, is_copying = threading.Event(), threading.Event()
    first, *rest = PROMPT.sources

    def slowly(room: memoryview) -> bytes:
        is_copying.set()
        assert may_go_on.wait(30)
        return first.copy(room)

    sources = [UnitSource(first.kind, first.page_index, slowly), *rest]
    async with (
        worker_at(host_cache.address, MANIFEST) as writer,
        worker_at(host_cache.address, MANIFEST, "decode-00000002") as reader,
    ):
        storing = asyncio.create_task(writer.client.store(PROMPT.keys, sources))
        await until(is_copying.is_set)
        reader.client.drop_chain(FIRST)
        await reader.client.attachment.released()
        may_go_on.set()
        assert await storing is None
        assert (await load(reader, PROMPT)).usable_pages == 0
        assert await writer.client.store(PROMPT.keys, PROMPT.sources) == len(PROMPT.names)
        await writer.client.attachment.released()
        assert_quiet(host_cache)


async def test_a_report_that_comes_while_one_is_sent_is_sent_too(
    host_cache: RunningHostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them may be the commit of what was being written."""
    async with worker_at(host_cache.address, MANIFEST) as worker:
        attachment, num_sent = worker.client.attachment, 0
        send = attachment.stub.Release

        async def store_meanwhile(request: Any, **options: float) -> Any:
            nonlocal num_sent
            num_sent += 1
            answer = await send(request, **options)
            if num_sent == 1:
                assert await worker.client.store(PROMPT.keys, PROMPT.sources)
                worker.client.drop_chain(FIRST)
            return answer

        monkeypatch.setattr(attachment.stub, "Release", store_meanwhile)
        worker.client.drop_chain(FIRST)
        await attachment.released()
        assert num_sent == 2
        assert (await load(worker, PROMPT)).usable_pages == 0


async def test_peers_are_not_asked_for_it_for_a_while(start_host_cache: StartHostCache) -> None:
    """They may have it from here, or this node from them."""
    async with (
        node(start_host_cache, "holder") as (holder, theirs),
        node(start_host_cache, "asker") as (asker, mine),
    ):
        for prompt in (PROMPT, OTHER):
            await theirs.client.store(prompt.keys, prompt.sources)
        async with asyncio.timeout(120):
            await holder.publisher.flushed()
        mine.client.drop_chain(FIRST)
        await mine.client.attachment.released()
        assert (await prefetch(mine)).brought_pages == 0
        assert (await prefetch(mine, OTHER)).brought_pages == 2
        now, host = asker.host._clock(), asker.host
        host._clock = lambda: now + DISTRUST_SECONDS
        assert not host.is_distrusted(FIRST)


async def test_a_report_waits_for_a_host_cache_that_is_away(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
        worker.client.attachment._drop()
        assert not worker.client.node_id, "it is not attached"
        worker.client.drop_chain(FIRST)
        await worker.client.attachment.released()
        assert worker.client.attachment.num_attaches == 2
        assert service.host.storage.lookup(PROMPT.keys).usable_pages == 0
        assert Kind.FULL in service.host.store.manifest.kinds
