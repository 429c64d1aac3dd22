"""A real Redis with the written ACL: strangers get nothing, each role what the index needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from tests.cluster_keys import KEY, STRANGERS_KEY

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.runtime.credential_folders import with_login, write_server_access
from ferryman.runtime.embedded import redis_command, started
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.wire.redis.connections import RefusalCount
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.permissions import index_acl
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

ROUTER, HOST_CACHE, OBSERVER = ClusterRole.ROUTER, ClusterRole.HOST_CACHE, ClusterRole.OBSERVER
FAILSAFE_SECONDS = 10


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("locked")
    access = write_server_access(folder, KEY, "local")
    make = lambda place: redis_command(place, acl=access.redis_acl)  # noqa: E731
    with started(make, folder / "redis") as server:
        yield server.url


@asynccontextmanager
async def client(url: str, role: ClusterRole) -> AsyncIterator[aioredis.Redis]:
    async with aioredis.Redis.from_url(with_login(url, credentials_of(KEY, role).redis)) as one:
        yield one


@asynccontextmanager
async def index(url: str, role: ClusterRole) -> AsyncIterator[RedisIndex]:
    login = credentials_of(KEY, role).redis
    async with redis_index(url, KEY, login=login, lookup_seconds=FAILSAFE_SECONDS) as one:
        yield one


async def order(client: Any, words: str) -> None:
    """Sends a command as a person types it."""
    await client.execute_command(*words.split())


ATTACKS = [
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "SET other 1",
    "SHUTDOWN NOSAVE",
    "ACL LIST",
    "SCRIPT FLUSH",
    "MONITOR",
    "REPLICAOF 127.0.0.1 1",
    "CLIENT KILL TYPE normal",
    "PUBLISH any thing",
]


def test_the_acl_names_no_subcommand_that_redis_7_0_lacks() -> None:
    """It refused the whole file for `client|setinfo`, which is of 7.2, and did not start."""
    rules = index_acl(credentials_of(KEY, role) for role in ClusterRole)
    assert set(re.findall(r"\w+\|\w+", rules)) == {"client|setname", "script|load"}


@pytest.mark.parametrize("attack", [*ATTACKS, "PING", "GET fm:nodes", "INFO"])
async def test_a_stranger_can_do_nothing(url: str, attack: str) -> None:
    async with aioredis.Redis.from_url(url) as stranger:
        with pytest.raises(AuthenticationError):
            await order(stranger, attack)


@pytest.mark.parametrize("role", [ROUTER, HOST_CACHE, OBSERVER])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_nobody_can_do_more_than_the_index_needs(
    url: str, attack: str, role: ClusterRole
) -> None:
    async with client(url, role) as insider:
        with pytest.raises(NoPermissionError):
            await order(insider, attack)


@pytest.mark.parametrize("role", [ROUTER, OBSERVER])
@pytest.mark.parametrize("write", ["SET fm:node:a x", "HSET fm:{a}:b f v", "SADD fm:nodes a"])
async def test_readers_add_nothing_to_the_index(url: str, role: ClusterRole, write: str) -> None:
    async with client(url, role) as reader:
        with pytest.raises(NoPermissionError):
            await order(reader, write)


async def test_a_script_may_not_do_more_than_its_caller(url: str) -> None:
    async with client(url, ROUTER) as router:
        for script in ("redis.call('FLUSHALL')", "redis.call('SADD', 'fm:nodes', 'a')"):
            with pytest.raises(RedisError, match=r"(?i)permission|ACL|NOPERM"):
                await router.eval(script, 0)


async def test_a_router_counts_whom_the_index_refuses(url: str) -> None:
    async with client(url, ROUTER) as asker, aioredis.Redis.from_url(url) as stranger:
        count = RefusalCount(asker)
        await count.look()
        before = count.number
        with pytest.raises(AuthenticationError):
            await order(stranger, "PING")
        async with client(url, ClusterRole.DECODE) as worker:
            with pytest.raises(AuthenticationError):
                await worker.ping()
        with pytest.raises(NoPermissionError):
            await order(asker, "FLUSHALL")
        await count.look()
    assert (count.number, count.is_told) == (before + 3, True)


async def test_where_the_index_tells_nothing_it_is_not_asked_again(url: str) -> None:
    async with client(url, HOST_CACHE) as asker:
        count = RefusalCount(asker)
        await count.look()
    assert (count.number, count.is_told) == (0, False)


@pytest.mark.parametrize("role", [ClusterRole.DECODE, ClusterRole.PREFILL, ClusterRole.BOTH])
async def test_workers_have_no_user_there(url: str, role: ClusterRole) -> None:
    async with client(url, role) as worker:
        with pytest.raises(AuthenticationError):
            await worker.ping()


async def test_another_cluster_s_password_counts_as_a_redis_that_is_away(url: str) -> None:
    login = credentials_of(STRANGERS_KEY, ROUTER).redis
    async with redis_index(url, KEY, login=login, lookup_seconds=FAILSAFE_SECONDS) as one:
        assert await one.usable_pages([PageKey(bytes(16))], ResumeShape(16, 0, frozenset())) == {}
        assert one.is_away


async def test_a_host_cache_writes_and_a_router_finds_what_it_wrote(url: str) -> None:
    """Through every script and call of the index; an earlier life is removed by the lookup."""
    chain = [PageKey(bytes([number] * 16)) for number in range(3)]
    units = [IndexedUnit(kind, key, 64, bytes(16), 1) for key in chain for kind in Kind]
    shape = ResumeShape(16, 16, frozenset(Kind))
    async with (
        asyncio.timeout(12 * FAILSAFE_SECONDS),
        index(url, HOST_CACHE) as writer,
        index(url, ROUTER) as reader,
        client(url, OBSERVER) as observer,
    ):
        for epoch in (1, 2):
            life = NodeLife("node", epoch, "127.0.0.1:1")
            await writer.announce(life, 60)
            await writer.commit(life, chain[0], Tier.HOST, units[: 3 * (4 - epoch)])
        await writer.forget(life, chain[0], Tier.HOST, [(Kind.FULL, chain[1])])
        found = await reader.usable_pages(chain, shape)
        assert [each.node for each in found.values()] == [life]
        assert await writer.digests(life, chain[0], [(Kind.FULL, chain[0])])
        assert await observer.smembers(f"fm:{{{chain[0].hex()}}}:owners") == {b"node#2"}
        assert len([key async for key in observer.scan_iter()]) > 2
        await writer.withdraw(life)
        assert not writer.is_away
        assert not reader.is_away
        assert writer.statistics().num_failures == reader.statistics().num_failures == 0
