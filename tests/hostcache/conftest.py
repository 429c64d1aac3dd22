"""A real NATS and a real Redis for the host-cache, started once; host-caches in shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.servers import nats_server, redis_server

from ferryman.runtime.settings import BusSettings, IndexSettings, ListenSettings
from ferryman_hostcache import announcer
from ferryman_hostcache.service import Running, running
from ferryman_hostcache.settings import Settings


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


class StartHostCache(Protocol):
    def __call__(
        self,
        memory_bytes: int = 1 << 20,
        lease_seconds: float = 5.0,
        port: int = 0,
        redis_url: str = "",
        **settings: Any,
    ) -> AbstractAsyncContextManager[Running]: ...


@pytest.fixture
def start_host_cache(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StartHostCache:
    """Host-caches in this process, their arenas in a folder of the test's own.

    On a machine so busy that no beat comes for a while they live on all the same.
    """
    monkeypatch.setattr(announcer, "LIFE_SECONDS", 60.0)
    shared_redis = redis_url

    def start(
        memory_bytes: int = 1 << 20,
        lease_seconds: float = 5.0,
        port: int = 0,
        redis_url: str = shared_redis,
        **settings: Any,
    ) -> AbstractAsyncContextManager[Running]:
        return running(
            Settings(
                listen=ListenSettings(port=port),
                memory_bytes=memory_bytes,
                lease_seconds=lease_seconds,
                arena_folder=tmp_path,
                bus=BusSettings(url=nats_url),
                index=IndexSettings(url=redis_url, lookup_seconds=10),
                **{"node": "test-node", "peer_lookup_seconds": 10.0, **settings},
            )
        )

    return start


@pytest.fixture
async def host_cache(start_host_cache: StartHostCache) -> AsyncIterator[Running]:
    async with start_host_cache() as service:
        yield service
