"""The storage tier in an object store, where it differs from one in a folder."""

from __future__ import annotations

import errno
import sys
from contextlib import closing

import obstore
import pytest
import xxhash
from tests.doubles.memory_blob_store import BlobMedium, MemoryBlob, MemoryBlobStore
from tests.hostcache.stored import Bucket, blobs_at, bytes_at, opened, prompt_with
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.tiers.extents import DropUnit, RemoveExtent
from ferryman.tiers.storage_values import BlobPart, StorageFailed
from ferryman_hostcache.storage.extent import extent_name
from ferryman_hostcache.storage.factory import open_blobs
from ferryman_hostcache.storage.object_address import objects_at
from ferryman_hostcache.storage.object_blob_store import ObjectBlobStore
from ferryman_hostcache.storage.object_owner import OWNER_NAME, ObjectOwner
from ferryman_hostcache.storage.threads import give_ups

WAIT_SECONDS = 120.0
HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [
        (403, "AccessDenied", errno.EACCES),
        (403, "QuotaExceeded", errno.ENOSPC),
        (404, "NoSuchBucket", errno.ENOENT),
        (409, "OperationAborted", errno.EIO),
        (507, "XMinioStorageFull", errno.ENOSPC),
    ],
)
def test_an_answer_is_told_as_the_errno_that_a_disk_would_give(
    bucket: Bucket, status: int, code: str, number: int
) -> None:
    content = b"content"
    part = BlobPart(0, memoryview(content), xxhash.xxh3_128_digest(content))
    with closing(blobs_at(bucket)) as blobs:
        bucket.faults.refusals["PUT"] = (status, code)
        with pytest.raises(OSError) as failed:  # noqa: PT011
            blobs.put("1.extent", len(content), [part])
        assert bucket.faults.num_met["PUT"], "nothing was refused"
        assert failed.value.errno == number
        assert blobs.scan() == {}


async def test_no_object_is_put_while_one_that_gave_its_room_is_still_there(bucket: Bucket) -> None:
    """The objects stay within the capacity although none of them can be removed for a while."""
    capacity, num_stored = 1 << 20, list[int]()
    async with opened(bucket, capacity_bytes=capacity, rest_seconds=1e-6) as storage:
        storage.attach(HYBRID)
        for first in range(9):
            if first == 3:
                bucket.faults.refusals["DELETE"] = (403, "AccessDenied")
            if first == 6:
                assert bucket.faults.num_met["DELETE"] > 0, "nothing was kept from being removed"
                bucket.faults.refusals.clear()
            prompt = prompt_with(HYBRID, chain(first, *range(60)), snapshots=[60])
            num_stored.append((await storage.store(prompt.keys, prompt.offers())).num_stored)
            assert bytes_at(bucket) <= capacity
        told = [e for e in storage.drain_effects() if isinstance(e, StorageFailed)]
        assert StorageFailed("store", "EACCES") in told
    assert [number > 0 for number in num_stored] == [True] * 3 + [False] * 3 + [True] * 3


def test_units_of_one_object_are_dropped_by_one_call_behind_the_removals() -> None:
    """An object is written anew for each call."""
    medium = BlobMedium()
    with closing(MemoryBlobStore(medium)) as blobs:
        for number in (1, 2, 3):
            medium.blobs[extent_name(number)] = MemoryBlob(bytearray(b"x" * 12288))
        drops = [DropUnit(n, i, 4096 * (1 + i), 4096) for i in (0, 1) for n in (1, 2)]
        calls = give_ups(blobs, [*drops, RemoveExtent(3)])
        assert len(calls) == 3
        calls[0]()
        assert sorted(medium.blobs) == [extent_name(1), extent_name(2)]
        calls[1]()
        assert medium.blobs[extent_name(1)].content[4096:] == bytes(8192)


def test_an_owner_that_was_replaced_writes_nothing_more(bucket: Bucket) -> None:
    """Another process replaced the owner's object: the next renewal finds that out."""
    objects, content = objects_at(bucket.url), b"late"
    owner = ObjectOwner(objects, "here", lease_seconds=0.1)
    blobs = ObjectBlobStore(objects, "here", owner)
    obstore.put(objects, OWNER_NAME, b"another")
    owner._thread.join(WAIT_SECONDS)
    assert not owner._thread.is_alive()
    part = BlobPart(0, memoryview(content), xxhash.xxh3_128_digest(content))
    with closing(blobs), pytest.raises(OSError) as failed:  # noqa: PT011
        blobs.put("1.extent", len(content), [part])
    assert failed.value.errno == errno.ESTALE
    assert [each["path"] for each in obstore.list(objects).collect()] == [OWNER_NAME]


def test_a_prefix_is_given_back_at_the_end(bucket: Bucket) -> None:
    with closing(blobs_at(bucket)):
        assert [each["path"] for each in obstore.list(objects_at(bucket.url)).collect()] == [
            OWNER_NAME
        ]
    assert obstore.list(objects_at(bucket.url)).collect() == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket", "s3://bucket/prefix"),
        ("s3://bucket/prefix?colour=red", "unknown option 'colour'"),
        ("gopher://bucket/prefix", "no such kind"),
    ],
)
def test_a_wrong_address_is_refused_with_its_reason(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_blobs(url)


def test_without_its_library_object_storage_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "ferryman_hostcache.storage.object_address", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(ConfigError, match=r"ferryman\[s3\]"):
        open_blobs("s3://bucket/prefix")
