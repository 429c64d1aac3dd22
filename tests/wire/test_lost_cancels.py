"""A cancel that comes when a library's wait has just ended counts: redis-py and nats-py lose it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.cluster_keys import KEY

from ferryman.wire.nats.bus import BusMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.redis.redis_index import redis_index

TURNS = 60  # of the loop, more than a call takes here
PATIENT = 10.0
FAILSAFE_SECONDS = 30

Job = Callable[[], Awaitable[None]]


async def ends_when_cancelled_at_each_turn(job: Job) -> None:
    """Cancels a new job at the first turn of the loop, at the second, and so on."""
    for turns in range(TURNS):
        running = asyncio.ensure_future(job())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        ended, _ = await asyncio.wait((running,), timeout=FAILSAFE_SECONDS)
        assert ended, f"the cancel at turn {turns} was lost"


async def test_counting_refusals_of_redis_ends(redis_url: str) -> None:
    """From the first connection on, which is made by several commands."""

    async def count() -> None:
        async with redis_index(redis_url, KEY, lookup_seconds=PATIENT) as index:
            await index.keep_counting_refusals()

    await ends_when_cancelled_at_each_turn(count)


async def test_asking_on_the_bus_again_and_again_ends(nats_url: str) -> None:
    async def answer(_: BusMessage) -> bytes:
        return b""

    async with nats_bus(NatsOptions(nats_url)) as bus, bus.answering("orders.x", answer):
        await bus.connected()

        async def ask() -> None:
            while True:
                await bus.request("orders.x", b"", timeout_seconds=PATIENT)
                await asyncio.sleep(0)

        await bus.request("orders.x", b"", timeout_seconds=PATIENT)
        await ends_when_cancelled_at_each_turn(ask)
