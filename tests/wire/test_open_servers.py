"""Servers without locks obey anybody: what tests of locked ones see refused does work there."""

from __future__ import annotations

import nats
import redis.asyncio as aioredis
from tests.servers import nats_server, redis_server

from ferryman.wire.nats.lifecycle_log import ALL_LIFE, STREAM
from ferryman.wire.nats.subjects import Subjects

FAILSAFE_SECONDS = 120
DRAIN = Subjects().control("decode-00000000", "drain")


async def test_an_open_broker_lets_anybody_order_and_purge() -> None:
    with nats_server() as url:
        anybody = await nats.connect(url)
        log = anybody.jetstream(timeout=FAILSAFE_SECONDS)
        await log.add_stream(name=STREAM, subjects=[ALL_LIFE])
        await log.publish(Subjects().life("router", "router-1", "r1", "finished"), b"{}")
        assert (await log.stream_info(STREAM)).state.messages == 1
        await log.purge_stream(STREAM)
        assert (await log.stream_info(STREAM)).state.messages == 0
        orders = await anybody.subscribe(DRAIN)
        await anybody.publish(DRAIN, b"{}")
        assert (await orders.next_msg(FAILSAFE_SECONDS)).data == b"{}"
        await anybody.close()


async def test_an_open_index_lets_anybody_flush_it() -> None:
    with redis_server() as url:
        async with aioredis.Redis.from_url(url) as anybody:
            await anybody.set("other", "1")
            await anybody.flushall()
            assert await anybody.dbsize() == 0
