"""The storage tier in an object store, where it differs from one in a folder."""

from __future__ import annotations

import errno
import sys
from contextlib import closing

import obstore
import pytest
import xxhash
from tests.hostcache.stored import Bucket, blobs_at, opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.tiers.storage_values import BlobPart
from ferryman_hostcache.storage.factory import open_blobs
from ferryman_hostcache.storage.object_address import objects_at
from ferryman_hostcache.storage.object_blob_store import ObjectBlobStore
from ferryman_hostcache.storage.object_owner import OWNER_NAME, ObjectOwner

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
WAIT_SECONDS = 120.0
PROMPT = prompt_with(HYBRID, chain(1, 2, 3), snapshots=[2])


@pytest.mark.parametrize("damage", ["flipped", "cut short", "gone", "another object"])
async def test_an_object_that_is_not_what_was_stored_is_never_served(
    bucket: Bucket, damage: str
) -> None:
    objects = objects_at(bucket.url)
    async with opened(bucket) as storage:
        storage.attach(HYBRID)
        await storage.store(PROMPT.keys, PROMPT.offers())
        assert await read_all(storage, PROMPT) == PROMPT.units
        (name,) = (each["path"] for each in obstore.list(objects).collect() if _is_extent(each))
        content = bytes(obstore.get(objects, name).bytes())
        match damage:
            case "flipped":
                obstore.put(objects, name, bytes(each ^ 1 for each in content))
            case "cut short":
                obstore.put(objects, name, content[:100])
            case "gone":
                obstore.delete(objects, name)
            case "another object":
                obstore.put(objects, name, b"a note of the operator's" * 9000)
        assert await read_all(storage, PROMPT) == {}
        counts = storage.statistics()
        assert counts.num_failures + sum(kind.num_corrupt for kind in counts.kinds.values()) > 0


def _is_extent(found: obstore.ObjectMeta) -> bool:
    return str(found["path"]).endswith(".extent")


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
