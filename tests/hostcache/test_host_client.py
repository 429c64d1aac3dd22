"""Workers against a real host-cache: what one stores the other loads, and nothing ever fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import pytest
from tests.hostcache.attached import load, prompt_of, read_all, source_of, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import ManifestMismatch, Unavailable
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.scalars import kind_to_wire
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.arena_copy import UnitSource, check_room
from ferryman.wire.hostcache.attachment import (
    MAX_CORRUPT_NAMES,
    MAX_RELEASES,
    HostCacheOptions,
    ReleaseNote,
    first_of,
)
from ferryman.wire.hostcache.client import MISS, host_cache_client
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
TAGS = CallTags("req-1", 1)


def pools_are_idle(host_cache: RunningHostCache) -> bool:
    kinds = host_cache.host.store.statistics().kinds.values()
    return all(each.total == each.free + each.resident and not each.leased for each in kinds)


async def test_what_one_worker_stores_another_loads_byte_for_byte(
    host_cache: RunningHostCache,
) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2, 3, 4, 5), snapshots=[2, 4])
    async with (
        worker_at(host_cache.address, MANIFEST) as prefill,
        worker_at(host_cache.address, MANIFEST, "decode-00000002") as decode,
    ):
        assert await decode.client.store(prompt.keys, prompt.sources, tags=TAGS) == 7
        lease = await load(prefill, prompt)
        assert lease.usable_pages == 5
        assert read_all(prefill, prompt, lease) == 7
        prefill.client.release(lease)
        await prefill.client.attachment.released()
        assert pools_are_idle(host_cache)
        assert prefill.client.statistics().num_hits == 1


class UnitByUnit:
    """A pace that lets one unit through at a time, and holds the third until it is told."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.may_go_on = asyncio.Event()

    async def next_run(self, sizes: Sequence[int], first: int) -> int:
        self.left.append(len(sizes) - first)
        if len(self.left) == 3:
            await self.may_go_on.wait()
        return 1


@pytest.mark.parametrize("ends", ["stored", "cancelled"])
async def test_units_that_are_copied_one_by_one_become_visible_together(
    host_cache: RunningHostCache, ends: str
) -> None:
    prompt, pace = prompt_of(MANIFEST, chain(1, 2, 3, 4, 5), snapshots=[2, 4]), UnitByUnit()
    async with worker_at(host_cache.address, MANIFEST) as worker:
        storing = asyncio.create_task(worker.client.store(prompt.keys, prompt.sources, pace=pace))
        await until(lambda: len(pace.left) == 3)
        assert host_cache.host.store.usable_pages(prompt.keys) == 0
        if ends == "cancelled":
            storing.cancel()
            await asyncio.wait([storing])
            await worker.client.attachment.released()
            assert host_cache.host.store.usable_pages(prompt.keys) == 0
        else:
            pace.may_go_on.set()
            assert await storing == 7
            assert pace.left == [7, 6, 5, 4, 3, 2, 1]
            lease = await load(worker, prompt)
            assert read_all(worker, prompt, lease) == 7
            worker.client.release(lease)
            await worker.client.attachment.released()
        assert pools_are_idle(host_cache)


@pytest.mark.parametrize("ends", ["stored", "given up", "later"])
async def test_the_next_turn_awaits_what_decode_is_writing_just_now(
    host_cache: RunningHostCache, ends: str
) -> None:
    """It comes before the copy has ended. It waits for that, and no longer than it wants to."""
    prompt, may_go_on = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2]), threading.Event()
    sources = [replace(source, copy=partial(_held, may_go_on, source)) for source in prompt.sources]

    def is_reserved() -> bool:
        return host_cache.host.store.statistics().num_reservations > 0

    async with (
        worker_at(host_cache.address, MANIFEST) as prefill,
        worker_at(host_cache.address, MANIFEST, "decode-00000002") as decode,
    ):
        ask = partial(prefill.client.acquire, prompt.keys, prompt.prompt_len, 0)
        storing = asyncio.create_task(decode.client.store(prompt.keys, sources))
        try:
            await until(is_reserved)
            assert (await ask()).usable_pages == 0, "without patience it is a miss"
            patience = 0.01 if ends == "later" else 5.0
            asked = asyncio.create_task(ask(patience=patience))
            if ends == "later":
                assert (await asked).usable_pages == 0
                return
            await asyncio.wait([asked], timeout=0.05)
            assert not asked.done()
            if ends == "given up":
                host_cache.host.release(name for name, _ in _writers(host_cache))
            else:
                may_go_on.set()
            lease = await asked
            assert lease.usable_pages == (3 if ends == "stored" else 0)
            assert read_all(prefill, prompt, lease) == (4 if ends == "stored" else 0)
        finally:
            may_go_on.set()
            await storing


def _held(may_go_on: threading.Event, source: UnitSource, room: memoryview) -> bytes:
    assert may_go_on.wait(60)
    return source.copy(room)


def _writers(host_cache: RunningHostCache) -> list[tuple[str, object]]:
    return list(host_cache.host.store._writers.items())


async def test_only_what_the_device_lacks_is_granted(host_cache: RunningHostCache) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2, 3, 4), snapshots=[3])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        await worker.client.store(prompt.keys, prompt.sources)
        lease = await load(worker, prompt, have_pages=3)
        assert set(lease.view.units) == {(Kind.FULL, 3), (Kind.RECURRENT, 3)}
        only_state = await load(worker, prompt, have_pages=4)
        assert set(only_state.view.units) == {(Kind.RECURRENT, 3)}
        nothing = await worker.client.acquire(prompt.keys, prompt.prompt_len, 4, min_pages=4)
        assert nothing == MISS


async def test_the_last_token_is_never_reused(host_cache: RunningHostCache) -> None:
    """A prompt of just four pages may be resumed at three: its last token gives the logits."""
    prompt = prompt_of(MANIFEST, chain(1, 2, 3, 4), snapshots=[1, 3])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        await worker.client.store(prompt.keys, prompt.sources)
        lease = await worker.client.acquire(prompt.keys, prompt.prompt_len - 1, 0)
        assert lease.usable_pages == 2
        assert (Kind.RECURRENT, 3) not in lease.view.units


async def test_a_known_path_without_a_state_shows_where_it_is_left(
    host_cache: RunningHostCache,
) -> None:
    stored = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2])
    other = prompt_of(MANIFEST, chain(1, 2, 9), snapshots=[])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        await worker.client.store(stored.keys, stored.sources)
        lease = await load(worker, other)
        assert lease.usable_pages == 0
        assert lease.view.pages_from(0) == 2
        assert worker.client.statistics().num_misses == 1


async def test_nothing_is_stored_twice(host_cache: RunningHostCache) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[2])
    longer = prompt_of(MANIFEST, chain(1, 2, 3, 4), snapshots=[2, 3])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        assert await worker.client.store(prompt.keys, prompt.sources) == 4
        assert await worker.client.store(prompt.keys, prompt.sources) == 0
        assert await worker.client.store(longer.keys, longer.sources) == 2
        assert worker.client.statistics().num_stores_skipped == 1


async def test_stores_of_one_worker_may_stand_on_each_other(host_cache: RunningHostCache) -> None:
    short = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])
    longer = prompt_of(MANIFEST, chain(1, 2, 3, 4), snapshots=[3])
    beyond = [source for source in longer.sources if source.page_index >= 2]
    async with worker_at(host_cache.address, MANIFEST) as worker:
        stored = await asyncio.gather(
            worker.client.store(short.keys, short.sources),
            worker.client.store(longer.keys, beyond),
        )
        assert tuple(stored) == (3, 3)
        assert (await load(worker, longer)).usable_pages == 4


async def test_a_flipped_byte_is_found_reported_and_dropped(host_cache: RunningHostCache) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2, 3), snapshots=[0, 2])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        await worker.client.store(prompt.keys, prompt.sources)
        lease = await load(worker, prompt)
        unit = lease.view.units[Kind.FULL, 1]
        worker.arena[unit.offset + 5] ^= 1
        with pytest.raises(AssertionError):
            read_all(worker, prompt, lease)
        worker.client.release(lease, corrupt=[(unit.kind, unit.key)])
        await worker.client.attachment.released()
        assert host_cache.host.store.statistics().num_corrupt == 1
        assert pools_are_idle(host_cache)
        again = await load(worker, prompt)
        assert set(again.view.units) == {(Kind.FULL, 0), (Kind.RECURRENT, 0)}
        assert again.usable_pages == 1
        assert await worker.client.store(prompt.keys, prompt.sources) == 3
        assert read_all(worker, prompt, await load(worker, prompt)) == 5


async def test_a_false_report_drops_nothing(host_cache: RunningHostCache) -> None:
    prompt = prompt_of(MANIFEST, chain(1), snapshots=[0])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        await worker.client.store(prompt.keys, prompt.sources)
        lease = await load(worker, prompt)
        worker.client.release(lease, corrupt=[(Kind.FULL, prompt.keys[0])])
        await worker.client.attachment.released()
        assert pools_are_idle(host_cache)
        assert (await load(worker, prompt)).usable_pages == 1


async def test_eviction_keeps_what_is_leased(start_host_cache: StartHostCache) -> None:
    async with (
        start_host_cache(memory_bytes=16 * 4096) as host_cache,
        worker_at(host_cache.address, MANIFEST) as worker,
    ):
        kept = prompt_of(MANIFEST, chain(1, 1, 1), snapshots=[2])
        await worker.client.store(kept.keys, kept.sources)
        lease = await load(worker, kept)
        for number in range(2, 40):
            other = prompt_of(MANIFEST, chain(number, *range(8)), snapshots=[8])
            await worker.client.store(other.keys, other.sources)
        assert host_cache.host.store.statistics().num_evicted > 0
        assert read_all(worker, kept, lease) == 4
        assert (await load(worker, kept)).usable_pages == 3
        host_cache.host.store.check_integrity()


async def test_another_model_is_refused_and_told_why(host_cache: RunningHostCache) -> None:
    async with worker_at(host_cache.address, MANIFEST):
        other = manifest_of(Kind.FULL, Kind.RECURRENT, fingerprint="another")
        with pytest.raises(ManifestMismatch, match="fingerprint: tiny here, another there"):
            host_cache.host.attach(WorkerLife("prefill-00000002", 1), other)


async def test_a_worker_of_another_arithmetic_is_refused_and_told_which(
    host_cache: RunningHostCache,
) -> None:
    async with worker_at(host_cache.address, MANIFEST):
        unlike = replace(MANIFEST, arithmetic="cpu/avx512/float32/r0/tp1")
        with pytest.raises(ManifestMismatch, match="arithmetic: any here, cpu/avx512/float32/r0/"):
            host_cache.host.attach(WorkerLife("prefill-00000002", 1), unlike)


async def test_a_restart_makes_a_new_epoch_and_the_old_leases_void(
    start_host_cache: StartHostCache,
) -> None:
    prompt = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])
    async with AsyncExitStack() as stack:
        async with start_host_cache() as first:
            address, old = first.address, first.host.identity
            worker = await stack.enter_async_context(worker_at(address, MANIFEST))
            await worker.client.store(prompt.keys, prompt.sources)
            lease = await load(worker, prompt)
        assert await load(worker, prompt) == MISS
        assert read_all(worker, prompt, lease) == 3, "a mapped arena outlives its owner"
        port = int(address.rpartition(":")[2])
        second = await stack.enter_async_context(start_host_cache(port=port))
        link = await worker.client.attachment.attached()
        assert link.epoch == second.host.identity.epoch != old.epoch
        worker.client.release(lease)
        assert await load(worker, prompt) == MISS
        assert await worker.client.store(prompt.keys, prompt.sources) == 3
        assert read_all(worker, prompt, await load(worker, prompt)) == 3
        assert worker.client.statistics().num_attaches == 2
        async with asyncio.timeout(20):
            num_times = await worker.client.attachment.usable_since(1)
            assert num_times == worker.client.num_times_usable >= 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await worker.client.attachment.usable_since(num_times)


async def test_without_a_host_cache_everything_is_a_miss() -> None:
    options = HostCacheOptions("127.0.0.1:1", "prefill-00000001", 7)
    taken: list[memoryview] = []

    async def take(arena: memoryview) -> None:
        taken.append(arena)

    prompt = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])
    async with host_cache_client(options, MANIFEST, take) as client:
        assert await client.acquire(prompt.keys, prompt.prompt_len, 0) == MISS
        assert await client.store(prompt.keys, prompt.sources) is None
        said = client.statistics()
        assert (said.num_misses, said.num_stores_dropped, taken) == (1, 1, [])


async def test_a_device_that_takes_no_arena_is_told_and_fails_nobody(
    host_cache: RunningHostCache, caplog: pytest.LogCaptureFixture
) -> None:
    failed = asyncio.Event()

    async def refuse(arena: memoryview) -> None:
        failed.set()
        raise RuntimeError("cannot register host memory")

    options = HostCacheOptions(host_cache.address, "prefill-00000001", 7)
    prompt = prompt_of(MANIFEST, chain(1, 2))
    async with host_cache_client(options, MANIFEST, refuse) as client:
        await asyncio.wait_for(failed.wait(), 120)
        await until(lambda: "cannot register host memory" in caplog.text)
        assert await client.acquire(prompt.keys, prompt.prompt_len, 0) == MISS
        assert not host_cache.host.arena.is_alive(1), "it maps nothing of it any more"


def test_room_that_was_not_asked_for_or_lies_outside_the_arena_is_refused() -> None:
    asked = [source_of(Kind.FULL, 3, b"content")]

    def room(page_index: int, offset: int) -> list[pb.ReservedUnit]:
        full = kind_to_wire(Kind.FULL)
        return [pb.ReservedUnit(kind=full, page_index=page_index, offset=offset, num_bytes=7)]

    check_room(room(3, 93), asked, arena_bytes=100)
    for spoilt in (room(4, 93), room(3, 94)):
        with pytest.raises(Unavailable, match="amiss"):
            check_room(spoilt, asked, arena_bytes=100)


def test_releases_go_in_messages_of_a_bounded_size() -> None:
    """More than 4 MiB of names in one message would be refused, and be sent again for ever."""
    names = tuple((Kind.FULL, key) for key in chain(1, 2)) * (MAX_CORRUPT_NAMES // 4)
    corrupt = [ReleaseNote(1, str(i), names) for i in range(3)]
    assert first_of(corrupt) == corrupt[:2]
    assert first_of([ReleaseNote(1, "all", 4 * names)]), "one goes, however large it is"
    plain = [ReleaseNote(1, str(i)) for i in range(2 * MAX_RELEASES)]
    assert first_of(plain) == plain[:MAX_RELEASES]
