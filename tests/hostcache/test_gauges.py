"""What /metrics of a host-cache says, by tier and kind, and that the document lists all of it."""

from __future__ import annotations

import re
from pathlib import Path

from grpc.aio import insecure_channel
from tests.hostcache.attached import load, prompt_of, until_flushed, until_stored
from tests.hostcache.conftest import StartHostCache
from tests.hostcache.test_prefetch_runner import node, prefetch
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.runtime.metrics import Metrics
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman_hostcache.gauges import watch
from ferryman_hostcache.service import RunningHostCache

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
FULL_BYTES = MANIFEST.layout(Kind.FULL).slot_bytes
PROMPT = prompt_of(MANIFEST, chain(*range(1, 25)), snapshots=[11, 23])


def scraped(service: RunningHostCache) -> dict[str, float]:
    metrics = Metrics("hostcache")
    watch(metrics, service.host, service.publisher, service.lower_tiers)
    lines = metrics.render().decode().splitlines()
    samples = (line.split() for line in lines if not line.startswith("#"))
    return {name.removeprefix("ferryman_hostcache_"): float(value) for name, value in samples}


async def test_bytes_seconds_hits_truncations_and_evictions_are_told_by_tier_and_kind(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    folder = tmp_path / "storage"
    async with node(start_host_cache, "one", folder, MANIFEST) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
        worker.client.release(await load(worker, PROMPT))
        await worker.client.attachment.released()
        await until_flushed(service, PROMPT)
        found = scraped(service)
        assert found["full_host_stored"] == found["full_host_hits"] == found["full_host_evicted"]
        assert found["full_host_evicted"] == found["full_storage_stored"] == 24
        assert found["recurrent_host_evicted"] == 2
        assert found["storage_written_seconds"] > 0 < found["storage_written_bytes"]
    small = {"memory_bytes": 8192, "prefetch_share": 1.0}
    async with node(start_host_cache, "one", folder, MANIFEST, **small) as (service, worker):
        assert (await prefetch(worker, PROMPT)).granted_pages == 12
        found = scraped(service)
        assert found["full_host_truncated"] == 12
        assert found["recurrent_host_truncated"] == 1
        assert found["full_from_storage_bytes"] == 12 * FULL_BYTES
        assert found["from_storage_seconds"] > 0 < found["storage_read_seconds"]
        assert found["prefetch_truncated"] == 1


async def test_stats_tell_the_counts_of_the_store_and_of_prefetches_by_their_names(
    start_host_cache: StartHostCache, tmp_path: Path
) -> None:
    async with node(start_host_cache, "one", tmp_path / "storage", MANIFEST) as (service, worker):
        await worker.client.store(PROMPT.keys, PROMPT.sources)
        await until_stored(service, PROMPT)
        lease = await load(worker, PROMPT)
        async with insecure_channel(service.address) as way:
            stats = await HostCacheServiceStub(way).Stats(pb.StatsRequest())
        worker.client.release(lease)
    counts = (stats.stored, stats.evicted, stats.corrupt, stats.hits, stats.leases)
    assert counts == (26, 0, 0, 1, 1)
    assert (stats.reservations, stats.quarantined, stats.prefetch.begun) == (0, 0, 0)
    full, recurrent = stats.kinds
    assert (full.resident, full.leased, recurrent.resident) == (24, 24, 2)
    assert full.total == full.free + full.resident + full.reserved + full.leaving
    assert stats.used_bytes == 24 * FULL_BYTES + 2 * MANIFEST.layout(Kind.RECURRENT).slot_bytes


def documented() -> set[str]:
    """Items are: groups: fields, with a word on some in parentheses, over one or more lines."""
    items = re.sub(r"\n +", " ", DOCUMENT.read_text())
    item = re.compile(r"^- `ferryman_hostcache_(\w+)_\*`(.*?): (.*)$", re.MULTILINE)
    found: set[str] = set()
    for first, others, text in item.findall(items):
        fields = [field.strip() for field in re.sub(r"\(.*?\)", "", text).split(",")]
        for group in (first, *re.findall(r"_(\w+)_\*", others)):
            found |= {f"{group}_{field}" for field in fields}
    return found


async def test_the_document_names_every_gauge_and_no_other(host_cache: RunningHostCache) -> None:
    assert documented() == set(scraped(host_cache))
