"""When the host tier is written to storage, and what a spoilt file means for a prefetch."""

from __future__ import annotations

from pathlib import Path

from tests.hostcache.attached import load, prompt_of, until_stored
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.heard import hearing
from tests.hostcache.test_prefetch_runner import (
    MANIFEST,
    PROMPT,
    TAGS,
    assert_quiet,
    node,
    prefetch,
)
from tests.tiers.state_shapes import chain
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.handoff.lifecycle import check
from ferryman.runtime.lifecycle import decode_event
from ferryman.tiers.prefetch_values import PrefetchShortfall
from ferryman.wire.nats.subjects import Subjects
from ferryman_hostcache.service import RunningHostCache


def num_stored(service: RunningHostCache) -> int:
    kinds = service.host.storage.statistics().kinds.values()
    return sum(each.num_units for each in kinds)


async def test_the_selective_policy_writes_at_the_second_hit(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    storage, policy = tmp_path / "storage", "write_through_selective"
    async with node(start_host_cache, "one", storage, write_policy=policy) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        worker.client.release(await load(worker, PROMPT))
        assert service.lower_tiers.backlog.statistics().num_waiting == 0
        assert num_stored(service) == 0
        worker.client.release(await load(worker, PROMPT))
        await until_stored(service, PROMPT)
        await until(lambda: service.host.store.statistics().num_leases == 0)
        assert_quiet(service)


async def test_write_back_writes_the_coldest_when_little_is_free(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    storage, small = tmp_path / "storage", 65536
    async with node(
        start_host_cache, "one", storage, write_policy="write_back", memory_bytes=small
    ) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        service.lower_tiers.tick()
        assert service.lower_tiers.backlog.statistics().num_waiting == 0
        room = service.host.store.layout.num_slots[Kind.FULL] - len(PROMPT.keys)
        other = prompt_of(MANIFEST, chain(*range(100, 100 + room)))
        await worker.client.store(other.keys, other.sources)
        assert service.host.store.free_share(Kind.FULL) == 0.0
        service.lower_tiers.tick()
        first = PROMPT.keys[:1]
        await until(lambda: service.host.storage.lookup(first).pages[Kind.FULL] == (0,))


async def test_a_spoilt_file_is_a_miss_that_is_counted_and_published(
    start_host_cache: StartHostCache, tmp_path: Path, nats_url: str
) -> None:
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
    async with (
        node(start_host_cache, "one", folder) as (service, worker),
        hearing(nats_url, Subjects().all_life_of(TAGS.request_id)) as messages,
    ):
        spoil(folder, PROMPT.content(Kind.FULL, 5))
        brought = await prefetch(worker)
        assert (brought.asked_pages, brought.brought_pages) == (8, 4)
        assert brought.reason == PrefetchShortfall.TIER_FAILED
        assert service.host.storage.statistics().kinds[Kind.FULL].num_corrupt == 1
        events = [decode_event((await anext(messages)).payload) for _ in range(2)]
        assert [event.name for event in events] == ["corrupt", "stored"]
        facts = events[0].facts
        assert (facts["tier"], facts["kind"]) == ("storage", "full")
        assert facts["key"] == PROMPT.keys[5].hex()
        assert not check(events)
        assert_quiet(service)


def spoil(folder: Path, content: bytes) -> None:
    """Flips a bit of one unit at its place in storage."""
    for path in folder.glob("*.extent"):
        data = bytearray(path.read_bytes())
        if (at := data.find(content)) >= 0:
            data[at + len(content) // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("the unit is in no file")
