"""Folders of a bucket in the index: what a node stored counts for others, also when it is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY
from tests.doubles.memory_index import MemoryIndex
from tests.wire.test_index import FULL_ONLY, PATIENT, TTL, chain_of, units

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import InvalidRequest
from ferryman.wire.redis import redis_index as redis_module
from ferryman.wire.redis.bucket_folders import (
    MAX_SHORT_LEN,
    BucketFolder,
    bucket_of_folder,
    folders_beside,
)
from ferryman.wire.redis.index import FolderClaim, IndexedUnit, NodeLife, PrefixIndex
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

BUCKET, ELSEWHERE = "0123456789abcdef", "fedcba9876543210"
ONE, TWO = BucketFolder(BUCKET, "node-a"), BucketFolder(BUCKET, "node-b")
A = NodeLife("node-a", 11, "127.0.0.1:1", ONE.node_id)
B = NodeLife("node-b", 22, "127.0.0.1:2", TWO.node_id)
APART = NodeLife("apart", 33, "127.0.0.1:3", BucketFolder(ELSEWHERE, "apart").node_id)
WITHOUT = NodeLife("without", 44, "127.0.0.1:4")
CHAIN = chain_of(6)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "WRITE_SECONDS", 30.0)
    monkeypatch.setattr(redis_module, "LIVING_SECONDS", 0.0)


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[PrefixIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    url = request.getfixturevalue("redis_url")
    async with redis_index(url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        yield index


async def commit(index: PrefixIndex, owner: NodeLife, num_pages: int) -> None:
    held = units(CHAIN, Kind.FULL, *range(num_pages))
    await index.commit(owner, CHAIN[0], Tier.STORAGE, held)


async def shared(index: PrefixIndex) -> dict[str, tuple[int, int]]:
    """By node: what it holds itself, and what another folder of its bucket does."""
    found = await index.usable_pages(CHAIN, FULL_ONLY)
    return {
        node_id: (each.usable_pages, each.shared_pages)
        for node_id, each in found.items()
        if not bucket_of_folder(node_id)
    }


async def test_a_folder_counts_for_the_other_nodes_of_its_bucket_and_outlives_its_own(
    index: PrefixIndex,
) -> None:
    for node in (A, B, APART, WITHOUT):
        await index.announce(node, TTL)
    assert await index.claim(ONE.life(1), TTL) is FolderClaim.NEW
    for owner in (A, ONE.life(1)):
        await commit(index, owner, 4)
    assert await shared(index) == {"node-a": (4, 0), "node-b": (0, 4)}
    await index.withdraw(A)
    assert await shared(index) == {"node-b": (0, 4)}
    await index.claim(TWO.life(7), TTL)
    for owner in (B, TWO.life(7)):
        await commit(index, owner, 5)
    assert await shared(index) == {"node-b": (5, 4)}


async def test_the_next_term_voids_what_the_former_said_and_cannot_be_undone(
    index: PrefixIndex,
) -> None:
    await index.announce(B, TTL)
    assert await index.claim(ONE.life(1), TTL) is FolderClaim.NEW
    assert await index.claim(ONE.life(1), TTL) is FolderClaim.KNOWN
    await commit(index, ONE.life(1), 4)
    assert await shared(index) == {"node-b": (0, 4)}
    assert await index.claim(ONE.life(2), TTL) is FolderClaim.NEW
    assert await shared(index) == {}
    await commit(index, ONE.life(2), 2)
    assert await index.claim(ONE.life(1), TTL) is FolderClaim.SUPERSEDED
    assert await shared(index) == {"node-b": (0, 2)}
    assert await index.claim(ONE.life(2), TTL) is FolderClaim.KNOWN


async def test_the_index_names_the_extents_of_storage_alone(index: PrefixIndex) -> None:
    full, lacking = (Kind.FULL, CHAIN[2]), (Kind.FULL, CHAIN[5])
    await index.claim(ONE.life(1), TTL)
    await commit(index, ONE.life(1), 4)
    other = [IndexedUnit(Kind.FULL, CHAIN[5], 4096, b"h" * 16, 9)]
    await index.commit(ONE.life(1), CHAIN[0], Tier.HOST, other)
    found = await index.stored_units(ONE.life(1), CHAIN[0], [full, lacking])
    assert found == {full: IndexedUnit(Kind.FULL, CHAIN[2], 4096, bytes(16), 2)}
    await index.forget(ONE.life(1), CHAIN[0], Tier.STORAGE, [full])
    assert await index.stored_units(ONE.life(1), CHAIN[0], [full]) == {}


async def test_the_deepest_folder_beside_ones_own_comes_first(index: PrefixIndex) -> None:
    more: Sequence[tuple[BucketFolder, int]] = [
        (ONE, 3),
        (TWO, 6),
        (BucketFolder(BUCKET, "c"), 5),
        (BucketFolder(ELSEWHERE, "d"), 6),
    ]
    for folder, depth in more:
        await index.claim(folder.life(1), TTL)
        await commit(index, folder.life(1), depth)
    found = await index.usable_pages(CHAIN, FULL_ONLY)
    assert [each.node.node_id for each in folders_beside(TWO.node_id, found.values())] == [
        BucketFolder(BUCKET, "c").node_id,
        ONE.node_id,
    ]


@pytest.fixture
async def redis_one(redis_url: str) -> AsyncIterator[RedisIndex]:
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        yield index


async def test_a_folder_of_a_stranger_is_none_and_does_not_keep_the_owner_out(
    redis_one: RedisIndex, redis_url: str
) -> None:
    await redis_one.announce(B, TTL)
    async with redis_index(redis_url, STRANGERS_KEY, lookup_seconds=PATIENT) as strangers:
        assert await strangers.claim(ONE.life(99), TTL) is FolderClaim.NEW
        await commit(strangers, ONE.life(99), 6)
    assert await shared(redis_one) == {}
    assert redis_one.statistics().num_forged > 0
    assert await redis_one.claim(ONE.life(1), TTL) is FolderClaim.NEW
    await commit(redis_one, ONE.life(1), 2)
    async with redis_index(redis_url, STRANGERS_KEY, lookup_seconds=PATIENT) as strangers:
        await commit(strangers, ONE.life(1), 6)
    full = (Kind.FULL, CHAIN[4])
    assert await redis_one.stored_units(ONE.life(1), CHAIN[0], [full]) == {}, "not believed"


async def test_a_record_is_worth_nothing_with_another_folder(redis_one: RedisIndex) -> None:
    await redis_one.announce(B, TTL)
    await redis_one.claim(ONE.life(1), TTL)
    await commit(redis_one, ONE.life(1), 4)
    assert await shared(redis_one) == {"node-b": (0, 4)}
    record = str(await redis_one._client.get("fm:node:node-b"))
    assert record.endswith(TWO.node_id)
    for forged in (record.replace(BUCKET, ELSEWHERE), record.rpartition(" ")[0]):
        await redis_one._client.set("fm:node:node-b", forged)
        assert await shared(redis_one) == {}
    assert redis_one.statistics().num_forged > 0


CLOUD = "ip-10-0-123-45.eu-central-1.compute.internal"


@pytest.mark.parametrize("name", ["one", CLOUD, "x" * MAX_SHORT_LEN, "x" * 253, "Upper_1", "-"])
async def test_any_name_of_a_host_names_a_folder(name: str, index: PrefixIndex) -> None:
    """The index gives the whole name back, though it is too long for an id."""
    folder = BucketFolder(BUCKET, name)
    assert bucket_of_folder(folder.node_id) == BUCKET
    await index.claim(folder.life(3), TTL)
    await commit(index, folder.life(3), 2)
    (found,) = (await index.usable_pages(CHAIN, FULL_ONLY)).values()
    assert (found.node, found.node.folder) == (folder.life(3), name)


def test_a_node_is_no_folder_and_a_path_is_no_name() -> None:
    for node_id in ("node-a", "", "folder-a-b", f"folder-{BUCKET}-", f"folder-{BUCKET}"):
        assert not bucket_of_folder(node_id)
    for name in ("", "x" * 254, "a/b", "..", ".hidden", "a b", "é"):
        with pytest.raises(InvalidRequest):
            BucketFolder(BUCKET, name)
