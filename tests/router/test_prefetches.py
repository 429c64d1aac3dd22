"""The router has host-caches begin to bring what storage or a peer holds, and waits for none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from tests.cluster_keys import KEY
from tests.harness.router import (
    SENTENCE,
    STATE,
    FakeRouterWorker,
    FaultStage,
    Moment,
    Pause,
    Refuse,
    RouterCluster,
    cluster,
    living,
)
from tests.servers import redis_server
from tests.waiting import until

from ferryman.cache.keys import PageKey, page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.errors import Exhausted
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import redis_index
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import hostcache_pb2_grpc
from ferryman_router.request import worker_client

PROMPT = SENTENCE * 3  # three full pages


class FakeHostCache(FakeRouterWorker, hostcache_pb2_grpc.HostCacheServiceServicer):
    """Remembers what it was asked to prefetch."""

    role = "hostcache"

    def __init__(self, script: tuple[int, ...]) -> None:
        super().__init__(script)
        self.asked: asyncio.Queue[pb.PrefetchRequest] = asyncio.Queue()

    def register(self, server: grpc.aio.Server) -> None:
        hostcache_pb2_grpc.add_HostCacheServiceServicer_to_server(self, server)

    async def Prefetch(self, request: Any, context: Any) -> pb.PrefetchResponse:
        self.asked.put_nowait(request)
        await self.meet(Moment(FaultStage.PREFETCH))
        return pb.PrefetchResponse(asked_pages=2)


class HeldPrefetch:
    """A cluster on node-1, whose index knows the prompt's first pages by tier and node."""

    def __init__(self, made: RouterCluster, host: FakeHostCache, keys: tuple[PageKey, ...]) -> None:
        self.made, self.host, self.keys = made, host, keys

    async def ask(self, request_id: str) -> int:
        headers = {"x-request-id": request_id}
        body = {"prompt": PROMPT, "max_tokens": 2}
        return (
            await self.made.http.post("/v1/completions", json=body, headers=headers)
        ).status_code

    def cached_in(self, request_id: str) -> dict[str, int]:
        (attempt,) = self.made.request(request_id).attempts
        return attempt.explanation.chosen.cached.by_tier

    async def counted(self, outcome: str, times: int) -> None:
        line = f'ferryman_router_prefetches_total{{outcome="{outcome}"}} {float(times)}'
        async with asyncio.timeout(120):
            metrics = ""
            while line not in metrics:
                metrics = (await self.made.http.get("/metrics")).text


@pytest.fixture
async def held(
    nats_url: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HeldPrefetch]:
    # On a busy machine a first connection, or four requests, take longer than a prefetch may.
    monkeypatch.setattr(worker_client, "PREFETCH_SECONDS", 60.0)
    with redis_server() as redis_url:
        async with (
            redis_index(redis_url, KEY, lookup_seconds=10) as index,
            cluster(nats_url, folder, redis_url=redis_url) as made,
        ):
            tokenizer = made.router.components.frontend.ctx.model.tokenizer
            keys = page_keys(root_key(STATE), tokenizer.encode(PROMPT), STATE.page_size)
            host = FakeHostCache(made.script)
            host.node = made.prefills[0].node = "node-1"
            await made.until_node("node-1")
            async with living(host, made.bus, made.subjects):
                await made.until_joined(host)
                for node, tier in ((1, Tier.STORAGE), (2, Tier.HOST)):
                    life = NodeLife(f"node-{node}", node, f"there:{node}")
                    await index.announce(life, 60)
                    await index.commit(life, keys[0], tier, _units(keys[: 2 * node]))
                yield HeldPrefetch(made, host, keys)


def _units(keys: tuple[PageKey, ...]) -> list[IndexedUnit]:
    units = [IndexedUnit(Kind.FULL, key, 10, b"d" * 16) for key in keys]
    return [*units, IndexedUnit(Kind.RECURRENT, keys[-1], 10, b"d" * 16)]


async def test_what_storage_and_a_peer_hold_is_asked_for_when_the_request_is_routed(
    held: HeldPrefetch,
) -> None:
    assert await held.ask("fetched-1") == 200
    assert held.cached_in("fetched-1") == {"device": 0, "host": 0, "storage": 32, "peer": 16}
    request = await asyncio.wait_for(held.host.asked.get(), 120)
    assert request.phase == pb.PREFETCH_PHASE_START
    assert (request.epoch, request.context.request_id) == (held.host.epoch, "fetched-1")
    assert request.context.attempt == 1
    assert request.page_keys == b"".join(held.keys)
    assert (request.have_pages, request.max_pages) == (0, len(held.keys))
    await held.counted("begun", 1)


async def test_a_host_cache_that_does_not_answer_keeps_nobody_waiting(
    held: HeldPrefetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "MAX_PREFETCHES", 2)
    gate = held.host.suffers(Pause(FaultStage.PREFETCH))
    assert [await held.ask(f"stuck-{i}") for i in range(4)] == [200] * 4
    await held.counted("too_many", 2)
    await asyncio.wait_for(held.host.asked.get(), 120)
    assert gate.happened
    gate.release()
    await held.counted("begun", 2)


async def test_a_host_cache_that_refuses_is_counted_and_the_request_goes_on(
    held: HeldPrefetch,
) -> None:
    held.host.suffers(Refuse(FaultStage.PREFETCH, Exhausted("too many are under way", 0.1)))
    assert await held.ask("refused-1") == 200
    await held.counted("failed", 1)


async def test_nothing_is_fetched_where_computing_is_cheaper(held: HeldPrefetch) -> None:
    held.made.prefills[0].seconds_per_token = 1e-12
    await until(lambda: any(one.beat.seconds_per_token for one in held.made.fleet))
    assert await held.ask("computed-1") == 200
    assert held.cached_in("computed-1") == {"device": 0, "host": 0, "storage": 0, "peer": 0}
    assert held.host.asked.empty()
