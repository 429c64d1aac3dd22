"""Hears what host-caches publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus


@asynccontextmanager
async def hearing(nats_url: str, pattern: str) -> AsyncIterator[Messages]:
    """All that is published from now on: the broker has the subscription when the block begins."""
    async with nats_bus(NatsOptions(nats_url)) as bus:
        async with asyncio.timeout(120):
            await bus.connected()
        async with bus.subscribed(pattern) as messages:
            yield messages
