"""Reads and follows the lifecycle log over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from ferryman.errors import NotFound, Unavailable
from ferryman.handoff.lifecycle import LifecycleEvent, is_over
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.bus import Message, Recorded
from ferryman.wire.nats_bus import NatsBus, NatsOptions, nats_bus
from ferryman.wire.subjects import Subjects

CONNECT_SECONDS = 3.0
MAX_EVENTS = 8192
LAST_WORDS_SECONDS = 2.0
PAUSE_SECONDS = 0.1


@asynccontextmanager
async def connected_bus(url: str) -> AsyncIterator[NatsBus]:
    """A bus with its broker there; Unavailable when it is not."""
    async with nats_bus(NatsOptions(url, client_name="ferryman-cli")) as bus:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await bus.connected()
                await bus.flush()  # the log is there from now on
        except TimeoutError:
            raise Unavailable(f"no broker answers at {url}") from None
        yield bus


async def read_events(url: str, cluster: str, request_id: str) -> list[LifecycleEvent]:
    """Everything the log has of a request; its last events are given a moment to arrive."""
    pattern = Subjects(cluster).all_life_of(request_id)
    async with connected_bus(url) as bus:
        deadline = asyncio.get_running_loop().time() + LAST_WORDS_SECONDS
        while True:
            events = _events(await bus.history(pattern, max_events=MAX_EVENTS))
            if not events:
                raise NotFound(f"the lifecycle log has nothing of {request_id}")
            if is_over(events) or asyncio.get_running_loop().time() > deadline:
                return events
            await asyncio.sleep(PAUSE_SECONDS)


async def follow_events(
    url: str, cluster: str, request_id: str
) -> AsyncGenerator[tuple[Message, LifecycleEvent], None]:
    """Events as they happen, of one request or (with an empty id) of all, for ever."""
    subjects = Subjects(cluster)
    pattern = subjects.all_life_of(request_id) if request_id else subjects.all_life
    async with connected_bus(url) as bus, bus.subscribed(pattern) as messages:
        async for message in messages:
            try:
                yield message, decode_event(message.payload)
            except ValueError:
                continue


def _events(recorded: tuple[Recorded, ...]) -> list[LifecycleEvent]:
    return [decode_event(one.payload) for one in recorded]
