"""Entries in Redis by a writer without the cluster's key are ignored, and counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.cache.keys import PageKey, as_token_ids, page_keys
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.wire.redis import redis_index as redis_module
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.index_seals import EntryPlace, ForgedEntry, IndexSeals
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

A = NodeLife("node-a", 11, "127.0.0.1:1")
CHAIN = page_keys(b"root", as_token_ids(range(8)), 1)
HYBRID = ResumeShape(16, 0, frozenset({Kind.FULL, Kind.RECURRENT}))
ROOT = f"fm:{{{CHAIN[0].hex()}}}"
TTL = 60.0
UNIT = (Kind.FULL, CHAIN[0])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long timeouts, for a busy machine; the list of living nodes is read again at each call."""
    monkeypatch.setattr(redis_module, "WRITE_SECONDS", 30.0)
    monkeypatch.setattr(redis_module, "LIVING_SECONDS", 0.0)


@pytest.fixture
async def index(redis_url: str) -> AsyncIterator[RedisIndex]:
    async with redis_index(redis_url, KEY, lookup_seconds=10) as index:
        await index._client.flushall()
        yield index


@pytest.fixture
async def strangers(redis_url: str) -> AsyncIterator[RedisIndex]:
    """The same Redis in the hands of another cluster."""
    async with redis_index(redis_url, STRANGERS_KEY, lookup_seconds=10) as index:
        yield index


def held(num_pages: int, first: int = 0) -> list[IndexedUnit]:
    """Full pages from `first` on, and the snapshot behind the last."""
    full = [IndexedUnit(Kind.FULL, key, 4096, bytes(16)) for key in CHAIN[first:num_pages]]
    return [*full, IndexedUnit(Kind.RECURRENT, CHAIN[num_pages - 1], 4096, bytes(16))]


async def says(index: RedisIndex, node: NodeLife, num_pages: int, first: int = 0) -> None:
    await index.announce(node, TTL)
    await index.commit(node, CHAIN[0], Tier.HOST, held(num_pages, first))


async def usable(index: RedisIndex) -> dict[str, tuple[int, int]]:
    found = await index.usable_pages(CHAIN, HYBRID)
    return {name: (each.usable_pages, each.host_pages) for name, each in found.items()}


def entry_key(key: PageKey) -> str:
    return f"{ROOT}:{key.hex()}"


async def test_what_the_cluster_wrote_is_believed(index: RedisIndex) -> None:
    await says(index, A, 4)
    assert await usable(index) == {"node-a": (4, 4)}
    assert await index.digests(A, CHAIN[0], [UNIT]) == {UNIT: {bytes(16)}}
    assert index.statistics().num_forged == 0


async def test_a_node_of_another_cluster_is_no_node(
    index: RedisIndex, strangers: RedisIndex
) -> None:
    await says(strangers, NodeLife("stranger", 5, "127.0.0.1:2"), 8)
    assert await usable(strangers) != {}, "it did say so"
    assert await usable(index) == {}
    assert index.statistics().num_forged == 1


@pytest.mark.parametrize(
    "record",
    [
        "11 127.0.0.1:1",
        "11  127.0.0.1:1",
        "11 zz 127.0.0.1:1",
        "11 " + "00" * 16 + " 127.0.0.1:1",
        "eleven " + "00" * 16 + " 127.0.0.1:1",
        "",
        " ",
    ],
)
async def test_a_record_without_a_good_tag_is_no_node(index: RedisIndex, record: str) -> None:
    await says(index, A, 4)
    await index._client.set("fm:node:node-a", record)
    assert await usable(index) == {}
    assert index.statistics().num_forged == bool(record)
    assert not index.statistics().is_away


async def test_a_record_is_worth_nothing_for_another_node_or_at_another_address(
    index: RedisIndex,
) -> None:
    await says(index, A, 4)
    record: Any = await index._client.get("fm:node:node-a")
    elsewhere = record.replace("127.0.0.1:1", "127.0.0.1:2")
    assert elsewhere != record
    await index._client.mset({"fm:node:node-a": elsewhere, "fm:node:node-b": record})
    await index._client.sadd("fm:nodes", "node-b")
    assert await usable(index) == {}
    assert index.statistics().num_forged == 2


async def test_pages_that_a_stranger_adds_to_a_node_of_ours_are_not_believed(
    index: RedisIndex, strangers: RedisIndex
) -> None:
    """He makes it look better than it is: then nothing is known of it, rather than a lie."""
    await says(index, A, 4)
    await strangers.commit(A, CHAIN[0], Tier.HOST, held(8, first=4))
    found = await strangers._longest(keys=[ROOT], args=await lookup_arguments())
    assert int(found[1]) == 8, "Redis was made to say so"
    assert await usable(index) == {}
    assert index.statistics().num_forged > 0


async def lookup_arguments() -> list[str]:
    packed = b"".join(CHAIN).hex()
    return [packed, "16", "0", "full recurrent", A.node_id, str(A.epoch)]


async def test_a_better_tier_that_a_stranger_adds_is_not_believed(
    index: RedisIndex, strangers: RedisIndex
) -> None:
    await index.announce(A, TTL)
    await index.commit(A, CHAIN[0], Tier.STORAGE, held(4))
    await strangers.commit(A, CHAIN[0], Tier.HOST, held(4))
    assert await usable(index) == {"node-a": (4, 0)}
    assert index.statistics().num_forged > 0


async def test_what_a_former_life_said_is_worth_nothing_for_the_next(index: RedisIndex) -> None:
    """Its entries are put back under the name of the life that is alive."""
    await says(index, A, 4)
    names = [entry_key(key) for key in CHAIN[:4]]
    before: list[Any] = [await index._client.hgetall(name) for name in names]
    reborn = NodeLife(A.node_id, 12, A.address)
    await index.announce(reborn, TTL)
    assert await usable(index) == {}, "its entries are void"
    for name, fields in zip(names, before, strict=True):
        renamed: Any = {each.replace("#11", "#12"): entry for each, entry in fields.items()}
        await index._client.hset(name, mapping=renamed)
    await index._client.sadd(f"{ROOT}:owners", reborn.owner)
    await index._client.sadd(f"{ROOT}:recurrent:host:{reborn.owner}", CHAIN[3].hex())
    assert index.statistics().num_forged == 0
    assert await usable(index) == {}
    assert await index.digests(reborn, CHAIN[0], [UNIT]) == {}
    assert index.statistics().num_forged > 0


async def test_a_digest_that_a_stranger_names_is_left_out(
    index: RedisIndex, strangers: RedisIndex
) -> None:
    """Else it would have the right bytes refused."""
    await says(index, A, 4)
    other = IndexedUnit(Kind.FULL, CHAIN[0], 4096, b"f" * 16)
    await strangers.commit(A, CHAIN[0], Tier.STORAGE, [other])
    assert await index.digests(A, CHAIN[0], [UNIT]) == {UNIT: {bytes(16)}}
    await strangers.commit(A, CHAIN[0], Tier.HOST, [other])
    assert await index.digests(A, CHAIN[0], [UNIT]) == {}
    assert index.statistics().num_forged == 3


SEALS = IndexSeals(KEY)
PLACE = EntryPlace("node-a#11", Tier.HOST, Kind.FULL, CHAIN[0])
ENTRY = SEALS.entry_of(PLACE, IndexedUnit(Kind.FULL, CHAIN[0], 4096, b"d" * 16, 3))
OTHER_PLACES = [
    EntryPlace("node-b#11", Tier.HOST, Kind.FULL, CHAIN[0]),
    EntryPlace("node-a#12", Tier.HOST, Kind.FULL, CHAIN[0]),
    EntryPlace("node-a#11", Tier.STORAGE, Kind.FULL, CHAIN[0]),
    EntryPlace("node-a#11", Tier.HOST, Kind.WINDOW, CHAIN[0]),
    EntryPlace("node-a#11", Tier.HOST, Kind.FULL, CHAIN[1]),
]


@pytest.mark.parametrize("place", OTHER_PLACES, ids=str)
def test_an_entry_holds_in_its_own_place_only(place: EntryPlace) -> None:
    assert SEALS.digest_in(PLACE, ENTRY) == b"d" * 16
    with pytest.raises(ForgedEntry):
        SEALS.digest_in(place, ENTRY)


@given(st.text(max_size=80), st.integers(0, len(ENTRY) - 1), st.sampled_from("0123456789abcdef,"))
def test_no_other_text_is_an_entry(text: str, at: int, letter: str) -> None:
    for entry in (text, ENTRY[:at], ENTRY[:at] + letter + ENTRY[at + 1 :]):
        if entry != ENTRY:
            with pytest.raises(ForgedEntry):
                SEALS.digest_in(PLACE, entry)
