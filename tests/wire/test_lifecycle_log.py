"""The keeper deletes the log only if the stream refuses what is sent: a stream that is a list of
numbers, and the real acknowledgements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamInfo, StreamState

from ferryman.wire.nats import lifecycle_log
from ferryman.wire.nats.lifecycle_log import Acknowledgements, LogKeeper, LogLimits
from ferryman.wire.nats.outbox import OutboundMessage

EVENT = OutboundMessage("ferryman.v1.local.life.router.router-1.r1.received", b"{}")
STORED, NO_STREAM = b'{"stream": "LIFECYCLE", "seq": 501}', b""
ITS_FAULT = b'{"error": {"code": 503, "err_code": 10077, "description": "no room"}}'
THE_EVENTS = b'{"error": {"code": 400, "err_code": 10054, "description": "too large"}}'
NUM_LOOKS = 8


class ListedStream:
    """A broker with one stream, in the place of a client and of its JetStream."""

    def __init__(self) -> None:
        self.last_seq: int | None = 500
        self.num_deleted, self.is_full = 0, False
        self.next_looks: list[Callable[[], None]] = []

    def jetstream(self, **_: Any) -> ListedStream:
        return self

    async def stream_info(self, _name: str) -> StreamInfo:
        if self.next_looks:
            self.next_looks.pop(0)()
        if self.last_seq is None:
            raise nats.js.errors.NotFoundError
        state = StreamState(0, 0, 0, self.last_seq, 0)
        return StreamInfo(config=cast(Any, None), state=state)

    async def delete_stream(self, _name: str) -> None:
        self.last_seq, self.num_deleted = None, self.num_deleted + 1

    async def add_stream(self, _config: object) -> None:
        if self.is_full:
            raise nats.js.errors.ServerError
        if self.last_seq is None:
            self.last_seq = 0

    def is_made_by_another(self) -> None:
        self.last_seq = 3


class KeptLog:
    """A keeper of that stream, and what becomes of events that were sent."""

    def __init__(self) -> None:
        self.stream, self.acks = ListedStream(), Acknowledgements("inbox")
        client = cast(Client, self.stream)
        self.keeper = LogKeeper(client, LogLimits(), self.acks)

    async def answered(self, data: bytes) -> None:
        reply, _ = self.acks.enter(EVENT)
        await self.acks.on_answer(Msg(cast(Any, None), reply, "", data))

    async def unsendable(self) -> None:
        self.acks.withdraw(self.acks.enter(EVENT)[0])

    async def unanswered(self) -> None:
        self.acks.enter(EVENT)

    async def taken_back(self) -> None:
        self.acks.enter(EVENT)
        self.acks.take_outstanding()

    async def fails(self, way: str) -> None:
        await (self.answered(ANSWERS[way]) if way in ANSWERS else getattr(self, way)())

    async def look(self) -> bool:
        return await self.keeper.look()


ANSWERS = {"no stream": NO_STREAM, "its fault": ITS_FAULT, "the event's": THE_EVENTS}
OTHERWISE = ("no stream", "the event's", "unsendable", "taken_back")


@pytest.fixture(autouse=True)
def events_are_late_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_log, "LOOK_SECONDS", 0.0)


@pytest.mark.parametrize("way", [*OTHERWISE, "its fault", "unanswered"])
async def test_one_event_that_failed_costs_a_quiet_log_nothing(way: str) -> None:
    kept = KeptLog()
    await kept.fails(way)
    assert not any([await kept.look() for _ in range(NUM_LOOKS)])
    assert (kept.stream.last_seq, kept.stream.num_deleted) == (500, 0)


@pytest.mark.parametrize("way", OTHERWISE)
async def test_events_that_fail_otherwise_cost_it_nothing(way: str) -> None:
    kept = KeptLog()
    for _ in range(NUM_LOOKS):
        await kept.fails(way)
        assert not await kept.look()
    assert (kept.stream.last_seq, kept.stream.num_deleted) == (500, 0)


@pytest.mark.parametrize("way", ["its fault", "unanswered"])
async def test_a_log_that_refuses_events_at_two_looks_is_made_anew_once(way: str) -> None:
    kept, made = KeptLog(), list[bool]()
    for _ in range(2):
        await kept.fails(way)
        made += [await kept.look(), await kept.look()]
    assert made == [False, False, True, False]
    kept.acks.take_outstanding()
    assert not any([await kept.look() for _ in range(NUM_LOOKS)])
    assert (kept.stream.last_seq, kept.stream.num_deleted) == (0, 1)


async def test_a_log_that_stores_between_failures_stays() -> None:
    kept = KeptLog()
    for number in range(NUM_LOOKS):
        await kept.fails("its fault")
        await kept.answered(STORED)
        kept.stream.last_seq = 501 + number
        assert not await kept.look()


async def test_a_log_that_another_has_just_made_stays() -> None:
    kept = KeptLog()
    await kept.fails("unanswered")
    assert not await kept.look()
    await kept.fails("unanswered")
    kept.stream.next_looks = [lambda: None, kept.stream.is_made_by_another]
    assert not await kept.look()
    assert (kept.stream.last_seq, kept.stream.num_deleted) == (3, 0)


async def test_a_log_that_is_gone_is_made_again() -> None:
    kept = KeptLog()
    kept.stream.last_seq = None
    await kept.fails("no stream")
    assert await kept.look()
    assert kept.stream.last_seq == 0


async def test_a_log_that_could_not_be_made_is_made_without_any_event() -> None:
    kept = KeptLog()
    kept.stream.last_seq, kept.stream.is_full = None, True
    await kept.keeper.ensure()
    assert not await kept.look()
    kept.stream.is_full = False
    assert await kept.look()
    assert kept.stream.last_seq == 0
