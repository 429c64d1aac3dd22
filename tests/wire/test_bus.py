"""The contract of the bus, held by NATS and by memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.memory_bus import MemoryBroker, MemoryBus

from ferryman.errors import DeadlineExceeded, InvalidRequest, OutOfSlots, TooLarge, Unavailable
from ferryman.ids import make_request_id
from ferryman.wire.nats.bus import DEADLINE_HEADER, Bus, BusMessage, Discoverable, matches
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.subjects import Subjects

Connect = Callable[[], AbstractAsyncContextManager[Bus]]
LOCAL = Subjects("local")


@pytest.fixture(params=["memory", "nats"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Makes buses that are all connected to one broker."""
    if request.param == "nats":
        options = NatsOptions(request.getfixturevalue("nats_url"))

        @asynccontextmanager
        async def over_nats() -> AsyncIterator[Bus]:
            async with nats_bus(options) as bus:
                await bus.connected()
                yield bus

        return over_nats
    broker = MemoryBroker()

    @asynccontextmanager
    async def in_memory() -> AsyncIterator[Bus]:
        yield MemoryBus(broker)

    return in_memory


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    async with connect() as bus:
        yield bus


@pytest.fixture
async def other(connect: Connect) -> AsyncIterator[Bus]:
    async with connect() as bus:
        yield bus


async def test_what_is_published_arrives_in_order_with_its_headers(bus: Bus, other: Bus) -> None:
    async with other.subscribed("order.*") as messages:
        for number in range(200):
            bus.publish("order.a", b"%d" % number, {"traceparent": "00-1-2-03"})
        got = [await anext(messages) for _ in range(200)]
    assert [message.payload for message in got] == [b"%d" % number for number in range(200)]
    assert got[0] == BusMessage("order.a", b"0", {"traceparent": "00-1-2-03"})


async def test_what_is_offered_arrives_at_every_listener_that_fits(bus: Bus, other: Bus) -> None:
    beat = LOCAL.beat("decode", "decode-00000001")
    async with (
        bus.subscribed(LOCAL.all_beats) as here,
        other.subscribed(LOCAL.all_beats) as there,
        other.subscribed(LOCAL.all_cache) as elsewhere,
    ):
        bus.offer(beat, b"{}")
        bus.offer(LOCAL.cache("decode-00000001", 5), b"keys")
        assert (await anext(here)).subject == beat
        assert (await anext(there)).subject == beat
        assert (await anext(elsewhere)).payload == b"keys"


async def test_nothing_arrives_after_a_subscription_ended(bus: Bus) -> None:
    async with bus.subscribed("gone.*"):
        pass
    async with bus.subscribed("gone.*") as messages:
        bus.publish("gone.a", b"new")
        assert (await anext(messages)).payload == b"new"


async def test_an_order_is_answered_and_knows_what_time_is_left(bus: Bus, other: Bus) -> None:
    orders: list[BusMessage] = []

    async def answer(message: BusMessage) -> bytes:
        orders.append(message)
        return message.payload.upper()

    subject = LOCAL.control("decode-00000001", "snapshot")
    async with other.answering(LOCAL.all_control_of("decode-00000001"), answer):
        assert await bus.request(subject, b"all", timeout_seconds=5) == b"ALL"
    assert orders[0].subject == subject
    assert orders[0].headers[DEADLINE_HEADER] == "5000"


async def test_an_error_of_the_answerer_is_raised_where_it_was_asked(bus: Bus, other: Bus) -> None:
    async def refuse(message: BusMessage) -> bytes:
        if message.payload == b"bug":
            raise ZeroDivisionError("secret")
        raise OutOfSlots("no\nroom", 1.5)

    async with other.answering("refuse.it", refuse):
        with pytest.raises(OutOfSlots, match="no room") as caught:
            await bus.request("refuse.it", b"", timeout_seconds=60)
        assert caught.value.retry_after_seconds == 1.5
        with pytest.raises(Exception, match="internal error") as bug:
            await bus.request("refuse.it", b"bug", timeout_seconds=60)
        assert "secret" not in str(bug.value)


async def test_an_order_to_nobody_fails_at_once(bus: Bus) -> None:
    with pytest.raises(Unavailable, match="nobody answers"):
        await bus.request("nobody.there", b"", timeout_seconds=100)


async def test_an_order_that_is_not_answered_in_time_fails(bus: Bus, other: Bus) -> None:
    async def wait(message: BusMessage) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with other.answering("slow.it", wait):
        with pytest.raises(DeadlineExceeded, match="no answer"):
            await bus.request("slow.it", b"", timeout_seconds=0.05)


async def test_lifecycle_events_are_kept_and_can_be_read_by_request(bus: Bus, other: Bus) -> None:
    mine, theirs = make_request_id(), make_request_id()
    async with other.subscribed(LOCAL.all_life_of(mine)) as live:
        for event in ("queued", "admitted", "handed_off"):
            bus.publish(LOCAL.life("prefill", "prefill-00000001", theirs, event), b"{}")
            bus.publish(LOCAL.life("prefill", "prefill-00000001", mine, event), event.encode())
        seen = [(await anext(live)).payload for _ in range(3)]
    entries = await other.history(LOCAL.all_life_of(mine), max_events=100)
    assert [entry.payload for entry in entries] == seen == [b"queued", b"admitted", b"handed_off"]
    assert entries[0].sequence < entries[1].sequence < entries[2].sequence
    assert len(await other.history(LOCAL.all_life_of(mine), max_events=2)) == 2
    assert await other.history(LOCAL.all_life_of("never-was"), max_events=2) == ()


async def test_payloads_and_subjects_are_checked_before_they_leave(bus: Bus) -> None:
    with pytest.raises(TooLarge):
        bus.publish("large.it", bytes((1 << 20) + 1))
    for subject in ("a..b", "a.*", "a.>", "", "a b"):
        with pytest.raises(InvalidRequest):
            bus.offer(subject, b"")


async def test_a_listener_may_be_cancelled(bus: Bus) -> None:
    async def listen(entered: asyncio.Event) -> None:
        async with bus.subscribed("quiet.*") as messages:
            entered.set()
            await anext(messages)

    entered = asyncio.Event()
    listening = asyncio.ensure_future(listen(entered))
    await entered.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening


async def test_a_process_can_be_discovered_while_its_block_runs(bus: Bus) -> None:
    process = Discoverable("ferryman-decode", "0.1.0", "decode worker", {"worker_id": "decode-1"})
    async with bus.discoverable(process):
        assert bus.is_connected


async def test_sent_messages_are_counted(bus: Bus) -> None:
    async with bus.subscribed("count.*") as messages:
        bus.publish("count.a", b"")
        await anext(messages)
    assert bus.statistics().num_sent == 1
    assert bus.statistics().num_waiting == 0


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b", "a.b", True),
        (">", "a", True),
    ],
)
def test_patterns(pattern: str, subject: str, fits: bool) -> None:
    assert matches(pattern, subject) is fits


@given(st.lists(st.sampled_from(["a", "b", "cc"]), min_size=1, max_size=5), st.data())
def test_a_subject_fits_any_pattern_made_of_it(tokens: list[str], data: st.DataObject) -> None:
    pattern = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert matches(".".join(pattern), ".".join(tokens))
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert matches(".".join([*pattern[:cut], ">"]), ".".join(tokens))
