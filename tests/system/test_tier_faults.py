"""The tiers fail while requests run: the host-cache is killed, Redis hangs, forgets and restarts.

No request may fail or change because of it. How often the host-cache is killed is
FERRYMAN_TEST_KILLS (5); 200 were run by hand, see docs/defects.md.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis.asyncio as aioredis
from tests.cluster_keys import KEY
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    generate,
    one_process,
    save_served_model,
    started_cluster,
)
from tests.processes import process_state
from tests.servers import nats_server
from tests.waiting import wait_until

from ferryman.cache.manifest import ResumeShape
from ferryman.client import Client
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.runtime.embedded import redis_command, start, start_on_free_port
from ferryman.runtime.life import alongside
from ferryman.schedule.request import SamplingParams
from ferryman.wire.redis.index import NodePrefix
from ferryman.wire.redis.redis_index import redis_index

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
]

KILLS = int(os.environ.get("FERRYMAN_TEST_KILLS", "5"))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
NUM_CALLERS = 4
DEVICE_BYTES = HOST_BYTES = 4_500_000
# Prefill tracks no states of decoding, so that this leaves its cache as little as decode has.
PREFILL_BYTES = 2_558_496


class Redis:
    """The index's server, always on one port: it can be stopped, flushed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = start_on_free_port(redis_command, folder)
        self.url = self.server.url

    def restart(self) -> None:
        """An empty one in its place."""
        self.server.stop()
        port = urlsplit(self.url).port or 0
        self.server = start(redis_command(self._folder, port), self._folder)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Connections stay open and nothing answers."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            wait_until(self._is_stopped, "Redis to stop")
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def _is_stopped(self) -> bool:
        return process_state(self.server.pid) == "T"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    redis = Redis(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis: Redis) -> Iterator[Cluster]:
    """Device pools and arena are small, so that prompts come from the tiers again and again."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    folder = tmp_path_factory.mktemp("cluster")
    settings = {
        "hostcache": {"host_memory": HOST_BYTES},
        "prefill": {"memory_bytes": PREFILL_BYTES},
    }
    shape = ClusterShape(
        memory_bytes=DEVICE_BYTES, has_storage=True, patience_seconds=0.2, settings=settings
    )
    with (
        nats_server() as nats,
        started_cluster(Cluster(model, folder, shape, nats, redis.url)) as cluster,
    ):
        yield cluster


PROMPTS = [[(family * 11 + i * 3) % 120 + 3 for i in range(150)] for family in range(24)]


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[list[int]]:
    """The answer of one process to each prompt, without a cache."""
    with one_process(cluster.model) as llm:
        return [list(one.token_ids) for one in llm.generate(PROMPTS, GREEDY)]


class TierLoad:
    """Callers that ask one prompt after the other and compare every answer."""

    def __init__(self, cluster: Cluster, wanted: Sequence[Sequence[int]]) -> None:
        self._cluster, self._wanted = cluster, wanted
        self._rng = random.Random(3)
        self.num_answers = 0
        self.num_reused = {"host": 0, "storage": 0}

    async def _call(self, client: Client) -> None:
        while True:
            number = self._rng.randrange(len(PROMPTS))
            answer = await generate(client, PROMPTS[number], GREEDY)
            assert answer.token_ids == self._wanted[number], "an answer changed"
            assert answer.usage is not None
            self.num_reused["host"] += answer.usage.cached.host > 0
            self.num_reused["storage"] += answer.usage.cached.storage > 0
            self.num_answers += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Calls go on beside the block; what one of them raises ends it."""
        async with (
            Client(self._cluster.grpc) as client,
            alongside(*(self._call(client) for _ in range(NUM_CALLERS))),
        ):
            yield

    async def answers(self, number: int) -> None:
        """Waits for `number` more answers, which shows that requests continue."""
        end = self.num_answers + number
        async with asyncio.timeout(120):
            while self.num_answers < end:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the callers have no event for this


async def indexed(cluster: Cluster, redis: Redis, prompt: Sequence[int]) -> NodePrefix | None:
    """The node's prefix of the prompt according to the index."""
    manifest = load_model(cluster.model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    async with redis_index(redis.url, KEY) as index:
        found = await index.usable_pages(cluster.keys_of(prompt), ResumeShape.of(manifest))
    return next(iter(found.values()), None)


async def test_a_host_cache_killed_again_and_again_changes_no_answer(
    cluster: Cluster, wanted: list[list[int]]
) -> None:
    load, rng, epochs = TierLoad(cluster, wanted), random.Random(4), set()
    async with load.running():
        await load.answers(2 * len(PROMPTS))
        for _ in range(KILLS):
            (hostcache,) = cluster.of_role("hostcache")
            epochs.add(hostcache.ready["epoch"])
            await asyncio.sleep(rng.uniform(0.0, 0.5))  # the moment is what is drawn
            await asyncio.to_thread(hostcache.kill)
            again = cluster.start("hostcache")  # here: a child ends with the thread that began it
            await asyncio.to_thread(again.await_ready)
            await load.answers(NUM_CALLERS)
    assert len(epochs) == KILLS, "every kill was meant to end a life"
    assert min(load.num_reused.values()) > 0, f"both tiers were meant to be used: {load.num_reused}"
    cluster.assert_ledgers_balance()


async def test_entries_of_a_killed_host_cache_are_void(
    cluster: Cluster, redis: Redis, wanted: list[list[int]]
) -> None:
    cluster.await_attached()
    for role in ("prefill", "decode"):  # what a device has is not stored anew
        await cluster.flush_device(role)
    async with Client(cluster.grpc) as client:
        await generate(client, PROMPTS[0], GREEDY)
    await cluster.await_stored(PROMPTS[0])
    before = await indexed_soon(cluster, redis, lambda holding: holding.usable_pages > 0)
    (hostcache,) = cluster.of_role("hostcache")
    hostcache.kill()
    cluster.start("hostcache").await_ready()
    after = await indexed_soon(cluster, redis, lambda it: it.node.epoch != before.node.epoch)
    assert after.host_pages == 0, "an arena does not outlive its process"
    async with Client(cluster.grpc) as client:
        assert (await generate(client, PROMPTS[0], GREEDY)).token_ids == wanted[0]


async def indexed_soon(
    cluster: Cluster, redis: Redis, condition: Callable[[NodePrefix], bool]
) -> NodePrefix:
    """The index's entry for the first prompt, as soon as it fulfils `condition`."""
    async with asyncio.timeout(120):
        while True:
            holding = await indexed(cluster, redis, PROMPTS[0])
            if holding is not None and condition(holding):
                return holding
            await asyncio.sleep(0.05)  # another process announces


async def test_an_index_that_hangs_is_flushed_or_restarted_fails_no_request(
    cluster: Cluster, redis: Redis, wanted: list[list[int]]
) -> None:
    load = TierLoad(cluster, wanted)
    async with load.running():
        await load.answers(len(PROMPTS))
        with redis.hanging():
            await load.answers(len(PROMPTS))
        await load.answers(NUM_CALLERS)
        async with aioredis.Redis.from_url(redis.url) as client:
            assert await client.dbsize() > 0
            await client.flushall()
        await load.answers(len(PROMPTS))
        redis.restart()
        await load.answers(len(PROMPTS))
    again = await indexed_soon(cluster, redis, lambda holding: holding.usable_pages > 0)
    assert again.usable_pages > 0, "what is here is announced to the new one"
    cluster.assert_ledgers_balance()
