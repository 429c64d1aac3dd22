"""The contract of the index, held by Redis and by memory alike."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cluster_keys import KEY
from tests.doubles.memory_index import MemoryIndex, usable_depth
from tests.servers import running_redis

from ferryman.cache.keys import PageKey, as_token_ids, page_keys
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError
from ferryman.runtime.embedded import EmbeddedServer
from ferryman.wire.redis import redis_index as redis_module
from ferryman.wire.redis.index import (
    IndexedUnit,
    NodeLife,
    NodePrefix,
    PrefixIndex,
)
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

A, B = NodeLife("node-a", 11), NodeLife("node-b", 22)
HYBRID = ResumeShape(16, 0, frozenset({Kind.FULL, Kind.RECURRENT}))
ALL_KINDS = ResumeShape(16, 40, frozenset(Kind))
FULL_ONLY = ResumeShape(16, 0, frozenset({Kind.FULL}))
TTL = 60.0
# A busy machine is not a hung Redis.
PATIENT = 10.0


def chain_of(length: int, seed: int = 0) -> tuple[PageKey, ...]:
    return page_keys(b"root", as_token_ids(range(seed, seed + length)), 1)


def units(chain: tuple[PageKey, ...], kind: Kind, *pages: int) -> list[IndexedUnit]:
    return [IndexedUnit(kind, chain[page], 4096, bytes(16), page) for page in pages]


async def usable(
    index: PrefixIndex, chain: Sequence[PageKey], shape: ResumeShape
) -> dict[str, int]:
    found = await index.usable_pages(chain, shape)
    return {node_id: holding.usable_pages for node_id, holding in found.items()}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a hung Redis."""
    monkeypatch.setattr(redis_module, "WRITE_SECONDS", 30.0)


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[PrefixIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    async with redis_index(
        request.getfixturevalue("redis_url"), KEY, lookup_seconds=PATIENT
    ) as index:
        await index._client.flushall()
        yield index


async def test_an_empty_index_knows_nothing(index: PrefixIndex) -> None:
    assert await usable(index, chain_of(4), HYBRID) == {}
    assert await usable(index, (), HYBRID) == {}
    assert index.statistics().num_hits == 0


async def test_a_prefix_is_usable_only_as_far_as_all_kinds_reach(index: PrefixIndex) -> None:
    chain = chain_of(10)
    await index.announce(A, TTL)
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, *range(8)))
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 8}
    assert await usable(index, chain, HYBRID) == {}
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.RECURRENT, 2, 5, 9))
    assert await usable(index, chain, HYBRID) == {"node-a": 6}
    assert await usable(index, chain[:5], HYBRID) == {"node-a": 3}
    assert index.statistics().num_hits == 3


async def test_a_window_is_needed_at_the_end_only(index: PrefixIndex) -> None:
    chain = chain_of(10)
    await index.announce(A, TTL)
    held = [
        *units(chain, Kind.FULL, *range(10)),
        *units(chain, Kind.WINDOW, 4, 5, 6, 8),
        *units(chain, Kind.RECURRENT, 6, 8),
    ]
    await index.commit(A, chain[0], Tier.HOST, held)
    assert await usable(index, chain, ALL_KINDS) == {"node-a": 7}


async def test_every_node_is_told_apart_and_tiers_add_up(index: PrefixIndex) -> None:
    chain = chain_of(6)
    for node, depth in ((A, 2), (B, 4)):
        await index.announce(node, TTL)
        await index.commit(node, chain[0], Tier.HOST, units(chain, Kind.FULL, *range(depth)))
    await index.commit(A, chain[0], Tier.STORAGE, units(chain, Kind.FULL, 2))
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 3, "node-b": 4}


async def test_the_host_tier_is_told_apart_from_both_tiers_together(index: PrefixIndex) -> None:
    chain, at = chain_of(6), NodeLife(A.node_id, A.epoch, "127.0.0.1:7001")
    await index.announce(at, TTL)
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.RECURRENT, 1))
    await index.commit(A, chain[0], Tier.STORAGE, units(chain, Kind.FULL, 2, 3))
    await index.commit(A, chain[0], Tier.STORAGE, units(chain, Kind.RECURRENT, 3))
    (holding,) = (await index.usable_pages(chain, HYBRID)).values()
    assert (holding.usable_pages, holding.host_pages) == (4, 2)
    assert (holding.node, holding.node.address) == (A, "127.0.0.1:7001")


async def test_another_chain_is_another_hash(index: PrefixIndex) -> None:
    await index.announce(A, TTL)
    chain = chain_of(6)
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
    assert await usable(index, chain_of(6, seed=100), FULL_ONLY) == {}


async def test_what_is_forgotten_is_gone_in_its_tier_only(index: PrefixIndex) -> None:
    chain = chain_of(4)
    await index.announce(A, TTL)
    for tier in (Tier.HOST, Tier.STORAGE):
        await index.commit(A, chain[0], tier, units(chain, Kind.FULL, 0, 1, 2))
    await index.forget(A, chain[0], Tier.HOST, [(Kind.FULL, chain[2]), (Kind.FULL, chain[3])])
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 3}
    await index.forget(A, chain[0], Tier.STORAGE, [(Kind.FULL, chain[2])])
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 2}


async def test_what_units_hash_to_is_said_of_both_tiers_and_of_one_node(
    index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "MAX_DIGESTS", 3)
    chain = chain_of(7)
    held = [IndexedUnit(Kind.FULL, key, 1, bytes([i] * 16)) for i, key in enumerate(chain[:5])]
    again = [IndexedUnit(Kind.FULL, chain[1], 1, b"s" * 16)]
    state = [IndexedUnit(Kind.RECURRENT, chain[1], 1, b"r" * 16)]
    await index.commit(A, chain[0], Tier.HOST, held)
    await index.commit(A, chain[0], Tier.STORAGE, [*again, *state])
    await index.commit(B, chain[0], Tier.HOST, [IndexedUnit(Kind.FULL, chain[6], 1, b"b" * 16)])
    await index.forget(A, chain[0], Tier.HOST, [(Kind.FULL, chain[2])])
    asked = [(Kind.FULL, key) for key in chain] + [(Kind.RECURRENT, chain[1])]
    said = await index.digests(A, chain[0], asked)
    assert said == {
        (Kind.FULL, chain[0]): {bytes(16)},
        (Kind.FULL, chain[1]): {bytes([1] * 16), b"s" * 16},
        (Kind.FULL, chain[3]): {bytes([3] * 16)},
        (Kind.FULL, chain[4]): {bytes([4] * 16)},
        (Kind.RECURRENT, chain[1]): {b"r" * 16},
    }


async def test_an_earlier_life_is_void_at_once(index: PrefixIndex) -> None:
    chain = chain_of(4)
    await index.announce(A, TTL)
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1, 2))
    reborn = NodeLife(A.node_id, 12)
    await index.announce(reborn, TTL)
    assert await usable(index, chain, FULL_ONLY) == {}
    await index.commit(reborn, chain[0], Tier.HOST, units(chain, Kind.FULL, 0))
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 1}


async def test_a_node_that_never_spoke_or_left_does_not_count(index: PrefixIndex) -> None:
    chain = chain_of(4)
    await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
    assert await usable(index, chain, FULL_ONLY) == {}
    await index.announce(A, TTL)
    assert await usable(index, chain, FULL_ONLY) == {"node-a": 2}
    await index.withdraw(A)
    assert await usable(index, chain, FULL_ONLY) == {}


LENGTH = 300  # more than one chunk of what a script asks a set


@dataclass(frozen=True)
class HeldUnits:
    """The pages of a chain that a node holds in each tier.

    Full pages are prefix-closed in the host tier, and in both tiers together, as eviction leaves
    them: storage has the pages of the prefix that the host lacks.
    """

    full: tuple[int, int]
    window: tuple[frozenset[int], frozenset[int]]
    recurrent: tuple[frozenset[int], frozenset[int]]

    def pages(self, tier: Tier) -> dict[Kind, frozenset[int]]:
        at, (host, both) = tuple(Tier).index(tier), sorted(self.full)
        return {
            Kind.FULL: frozenset((range(host), range(host, both))[at]),
            Kind.WINDOW: self.window[at],
            Kind.RECURRENT: self.recurrent[at],
        }

    def depth(self, shape: ResumeShape, *tiers: Tier) -> int:
        """By the definition."""
        held = [self.pages(tier) for tier in tiers]
        kinds = {kind: set[int]().union(*(each[kind] for each in held)) for kind in Kind}
        return usable_depth(LENGTH, shape, kinds)


lengths = st.integers(0, LENGTH)
runs = st.builds(
    lambda first, length: frozenset(range(first, min(LENGTH, first + length))),
    lengths,
    st.integers(0, 12),
)
windows = st.lists(runs, max_size=4).map(lambda some: frozenset[int]().union(*some))
snapshots = st.frozensets(st.integers(0, LENGTH - 1), max_size=20)
holdings = st.builds(
    HeldUnits,
    st.tuples(lengths, lengths),
    st.tuples(windows, windows),
    st.tuples(snapshots, snapshots),
)
shapes = st.builds(
    ResumeShape,
    st.sampled_from([1, 16]),
    st.integers(1, 60),
    st.frozensets(st.sampled_from(Kind), min_size=1),
)


@given(st.tuples(holdings, holdings), shapes)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_redis_agrees_with_the_definition(
    redis_url: str, held: tuple[HeldUnits, HeldUnits], shape: ResumeShape
) -> None:
    chain, expected = chain_of(LENGTH), {}
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        for node, some in zip((A, B), held, strict=True):
            await index.announce(node, TTL)
            for tier in (Tier.HOST, Tier.STORAGE):
                for kind, pages in some.pages(tier).items():
                    await index.commit(node, chain[0], tier, units(chain, kind, *sorted(pages)))
            if depth := some.depth(shape, Tier.HOST, Tier.STORAGE):
                expected[node.node_id] = NodePrefix(node, depth, some.depth(shape, Tier.HOST))
        assert await index.usable_pages(chain, shape) == expected


async def test_entries_of_an_earlier_life_are_removed_when_met(redis_url: str) -> None:
    chain = chain_of(4)
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        await index.announce(A, TTL)
        await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0))
        name = f"fm:{{{chain[0].hex()}}}:{chain[0].hex()}"
        fields: Any = await index._client.hgetall(name)
        ((field, entry),) = fields.items()
        assert (field, entry.rpartition(",")[0]) == ("full:host:node-a#11", f"4096,{'00' * 16},0")
        await index.announce(NodeLife(A.node_id, 12), TTL)
        await index.usable_pages(chain[:1], FULL_ONLY)
        assert await index._client.exists(name) == 0


async def test_a_life_that_the_index_no_longer_knows_is_told_so(index: PrefixIndex) -> None:
    assert not await index.announce(A, TTL), "the first word"
    assert await index.announce(A, TTL)
    await index.withdraw(A)
    assert not await index.announce(A, TTL)


async def test_a_flushed_redis_has_forgotten_who_lives(redis_url: str) -> None:
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index.announce(A, TTL)
        assert await index.announce(A, TTL)
        await index._client.flushall()
        assert not await index.announce(A, TTL)


async def test_lives_and_claims_end_by_themselves(redis_url: str) -> None:
    """A process that is killed takes nothing back."""
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        await index.announce(A, TTL)
        await index.claim(B, TTL)
        keys = [key for key in await index._client.keys("*") if str(key) != redis_module.NODES]
        ends = [await index._client.pttl(key) for key in keys]
        assert len(ends) == 2
        assert all(0 < end <= TTL * 1000 for end in ends)


async def test_what_somebody_else_left_in_redis_is_no_node(redis_url: str) -> None:
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        chain = chain_of(2)
        await index._client.flushall()
        await index.announce(A, TTL)
        await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
        await index._client.sadd("fm:nodes", "Not A Node", "garbled", "gone")
        await index._client.mset({"fm:node:Not A Node": "7 host:1", "fm:node:garbled": "seven"})
        index._living_until = float("-inf")
        assert await usable(index, chain, FULL_ONLY) == {"node-a": 2}
        assert not index.statistics().is_away


async def test_entries_of_an_earlier_life_go_when_the_next_one_commits(redis_url: str) -> None:
    chain = chain_of(3)
    async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
        await index._client.flushall()
        for node in (A, NodeLife(A.node_id, 12), B):
            await index.commit(node, chain[0], Tier.HOST, units(chain, Kind.FULL, 0))
        name = f"fm:{{{chain[0].hex()}}}:{chain[0].hex()}"
        assert await index._client.hkeys(name) == ["full:host:node-a#12", "full:host:node-b#22"]


@contextmanager
def hung(server: EmbeddedServer, index: RedisIndex) -> Iterator[None]:
    """A Redis that stands still for the length of a block, in which nobody is patient with it."""
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(redis_module, "WRITE_SECONDS", 0.1)
        limits.setattr(index, "_lookup_seconds", 0.1)
        server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            server.process.send_signal(signal.SIGCONT)


async def test_redis_that_hangs_is_a_miss_and_writes_wait_for_it() -> None:
    chain = chain_of(4)
    with running_redis() as server:
        async with redis_index(server.url, KEY, lookup_seconds=PATIENT) as index:
            await index.announce(A, TTL)
            with hung(server, index):
                await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
                assert index.is_away
                assert await index.usable_pages(chain, FULL_ONLY) == {}
                assert index.statistics().num_misses_away == 1
                await index.forget(A, chain[0], Tier.HOST, [(Kind.FULL, chain[1])])
                assert index.statistics().num_waiting == 2
            async with asyncio.timeout(120):
                while index.is_away or index.statistics().num_waiting:
                    await index.here()
                    await index.announce(A, TTL)
            assert await usable(index, chain, FULL_ONLY) == {"node-a": 1}


async def test_a_hung_redis_costs_those_who_ask_just_then_and_nobody_later() -> None:
    chain = chain_of(4)
    with running_redis() as server:
        async with redis_index(server.url, KEY, lookup_seconds=PATIENT) as index:
            await index.announce(A, TTL)
            await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0, 1))
            assert await usable(index, chain, FULL_ONLY) == {"node-a": 2}
            with hung(server, index):
                asked = [index.usable_pages(chain, FULL_ONLY) for _ in range(40)]
                assert await asyncio.gather(*asked) == [{}] * 40
                assert index.statistics().num_failures <= redis_module.MAX_LOOKUPS
                before = index._client.connection_pool._in_use_connections.copy()
                for _ in range(1000):
                    assert await index.usable_pages(chain, FULL_ONLY) == {}
                assert index._client.connection_pool._in_use_connections == before
                assert index.statistics().num_misses_away == 1040


async def test_writes_to_a_redis_that_is_not_there_are_dropped_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_module, "MAX_WAITING", 3)
    async with redis_index("redis://127.0.0.1:1/0", KEY) as index:
        for number in range(5):
            chain = chain_of(1, seed=number)
            await index.commit(A, chain[0], Tier.HOST, units(chain, Kind.FULL, 0))
        await index.withdraw(A)
        assert await usable(index, chain_of(1), FULL_ONLY) == {}
        statistics = index.statistics()
    assert (statistics.num_waiting, statistics.num_dropped) == (3, 2)


async def test_a_url_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no Redis URL"):
        async with redis_index("http://x", KEY):
            pass
