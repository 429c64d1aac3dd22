"""A real NATS and a real Redis for the host-cache, started once; host-caches in shared memory;
places for a storage tier."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from redis import Redis
from tests.cluster_keys import key_file_in
from tests.doubles.memory_blob_store import BlobMedium
from tests.hostcache import ledger
from tests.hostcache.object_server import BUCKET, ObjectFaults, S3Server, s3_server
from tests.hostcache.stored import Bucket, Place
from tests.servers import nats_server, redis_server
from tests.small_disk import small_disk

from ferryman.settings.groups import BusSettings, IndexSettings, ListenSettings
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.wire.redis import redis_index as redis_module
from ferryman_hostcache import index_publisher
from ferryman_hostcache.service import RunningHostCache, running_host_cache


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    with nats_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that a busy machine holds up for a second does not count as away."""
    monkeypatch.setattr(redis_module, "WRITE_SECONDS", 30.0)


@pytest.fixture(autouse=True)
def empty_index(request: pytest.FixtureRequest) -> None:
    """A node whose leave was late is in the index for a minute, and each entry of it counts."""
    if "redis_url" in request.fixturenames:
        with Redis.from_url(request.getfixturevalue("redis_url")) as client:
            client.flushall()


@pytest.fixture(autouse=True)
def _processes_hold_nothing_at_the_end() -> Iterator[None]:
    with ledger.held_by_process():
        yield


@asynccontextmanager
async def _balanced(settings: HostCacheServiceSettings) -> AsyncIterator[RunningHostCache]:
    """A host-cache that holds nothing at the end for anybody who has left."""
    async with running_host_cache(settings) as service:
        yield service
        await ledger.settle(service)


class StartHostCache(Protocol):
    def __call__(
        self,
        memory_bytes: int = 1 << 20,
        lease_seconds: float = 5.0,
        port: int = 0,
        redis_url: str = "",
        **settings: Any,
    ) -> AbstractAsyncContextManager[RunningHostCache]: ...


@pytest.fixture
def start_host_cache(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StartHostCache:
    """Host-caches in this process, their arenas in a folder of the test's own.

    On a machine so busy that no beat comes for a while they live on all the same.
    """
    monkeypatch.setattr(index_publisher, "LIFE_SECONDS", 60.0)
    shared_redis = redis_url

    def start(
        memory_bytes: int = 1 << 20,
        lease_seconds: float = 5.0,
        port: int = 0,
        redis_url: str = shared_redis,
        **settings: Any,
    ) -> AbstractAsyncContextManager[RunningHostCache]:
        return _balanced(
            HostCacheServiceSettings(
                listen=ListenSettings(port=port),
                memory_bytes=memory_bytes,
                lease_seconds=lease_seconds,
                arena_folder=tmp_path,
                bus=BusSettings(url=nats_url),
                index=IndexSettings(url=redis_url, lookup_seconds=10),
                **{
                    "node": "test-node",
                    "peer_lookup_seconds": 10.0,
                    "cluster_key_file": key_file_in(tmp_path.parent),
                    **settings,
                },
            )
        )

    return start


@pytest.fixture
async def host_cache(start_host_cache: StartHostCache) -> AsyncIterator[RunningHostCache]:
    async with start_host_cache() as service:
        yield service


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server with a bucket."""
    with s3_server() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A prefix of its own in a bucket, with credentials as other tools know them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    prefix = uuid.uuid4().hex
    faults = s3.faults[prefix] = ObjectFaults()
    yield Bucket(f"s3://{BUCKET}/{prefix}?endpoint={s3.url}&region=us-east-1", faults)
    faults.is_quick.set()
    faults.is_flowing.set()
    del s3.faults[prefix]


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a storage tier keeps its blobs; a test can break and mend it."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return bucket
    return tmp_path / "storage" if request.param == "file" else BlobMedium()


@pytest.fixture(params=["file", "memory", "s3"])
def small_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """One with room for 128 KiB."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        bucket.faults.capacity_bytes = 128 << 10
        yield bucket
        return
    if request.param == "memory":
        yield BlobMedium(capacity_bytes=128 << 10)
        return
    with small_disk(tmp_path / "disk", 128) as folder:
        yield folder
