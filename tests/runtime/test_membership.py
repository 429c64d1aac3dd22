"""A process of a cluster sends heartbeats and answers orders, whatever its role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.doubles.memory_bus import MemoryBroker, MemoryBus
from tests.skipped_time import skipped_time

from ferryman.errors import InvalidRequest, Unavailable
from ferryman.runtime.membership import Membership, Order, drain_order, joined
from ferryman.settings.groups import BusSettings, TracingSettings
from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.heartbeat import (
    HEARTBEAT_SECONDS,
    NO_STATE,
    Heartbeat,
    beat_from_bytes,
)
from ferryman.wire.nats.subjects import Subjects

WORKER_ID = "decode-0123456789abcdef"
FAILSAFE_SECONDS = 60


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def member(broker: MemoryBroker) -> Membership:
    return Membership("decode", WORKER_ID, 7, MemoryBus(broker), Subjects())


@pytest.fixture
async def heard(broker: MemoryBroker) -> AsyncIterator[Messages]:
    async with MemoryBus(broker).subscribed(Subjects().all_beats) as messages:
        yield messages


def a_beat(num_steps: int = 0) -> Heartbeat:
    return Heartbeat("decode", WORKER_ID, 7, "a:1", True, NO_STATE, 64, num_steps=num_steps)


async def order(broker: MemoryBroker, verb: str, payload: bytes = b"") -> bytes:
    subject = Subjects().control(WORKER_ID, verb)
    return await MemoryBus(broker).request(subject, payload, timeout_seconds=FAILSAFE_SECONDS)


async def test_heartbeats_follow_each_other_and_one_goes_out_at_once(
    member: Membership, heard: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, time = iter(range(1, 100)), skipped_time(monkeypatch)
    async with asyncio.timeout(FAILSAFE_SECONDS):
        async with member.reporting(lambda: a_beat(next(counts)), {}) as beat:
            first = await anext(heard)
            beat()
            await time.skip(HEARTBEAT_SECONDS)
            second, third = await anext(heard), await anext(heard)
    told = [beat_from_bytes(message.payload) for message in (first, second, third)]
    assert told == [a_beat(1), a_beat(2), a_beat(3)]
    assert first.subject == Subjects().beat("decode", WORKER_ID)


async def test_a_process_without_a_heartbeat_is_silent_but_answers(
    broker: MemoryBroker, member: Membership, heard: Messages
) -> None:
    made: list[Heartbeat | None] = [None]
    async with member.reporting(lambda: made[0], {"echo": bytes.upper}) as beat:
        beat()
        assert await order(broker, "echo", b"hm") == b"HM"
        made[0] = a_beat(5)
        beat()
        async with asyncio.timeout(FAILSAFE_SECONDS):
            message = await anext(heard)
    assert beat_from_bytes(message.payload) == a_beat(5), "the first one that was there"


async def test_an_order_is_answered_by_its_verb(broker: MemoryBroker, member: Membership) -> None:
    drained = asyncio.Event()
    orders: dict[str, Order] = {"drain": drain_order(drained.set), "echo": bytes.upper}
    async with member.reporting(a_beat, orders):
        assert await order(broker, "drain") == b'{"draining": true}'
        assert drained.is_set()
        assert await order(broker, "echo", b"so") == b"SO"
        with pytest.raises(InvalidRequest, match=r"'dance' here; this decode knows drain, echo"):
            await order(broker, "dance")
    with pytest.raises(Unavailable):
        await order(broker, "drain")


async def test_the_error_of_an_order_goes_to_its_sender(
    broker: MemoryBroker, member: Membership
) -> None:
    def refuse(_payload: bytes) -> bytes:
        raise InvalidRequest("not that", "payload")

    async with member.reporting(a_beat, {"echo": refuse}):
        with pytest.raises(InvalidRequest, match="not that"):
            await order(broker, "echo")


async def test_each_life_has_a_name_of_its_own() -> None:
    """No broker is there: a process joins once one is."""
    settings = BusSettings(url="nats://127.0.0.1:1", cluster="toy")
    async with (
        joined(settings, "decode", OPEN_TO_ALL, TracingSettings()) as one,
        joined(settings, "decode", OPEN_TO_ALL, TracingSettings()) as other,
    ):
        assert one.role == other.role == "decode"
        assert one.worker_id != other.worker_id
        assert one.epoch != other.epoch
        assert one.subjects == Subjects("toy")
