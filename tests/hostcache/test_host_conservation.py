"""Two workers at random, some giving up half-way: afterwards every slot is free or resident."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from tests.hostcache.attached import AttachedTestWorker, load, prompt_of, read_all, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind

MANIFEST = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
NUM_WORKERS = 2
NUM_LANES = 4
NUM_STEPS = 60


async def live(worker: AttachedTestWorker, rng: random.Random) -> int:
    """Loads and stores random prompts; how many units were read and found right."""
    num_read = 0
    for _ in range(NUM_STEPS):
        pages = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        snapshots = sorted(rng.sample(range(len(pages)), rng.randint(0, min(2, len(pages)))))
        prompt = prompt_of(MANIFEST, chain(*pages), snapshots, with_windows=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.choice([0.001, 5.0])):
                lease = await load(worker, prompt, have_pages=rng.randint(0, 2))
                num_read += read_all(worker, prompt, lease)
                worker.client.release(lease)
                await worker.client.store(prompt.keys, prompt.sources)
    return num_read


async def test_nothing_is_lost_after_many_loads_stores_and_cancellations(
    start_host_cache: StartHostCache,
) -> None:
    async with start_host_cache(memory_bytes=24 * 4096) as service:
        async with (
            worker_at(service.address, MANIFEST) as prefill,
            worker_at(service.address, MANIFEST, "decode-00000002") as decode,
        ):
            workers = (prefill, decode)
            lanes = [
                live(worker, random.Random(seed)) for seed, worker in enumerate(workers * NUM_LANES)
            ]
            assert sum(await asyncio.gather(*lanes)) > 0
            said = [worker.client.statistics() for worker in workers]
            assert sum(each.num_failures for each in said) == 0
            assert all(each.num_attaches == 1 for each in said)
        service.host.tick()
        store = service.host.store
        store.check_integrity()
        counts = store.statistics()
        assert counts.num_evicted > 0
        assert (counts.num_leases, counts.num_reservations, counts.num_corrupt) == (0, 0, 0)
        for each in counts.kinds.values():
            assert (each.reserved, each.leased, each.leaving) == (0, 0, 0)
            assert each.total == each.free + each.resident
