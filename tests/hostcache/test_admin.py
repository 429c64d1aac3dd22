"""Orders to a host-cache over the control subject."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from tests.hostcache.attached import load, prompt_of, until_stored, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest, Unavailable
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.storage_values import UnitRead
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])


async def order(
    nats_url: str, host: RunningHostCache, verb: str, payload: bytes = b""
) -> dict[str, int]:
    async with nats_bus(NatsOptions(nats_url, "tests")) as bus:
        await bus.connected()
        subject = Subjects().control(host.worker_id, verb)
        async with asyncio.timeout(120):
            while True:
                with suppress(Unavailable):  # it may not have subscribed yet
                    said = await bus.request(subject, payload, timeout_seconds=60)
                    answer: dict[str, int] = json.loads(said)
                    return answer
                await asyncio.sleep(0.01)


async def test_flush_gives_up_what_nobody_reads(
    start_host_cache: StartHostCache, nats_url: str
) -> None:
    async with (
        start_host_cache(lease_seconds=1000) as host,
        worker_at(host.address, MANIFEST) as worker,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        lease = await load(worker, PROMPT)
        assert await order(nats_url, host, "flush") == {"dropped": 0}, "it is being read"
        worker.client.release(lease)
        await worker.client.attachment.released()
        assert await order(nats_url, host, "flush") == {"dropped": 3}
        assert host.host.store.lookup(PROMPT.keys).usable_pages == 0
        host.host.store.check_integrity()


async def test_flushing_all_takes_the_storage_tier_too(
    start_host_cache: StartHostCache, nats_url: str, tmp_path: Path
) -> None:
    storage = StorageSettings(folder=str(tmp_path / "storage"))
    async with (
        start_host_cache(storage=storage) as host,
        worker_at(host.address, MANIFEST) as worker,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(host, PROMPT)
        await order(nats_url, host, "flush")
        assert host.host.storage.lookup(PROMPT.keys).usable_pages == 2
        assert (await order(nats_url, host, "flush", b"all"))["dropped"] == 3
        assert host.host.storage.lookup(PROMPT.keys).usable_pages == 0


async def test_flushing_all_leaves_what_is_being_read_from_storage(
    start_host_cache: StartHostCache, nats_url: str, tmp_path: Path
) -> None:
    storage = StorageSettings(folder=str(tmp_path / "storage"))
    async with (
        start_host_cache(storage=storage) as host,
        worker_at(host.address, MANIFEST) as worker,
    ):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(host, PROMPT)
        (unit,) = host.host.storage.lease("reader", PROMPT.keys, [(Kind.FULL, 0)])
        await order(nats_url, host, "flush", b"all")
        memory = memoryview(bytearray(unit.num_bytes))
        assert await host.host.storage.read([UnitRead(unit, memory)]) == (unit,)
        assert host.host.storage.lookup(PROMPT.keys).pages == {Kind.FULL: (0,), Kind.RECURRENT: ()}
        host.host.storage.release("reader")


async def test_an_order_that_is_none_is_refused(
    start_host_cache: StartHostCache, nats_url: str
) -> None:
    async with start_host_cache() as host:
        for verb, payload in (("snapshot", b""), ("flush", b"everything")):
            with pytest.raises(InvalidRequest, match="no order is called"):
                await order(nats_url, host, verb, payload)
