"""The index by TLS: a real Redis behind a proxy where TLS ends, as stunnel or a cloud has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.certificates import forget_older_authorities, make_certificates
from tests.cluster_keys import KEY
from tests.wire.proxy import HoldingProxy, holding_proxy

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.cache.units import Tier
from ferryman.errors import ConfigError
from ferryman.runtime.credential_folders import write_server_access
from ferryman.runtime.embedded import redis_command, started
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.tls_folder import TlsFolder, server_context
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

HOST_CACHE = credentials_of(KEY, ClusterRole.HOST_CACHE).redis
LIFE, PAGE = NodeLife("node", 1, "127.0.0.1:1"), PageKey(bytes(16))
SHAPE = ResumeShape(16, 0, frozenset({Kind.FULL}))
FAILSAFE_SECONDS = 120


@pytest.fixture(scope="module")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("locked")
    access = write_server_access(folder, KEY, "local")
    make = lambda place: redis_command(place, acl=access.redis_acl)  # noqa: E731
    with started(make, folder / "redis") as server:
        yield server.url.removeprefix("redis://").removesuffix("/0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "tls")


@asynccontextmanager
async def tls_redis(
    target: str, folder: Path, listen: str = "127.0.0.1:0", name: str = "redis"
) -> AsyncIterator[HoldingProxy]:
    tls = server_context(TlsFolder(folder, name))
    async with asyncio.timeout(FAILSAFE_SECONDS):
        async with holding_proxy(target, listen=listen, tls=tls) as proxy:
            yield proxy


@asynccontextmanager
async def index(proxy: HoldingProxy, trusted: Path) -> AsyncIterator[RedisIndex]:
    authorities = lambda: (trusted / "ca.crt").read_bytes()  # noqa: E731
    url = f"rediss://{proxy.address}/0"
    async with redis_index(
        url, KEY, login=HOST_CACHE, authorities=authorities, lookup_seconds=10
    ) as one:
        yield one


async def write(to: RedisIndex) -> None:
    await to.announce(LIFE, 60)
    await to.commit(LIFE, PAGE, Tier.HOST, [IndexedUnit(Kind.FULL, PAGE, 64, bytes(16), 1)])


async def test_an_index_is_written_and_read_by_tls(redis_address: str, folder: Path) -> None:
    async with tls_redis(redis_address, folder) as proxy, index(proxy, folder) as one:
        await write(one)
        (found,) = (await one.usable_pages([PAGE], SHAPE)).values()
        assert found.node == LIFE
        assert proxy.num_connections > 0


@pytest.mark.parametrize(
    ("host", "name", "is_strangers"),
    [
        pytest.param("127.0.0.1", "redis", True, id="authority"),
        pytest.param("127.0.0.2", "redis", False, id="host"),
        pytest.param("127.0.0.1", "decode", False, id="a worker in its place"),
    ],
)
async def test_a_redis_of_strangers_is_shown_no_password(
    redis_address: str,
    folder: Path,
    tmp_path: Path,
    host: str,
    name: str,
    is_strangers: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trusted = make_certificates(tmp_path / "strangers") if is_strangers else folder
    async with tls_redis(redis_address, folder, f"{host}:0", name) as proxy:
        async with index(proxy, trusted) as one:
            assert await one.usable_pages([PAGE], SHAPE) == {}
            assert one.is_away
        assert proxy.num_connections == 0, "no handshake ended well"
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_an_index_comes_back_to_a_certificate_of_a_new_authority(
    redis_address: str, folder: Path
) -> None:
    async with AsyncExitStack() as stack:
        async with tls_redis(redis_address, folder) as proxy:
            one = await stack.enter_async_context(index(proxy, folder))
            await write(one)
            make_certificates(folder, new_ca=True)
            forget_older_authorities(folder)
        assert await one.usable_pages([PAGE], SHAPE) == {}, "its connections have ended"
        async with tls_redis(redis_address, folder, proxy.address):
            await one.here()
            assert len(await one.usable_pages([PAGE], SHAPE)) == 1


async def test_with_certificates_no_password_goes_in_plain_text(redis_address: str) -> None:
    url = f"redis://me:secret@{redis_address}/0"
    with pytest.raises(ConfigError, match="with TLS_DIR it is reached by rediss://") as refused:
        async with redis_index(url, KEY, login=HOST_CACHE, authorities=lambda: b""):
            pass
    assert "secret" not in str(refused.value)
