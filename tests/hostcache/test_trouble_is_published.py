"""Incidents with state that no request is asking for are published too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.hostcache.attached import load, prompt_of, until_stored, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.heard import hearing
from tests.hostcache.test_prefetch_runner import node
from tests.hostcache.test_storage_writeback import spoil
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.ids import NO_REQUEST
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.subjects import Subjects
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(7, 8, 9), snapshots=[0, 2])
EVENTS = Subjects().all_life_of(NO_REQUEST)


async def next_event(messages: Messages) -> LifecycleEntry:
    async with asyncio.timeout(120):
        return decode_event((await anext(messages)).payload)


async def test_a_corrupt_unit_is_published_when_nobody_knows_for_whom_it_was_read(
    host_cache: RunningHostCache, nats_url: str
) -> None:
    async with (
        hearing(nats_url, EVENTS) as messages,
        worker_at(host_cache.address, MANIFEST) as worker,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        lease = await load(worker, PROMPT)
        unit = lease.view.units[Kind.FULL, 2]
        worker.arena[unit.offset] ^= 1
        worker.client.release(lease, corrupt=[(unit.kind, unit.key)])
        event = await next_event(messages)
        assert (event.name, event.facts["key"]) == ("corrupt", unit.key.hex())
        assert not check([event])


async def test_a_file_that_is_spoilt_between_two_lives_is_published_at_the_next(
    start_host_cache: StartHostCache, tmp_path: Path, nats_url: str
) -> None:
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder, MANIFEST) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
    (path,) = folder.glob("*.extent")
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    (folder / "00000000000000ff.writing").write_bytes(b"a write that a kill cut short is no flaw")
    async with (
        hearing(nats_url, EVENTS) as messages,
        node(start_host_cache, "one", folder, MANIFEST),
    ):
        event = await next_event(messages)
        assert (event.name, event.facts) == ("corrupt", {"tier": "storage", "files": 1})


async def test_a_disk_that_fails_while_nobody_asks_is_published(
    start_host_cache: StartHostCache, tmp_path: Path, nats_url: str
) -> None:
    folder = tmp_path / "storage"
    async with (
        hearing(nats_url, EVENTS) as messages,
        node(start_host_cache, "one", folder, MANIFEST) as (service, worker),
    ):
        (folder / "owner.lock").rename(folder / "nobodys.lock")
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        event = await next_event(messages)
        assert (event.name, event.facts["error"]) == ("storage_failed", "ENOENT")
        assert service.host.storage.statistics().num_failures > 0


async def test_a_file_found_spoilt_while_another_node_fetches_is_published(
    start_host_cache: StartHostCache, tmp_path: Path, nats_url: str
) -> None:
    """The fetching node has a request; this one has none, and its disk is what is bad."""
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder, MANIFEST) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
    async with (
        hearing(nats_url, EVENTS) as messages,
        node(start_host_cache, "one", folder, MANIFEST) as (service, _worker),
    ):
        spoil(folder, PROMPT.content(Kind.FULL, 2))
        units = service.lower_tiers.fetches.units(MANIFEST.digest, PROMPT.keys, PROMPT.names)
        found = {held.name async for held in units}
        assert set(PROMPT.names) - found >= {(Kind.FULL, 2)}
        event = await next_event(messages)
        assert (event.name, event.facts["tier"]) == ("corrupt", "storage")
        assert event.facts["key"] == PROMPT.keys[2].hex()
