"""Reads the lifecycle log of a call as the command line does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ferryman.errors import Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import read_events


async def recorded_call(nats_url: str, cluster: str, name: str) -> list[LifecycleEntry]:
    """All its events; a broker that a busy machine holds up is asked again."""
    async with asyncio.timeout(120):
        while True:
            with suppress(Unavailable):
                return await read_events(BrokerPlace(nats_url, cluster), name)
