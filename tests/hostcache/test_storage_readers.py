"""Readers while their units are evicted: the bytes that were stored, or a miss."""

from __future__ import annotations

import asyncio
import random

from tests.hostcache.stored import Place, StoredChain, opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.tiers.storage_values import UnitRead
from ferryman_hostcache.storage.factory import StorageTier

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
CAPACITY_BYTES = 1 << 20  # two prompts
NUM_PROMPTS = 8


async def read_on(
    storage: StorageTier, name: str, prompts: list[StoredChain], is_over: asyncio.Event
) -> int:
    """Reads whatever was stored, until all is; returns how many units came."""
    rng, num_read = random.Random(name), 0
    while not is_over.is_set():
        prompt = rng.choice(prompts)
        found = await read_all(storage, prompt, reader=name)
        assert found.items() <= prompt.units.items(), "other bytes than were stored"
        num_read += len(found)
        await asyncio.sleep(0)
    return num_read


async def test_readers_get_the_bytes_stored_or_a_miss_while_units_are_evicted(
    place: Place,
) -> None:
    stored = [prompt_with(HYBRID, chain(99, 1, 2), snapshots=[2])]
    async with opened(place, capacity_bytes=CAPACITY_BYTES) as storage:
        storage.attach(HYBRID)
        await storage.store(stored[0].keys, stored[0].offers())
        held = storage.lease("long", stored[0].keys, stored[0].units)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read_on(storage, name, stored, is_over)) for name in "ab"]
            for first in range(NUM_PROMPTS):
                prompt = prompt_with(HYBRID, chain(first, *range(60)), snapshots=[60])
                assert (await storage.store(prompt.keys, prompt.offers())).num_stored
                stored.append(prompt)
            is_over.set()
        assert all(reader.result() for reader in readers), "nothing was read"
        counts = storage.statistics()
        assert sum(kind.num_evicted for kind in counts.kinds.values()), "nothing was evicted"
        assert not sum(kind.num_corrupt for kind in counts.kinds.values())
        reads = [UnitRead(unit, memoryview(bytearray(unit.num_bytes))) for unit in held]
        assert set(await storage.read(reads)) == set(held), "a leased unit was evicted"
