"""Bounds, calls and arguments where the parts of the host-cache and its tiers meet: each was once
left out by a draw of planted defects, and no test noticed."""

from __future__ import annotations

import errno
import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from tests.cluster_keys import KEY, STORED
from tests.doubles.memory_blob_store import BlobMedium, MemoryBlob, MemoryBlobStore
from tests.hostcache.stored import Place, opened, prompt_with
from tests.hostcache.test_extent_format import SEALS, plans
from tests.tiers.state_shapes import chain, manifest_of
from tests.tiers.test_storage import found, make, named, planned
from tests.tiers.test_store import store_with

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import WrongEpoch
from ferryman.settings.hostcache import StorageSettings
from ferryman.tiers.extents import RemoveExtent
from ferryman.tiers.prefetch import RoomLimits
from ferryman.tiers.storage_values import ExtentPlan
from ferryman.wire.grpc.rpc import NO_TAGS
from ferryman.wire.hostcache.attachment import (
    MAX_DROPPED_CHAINS,
    HostAttachment,
    HostCacheOptions,
)
from ferryman.wire.redis.index import NodeLife
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman_hostcache import server, shared_folders
from ferryman_hostcache.gauges import Beats
from ferryman_hostcache.prefetch_io import PrefetchIO
from ferryman_hostcache.server import HostCacheServicer
from ferryman_hostcache.storage.blob_storage import MAX_STORES_WAITING, BlobStorage
from ferryman_hostcache.storage.blob_store import AlignedBuffer
from ferryman_hostcache.storage.extent import BadExtent, extent_name, header_to_bytes
from ferryman_hostcache.storage.object_blob_store import ObjectBlobStore
from ferryman_hostcache.storage.object_reader import os_errors
from ferryman_hostcache.storage.scan import read_header

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)


def test_pages_that_a_model_has_not_take_no_room() -> None:
    limits = RoomLimits(0, 1, store_with(recurrent=2).layout)
    assert limits.may_fit(cast(Any, None), 1000)


def test_memory_of_the_same_size_is_used_again() -> None:
    buffer = AlignedBuffer()
    buffer._first(8192)
    memory = buffer._map
    for num_bytes in (8192, 4096, 1):
        assert len(buffer._first(num_bytes)) == num_bytes
        assert buffer._map is memory
    buffer._first(8193)
    assert len(buffer._map) >= 8193


def test_an_extent_none_of_whose_units_has_a_place_is_removed_at_start() -> None:
    plan = planned(make(num_blocks=9), chain(1, 2), named(2, snapshots=[1]))
    snapshot = [unit for unit in plan.units if unit.kind is Kind.RECURRENT]
    again = make(num_blocks=9)
    again.restore([found(plan, snapshot)], 0.0)
    assert again.lookup(plan.keys).usable_pages == 0
    assert RemoveExtent(plan.generation) in again.drain_work()


async def test_so_many_stores_wait_and_no_more(place: Place) -> None:
    prompt = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[3])
    async with opened(place) as storage:
        assert isinstance(storage, BlobStorage)
        storage.attach(HYBRID)
        storage._waiting = MAX_STORES_WAITING
        assert (await storage.store(prompt.keys, prompt.offers())).num_stored == 0
        storage._waiting = MAX_STORES_WAITING - 1
        assert (await storage.store(prompt.keys, prompt.offers())).num_stored > 0
        storage._waiting = 0


@given(plans())
@settings(max_examples=10, deadline=None)
def test_a_header_is_read_up_to_its_bound(plan: ExtentPlan) -> None:
    header = bytes(header_to_bytes(plan, SEALS))
    medium = BlobMedium()
    medium.blobs[extent_name(plan.generation)] = MemoryBlob(bytearray(header))
    blobs = MemoryBlobStore(medium)
    assert read_header(blobs, plan.generation, STORED, len(header)).keys == plan.keys
    with pytest.raises(BadExtent, match=f"a header of {len(header)} bytes"):
        read_header(blobs, plan.generation, STORED, len(header) - 1)


async def test_so_many_dropped_chains_are_reported_and_no_more() -> None:
    attachment = HostAttachment(HostCacheOptions("127.0.0.1:1", "w", 1), HYBRID, cast(Any, None))
    for number in range(MAX_DROPPED_CHAINS + 2):
        attachment.drop_chain(number.to_bytes(16))
    assert len(attachment._dropped_chains) == MAX_DROPPED_CHAINS
    await attachment._channel.close()


async def test_the_folders_of_others_are_closed_with_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[shared_folders.SharedFolders] = []
    make_one = shared_folders.SharedFolders.__init__

    def note(self: shared_folders.SharedFolders, *args: Any) -> None:
        make_one(self, *args)
        made.append(self)

    monkeypatch.setattr(shared_folders.SharedFolders, "__init__", note)
    monkeypatch.setattr(shared_folders, "_own_folder", lambda url, key: "folder")
    monkeypatch.setattr(shared_folders, "readers_beside", lambda url: None)
    index = cast(Any, None)
    async with shared_folders.open_shared_folders(StorageSettings(), KEY, index) as folders:
        assert [folders] == made
        await made[0]._threads.submit(lambda: None)
    with pytest.raises(RuntimeError, match="shutdown"):
        await made[0]._threads.submit(lambda: None)


def test_folders_are_asked_for_more_than_there_is() -> None:
    asked: list[tuple[Any, int]] = []

    def better(prefixes: Any, have: int) -> list[Any]:
        asked.append((prefixes, have))
        return []

    folders = SimpleNamespace(better=better)
    tiers = cast(Any, SimpleNamespace(folders=folders))
    io = PrefetchIO(cast(Any, None), tiers, NO_TAGS, "lease", clock=lambda: 0.0)
    assert io._folders([], 3) == []
    assert asked == [([], 3)]


def _calls_with_an_epoch() -> list[str]:
    """The rpcs whose requests name the life of the host-cache that they are for."""
    requests = pb.DESCRIPTOR.services_by_name["HostCacheService"].methods
    return [
        m.name for m in requests if m.name != "Attach" and "epoch" in m.input_type.fields_by_name
    ]


@pytest.mark.parametrize("name", _calls_with_an_epoch())
async def test_each_call_to_an_earlier_life_is_refused_before_anything_is_done(name: str) -> None:
    """Nothing but the epoch is there, so that whatever is looked at before it fails otherwise."""

    def check_epoch(epoch: int) -> None:
        raise WrongEpoch(f"not {epoch}")

    method = pb.DESCRIPTOR.services_by_name["HostCacheService"].methods_by_name[name]
    request = getattr(pb, method.input_type.name)(epoch=6)
    servicer = SimpleNamespace(_host=SimpleNamespace(check_epoch=check_epoch))
    call = getattr(HostCacheServicer, name)(servicer, request, None)
    with pytest.raises(WrongEpoch, match="not 6"):
        await (call if inspect.isawaitable(call) else anext(call))


async def test_a_renewal_says_how_long_it_lasts() -> None:
    host = SimpleNamespace(check_epoch=lambda epoch: None, renew=lambda ids: [ids[0]])
    servicer = SimpleNamespace(_host=host, _check_maps=lambda context: None, _lease_ms=5000)
    request = pb.HostCacheServiceRenewRequest(lease_ids=["gone", "there"])
    answer = await HostCacheServicer.Renew(cast(Any, servicer), request, cast(Any, None))
    assert (answer.lease_ms, list(answer.lost)) == (5000, ["gone"])


async def test_stats_count_the_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(server, "_count_prefetches", lambda stats, runner: counted.append(runner))
    host = SimpleNamespace(
        identity=NodeLife("node", 7), arena=SimpleNamespace(num_bytes=5), is_laid_out=False
    )
    publisher = SimpleNamespace(is_away=True)
    servicer = SimpleNamespace(_host=host, _publisher=publisher, _prefetching="runner")
    request = cast(Any, None)
    stats = await HostCacheServicer.Stats(cast(Any, servicer), request, request)
    assert (stats.arena_bytes, stats.is_index_away, stats.epoch) == (5, True, 7)
    assert counted == ["runner"]


@pytest.mark.parametrize("error", [None, OSError("it cannot be removed either")])
def test_an_object_that_was_not_put_is_removed(error: OSError | None) -> None:
    removed: list[str] = []

    def delete(name: str) -> None:
        removed.append(name)
        if error is not None:
            raise error

    ObjectBlobStore._give_up(cast(Any, SimpleNamespace(delete=delete)), "extent")
    assert removed == ["extent"]


def test_a_beat_of_a_host_cache_says_how_many_slots_are_free() -> None:
    store = store_with(full=4, recurrent=2)
    identity = NodeLife("node", 7)
    host = SimpleNamespace(is_laid_out=True, store=store, identity=identity)
    seconds = {Tier.STORAGE: 0.25, Tier.PEER: 0.5}
    tally = SimpleNamespace(seconds_per_byte=seconds.__getitem__)
    prefetching = SimpleNamespace(tally=tally, wish=SimpleNamespace(threshold_tokens=9))
    beats = Beats(cast(Any, host), cast(Any, prefetching), "hostcache-1", "host:1")
    beats.next()
    beat = beats.next()
    full, state = (store.layout.slot_bytes(kind) for kind in (Kind.FULL, Kind.RECURRENT))
    assert dict(beat.free_slots) == {Kind.FULL: 4, Kind.RECURRENT: 2}
    assert dict(beat.pool_slots) == {Kind.FULL: 4, Kind.RECURRENT: 2}
    assert (beat.page_bytes, beat.snapshot_bytes, beat.prefetch_threshold) == (full, state, 9)
    assert (beat.storage_seconds_per_byte, beat.peer_seconds_per_byte) == (0.25, 0.5)
    assert (beat.worker_id, beat.address, beat.epoch, beat.node) == (
        "hostcache-1", "host:1", 7, "node"
    )  # fmt: skip
    assert beat.num_steps == 2


def test_an_error_keeps_the_errno_that_it_has() -> None:
    with pytest.raises(OSError, match="full") as kept, os_errors():
        raise OSError(errno.ENOSPC, "full")
    assert kept.value.errno == errno.ENOSPC
    with pytest.raises(PermissionError) as given, os_errors():
        raise PermissionError
    assert given.value.errno == errno.EACCES
