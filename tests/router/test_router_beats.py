"""Heartbeats of a router, and the one order that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.harness.router import RouterCluster, cluster

from ferryman.errors import InvalidRequest, Stopping, Unavailable
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.heartbeat import ROUTER, Heartbeat, beat_from_bytes
from ferryman_router.service import running

FAILSAFE_SECONDS = 120


@pytest.fixture
async def made(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    async with cluster(nats_url, folder) as made:
        yield made


async def beat_of(heard: Messages, router_id: str, *, is_ready: bool) -> Heartbeat:
    """Its next heartbeat that says so."""
    async with asyncio.timeout(FAILSAFE_SECONDS):
        async for message in heard:
            beat = beat_from_bytes(message.payload)
            assert isinstance(beat, Heartbeat)
            if (beat.worker_id, beat.is_ready) == (router_id, is_ready):
                return beat
    raise AssertionError("a subscription has no end of its own")


async def test_a_router_is_ready_once_it_hears_of_workers_and_until_it_is_ordered_to_drain(
    made: RouterCluster,
) -> None:
    """To another router it is nothing: that would miss it as a worker later."""
    ordered = asyncio.Event()
    async with made.bus.subscribed(made.subjects.all_beats) as heard:
        async with running(made.settings, ordered.set) as second:
            beat = await beat_of(heard, second.worker_id, is_ready=True)
            subject = made.subjects.control(second.worker_id, "drain")
            said = await made.bus.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS)
            assert (said, ordered.is_set()) == (b'{"draining": true}', True)
            await second.drain()  # as `serve` does
            with pytest.raises(Stopping):
                second.components.frontend.check_room()
            await beat_of(heard, second.worker_id, is_ready=False)
        with pytest.raises(Unavailable, match="nobody answers"):
            await made.bus.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS)
    assert (beat.role, beat.epoch, beat.num_running) == (ROUTER, second.epoch, 0)
    assert beat.state == made.fleet.state()
    assert beat.address.endswith(f":{second.grpc_port}")
    assert {worker.beat.role for worker in made.fleet} == {"prefill", "decode"}


async def test_a_router_takes_no_other_order(made: RouterCluster) -> None:
    router_id = made.router.worker_id
    async with made.bus.subscribed(made.subjects.all_beats) as heard:
        # Its first heartbeats may wait for the broker, and are sent when it hears orders.
        await beat_of(heard, router_id, is_ready=True)
    for verb in ("flush", "snapshot"):
        subject = made.subjects.control(router_id, verb)
        with pytest.raises(InvalidRequest, match=verb):
            await made.bus.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS)
