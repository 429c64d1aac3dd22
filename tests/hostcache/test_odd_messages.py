"""Messages that mean nothing here are the caller's mistake: said so, and no traceback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tests.hostcache.attached import AttachedTestWorker, load, prompt_of, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest, PermissionDenied
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.hostcache.attachment import MAX_DROPPED_CHAINS
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
WORKER = "prefill-00000001"
KEYS = chain(1, 2, 3)


def _range(kind: Any) -> types_pb2.PageRange:
    return types_pb2.PageRange(kind=kind, first_page=0, end_page=2)


def _odd_calls(stub: Any, epoch: int, proof: Any) -> Iterable[tuple[str, Any]]:
    keys = b"".join(KEYS)
    lease: dict[str, Any] = {"epoch": epoch, "worker_id": WORKER, "page_keys": keys}
    fetch: dict[str, Any] = {"epoch": epoch, "manifest_digest": MANIFEST.digest, "page_keys": keys}
    odd: list[Any] = [types_pb2.KIND_WINDOW, 99, types_pb2.KIND_UNSPECIFIED]
    for kind in odd:
        yield f"Fetch {kind}", stub.Fetch(pb.FetchRequest(**fetch, units=[_range(kind)]))
        reserve = pb.HostCacheServiceReserveRequest(**lease, lease_id="l", units=[_range(kind)])
        yield f"Reserve {kind}", stub.Reserve(reserve, metadata=proof)
        corrupt = [pb.UnitName(kind=kind, key=KEYS[0])]
        released = pb.ReleaseRequest(epoch=epoch, corrupt=corrupt)
        yield f"Release {kind}", stub.Release(released, metadata=proof)
    many = b"".join(chain(*range(MAX_DROPPED_CHAINS + 1)))
    for dropped in (many, many[:17]):
        release = pb.ReleaseRequest(epoch=epoch, dropped_chains=dropped)
        yield f"Release {len(dropped)} bytes of chains", stub.Release(release, metadata=proof)
    for request_id in ("_", "a.b", "*"):
        context = types_pb2.RequestContext(request_id=request_id, attempt=1)
        acquire = pb.AcquireRequest(**lease, lease_id="a", context=context, max_pages=3)
        yield f"Acquire {request_id}", stub.Acquire(acquire, metadata=proof)
    beyond = types_pb2.PageRange(kind=types_pb2.KIND_FULL, first_page=0, end_page=2**32 - 1)
    yield "pages beyond", stub.Fetch(pb.FetchRequest(**fetch, units=[beyond]))


async def proof_of(worker: AttachedTestWorker) -> Any:
    return (await worker.client.attachment.attached()).arena.proof


async def _error_of(call: Any) -> Exception | None:
    try:
        with typed_errors():
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except Exception as error:
        return error
    return None


async def test_each_is_the_callers_mistake_and_the_host_cache_serves_on(
    start_host_cache: StartHostCache, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        start_host_cache() as host_cache,
        worker_at(host_cache.address, MANIFEST, WORKER) as worker,
        channel(host_cache.address) as way,
    ):
        prompt = prompt_of(MANIFEST, KEYS, snapshots=[2])
        await worker.client.store(prompt.keys, prompt.sources)
        stub, epoch = HostCacheServiceStub(way), host_cache.host.identity.epoch
        for name, call in _odd_calls(stub, epoch, await proof_of(worker)):
            error = await _error_of(call)
            assert type(error) is InvalidRequest, (name, error)
        assert (await load(worker, prompt)).usable_pages == 3
    assert not [one for one in caplog.records if one.exc_info or one.levelname == "ERROR"]


KEY_OF_PROOF = "ferryman-arena"
UNPROVEN: list[Any] = [
    (),
    ((KEY_OF_PROOF, ""),),
    ((KEY_OF_PROOF, 64 * "0"),),
    (("authorization", 64 * "0"),),
]


@pytest.mark.parametrize("shown", UNPROVEN)
async def test_a_caller_that_cannot_open_the_arena_changes_nothing(
    start_host_cache: StartHostCache, shown: Any
) -> None:
    """It names a worker that maps it, and its leases."""
    async with (
        start_host_cache() as host_cache,
        worker_at(host_cache.address, MANIFEST, WORKER) as worker,
        channel(host_cache.address) as way,
    ):
        prompt = prompt_of(MANIFEST, KEYS, snapshots=[2])
        await worker.client.store(prompt.keys, prompt.sources)
        stub, epoch = HostCacheServiceStub(way), host_cache.host.identity.epoch
        keys = b"".join(KEYS)
        calls = [
            stub.Acquire(
                pb.AcquireRequest(epoch=epoch, worker_id=WORKER, page_keys=keys, lease_id="a"),
                metadata=shown,
            ),
            stub.Reserve(
                pb.HostCacheServiceReserveRequest(
                    epoch=epoch, worker_id=WORKER, page_keys=keys, lease_id="b"
                ),
                metadata=shown,
            ),
            stub.Commit(
                pb.HostCacheServiceCommitRequest(epoch=epoch, lease_id="b"), metadata=shown
            ),
            stub.Renew(
                pb.HostCacheServiceRenewRequest(epoch=epoch, lease_ids=["b"]), metadata=shown
            ),
            stub.Release(pb.ReleaseRequest(epoch=epoch, dropped_chains=KEYS[0]), metadata=shown),
        ]
        errors = [type(await _error_of(call)) for call in calls]
        proof = await proof_of(worker)
        twice = stub.Renew(pb.HostCacheServiceRenewRequest(epoch=epoch), metadata=proof * 2)
        assert errors == [PermissionDenied] * 5
        assert isinstance(await _error_of(twice), PermissionDenied)
        renewed = stub.Renew(pb.HostCacheServiceRenewRequest(epoch=epoch), metadata=proof)
        assert await _error_of(renewed) is None
        assert (await load(worker, prompt)).usable_pages == 3, "nothing was dropped"
