"""The arena is laid out for a worker that maps it, and for nobody who only says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
import pytest
from tests.hostcache.attached import load, prompt_of, read_all, worker_at
from tests.tiers.state_shapes import chain, manifest_of
from tests.waiting import until

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ManifestMismatch, Stale
from ferryman.tiers.values import WorkerLife
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.hostcache.arena import MappedArena
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman_hostcache import arena
from ferryman_hostcache.arena import AttachedWorkers
from ferryman_hostcache.service import RunningHostCache

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
OTHER = manifest_of(Kind.FULL, Kind.RECURRENT, fingerprint="another model")


async def attached(
    service: RunningHostCache, manifest: StateManifest, worker_id: str = "prefill-0000dead"
) -> pb.AttachResponse:
    """The answer to a caller that shows no more than its role."""
    async with grpc.aio.insecure_channel(service.address) as to_host:
        asked = pb.AttachRequest(
            worker_id=worker_id,
            worker_epoch=1,
            manifest_digest=manifest.digest,
            manifest_json=manifest.text,
        )
        with typed_errors():
            answer: pb.AttachResponse = await HostCacheServiceStub(to_host).Attach(asked)
    return answer


async def test_who_attaches_first_and_maps_nothing_fixes_nothing(
    host_cache: RunningHostCache,
) -> None:
    await attached(host_cache, OTHER)
    assert not host_cache.host.is_laid_out
    prompt = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])
    async with worker_at(host_cache.address, MANIFEST) as worker:
        assert host_cache.host.store.manifest == MANIFEST
        assert await worker.client.store(prompt.keys, prompt.sources) == 3
        assert read_all(worker, prompt, await load(worker, prompt)) == 3
        with pytest.raises(ManifestMismatch):
            await attached(host_cache, OTHER)


async def test_of_two_that_attach_with_other_manifests_the_first_that_maps_it_has_it(
    host_cache: RunningHostCache,
) -> None:
    """The other one cannot act under a layout that is not its own."""
    late = await attached(host_cache, OTHER, "prefill-00000001")
    first = await attached(host_cache, MANIFEST, "prefill-00000002")
    workers = host_cache.host.workers
    with mapped(first):
        host_cache.host.tick()
        assert host_cache.host.store.manifest == MANIFEST
        with mapped(late), pytest.raises(Stale, match="attach again"):
            workers.living("prefill-00000001")
        assert workers.living("prefill-00000002") == WorkerLife("prefill-00000002", 1)
        with pytest.raises(ManifestMismatch):
            await attached(host_cache, OTHER, "prefill-00000001")
    await until(lambda: len(workers) == 0)


@contextmanager
def mapped(answer: pb.AttachResponse) -> Iterator[None]:
    arena = MappedArena(answer.arena_path, answer.arena_bytes, answer.liveness_offset)
    yield
    arena.close()


def test_of_too_many_that_map_nothing_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "MAX_UNLOCKED", 3)
    locked = {1}
    workers = AttachedWorkers(locked.__contains__)
    lives = [WorkerLife(f"prefill-{number}", 1) for number in range(6)]
    for life in lives[:1]:
        workers.attach(life, MANIFEST, 0.0)
    assert workers.living("prefill-0") == lives[0]
    for life in lives[1:]:
        workers.attach(life, MANIFEST, 0.0)
    assert len(workers) == 1 + 3, "the one that maps it, and the last three"
    locked.add(6)
    assert workers.living("prefill-5") == lives[5]
