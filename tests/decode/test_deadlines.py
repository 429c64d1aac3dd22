"""A deadline that passes ends a request at every stage: its slots are free, its end is typed.

Row 62 of the catalogue. Decode's clock is put forward; prefill's own waits are short.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.harness.pair import (
    PATIENT_SECONDS,
    WorkerPair,
    pair_of_workers,
    request,
    stream_of,
)
from tests.skipped_time import skipped_time
from tests.waiting import until

from ferryman.errors import DeadlineExceeded
from ferryman.schedule.events import Event, Retracted
from ferryman.wire.values import Failure, TokenCursor
from ferryman_decode.requests import LINGER_SECONDS
from ferryman_decode.server import EXPIRY_SECONDS, DecodeServicer

PROMPT = [3] * 21
ASKED = request("r1", PROMPT, max_tokens=40)
DEADLINE = 60.0


async def let_the_deadline_pass(pair: WorkerPair, num_requests: int) -> None:
    """Lets the deadline of `num_requests` requests pass at decode; its events show that it did."""
    before = len(pair.decode.facts("aborted"))
    pair.decode.clock.ahead = DEADLINE + 1
    await until(lambda: len(pair.decode.facts("aborted")) == before + num_requests)
    reasons = [facts["reason"] for facts in pair.decode.facts("aborted")]
    assert reasons[before:] == ["deadline"] * num_requests


async def nothing_is_left(pair: WorkerPair) -> None:
    """The scheduler runs and holds nothing, and drain has nothing to wait for."""
    pair.prefill.go_on()
    pair.decode.go_on()
    await until(lambda: not pair.leased())
    statistics = pair.decode.engine.scheduler.statistics()
    assert (statistics.reserved, statistics.decoding, statistics.waiting) == (0, 0, 0)
    pair.decode.engine.scheduler.check_integrity()
    async with asyncio.timeout(120):
        await pair.decode.service.drain()


async def test_while_it_decodes() -> None:
    async with pair_of_workers() as pair:
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED, deadline=DEADLINE))
        assert pair.decode.engine.scheduler.statistics().decoding == 1
        await let_the_deadline_pass(pair, 1)
        assert pair.decode.engine.scheduler.statistics().decoding == 0, "its slots are given back"
        _, last = await pair.read_tokens("r1")
        assert isinstance(last.ending, Failure)
        assert (last.ending.code, last.ending.reason) == ("DEADLINE_EXCEEDED", "DeadlineExceeded")
        await nothing_is_left(pair)


class HoldsAtRetraction(DecodeServicer):
    """Runs no further step once a request was retracted."""

    gate: threading.Event

    def on_events(self, events: list[Event]) -> None:
        super().on_events(events)
        if any(isinstance(event, Retracted) for event in events):
            self.gate.clear()


async def test_while_it_waits_to_come_back() -> None:
    async with pair_of_workers(HoldsAtRetraction, num_slots=18) as pair:
        pair.decode.service.gate = pair.decode.gate
        pair.decode.hold()
        for name in ("r1", "r2"):
            asked = request(name, [int(name[1:])] * 21, max_tokens=40)
            await pair.run_prefill(pair.order(asked, deadline=DEADLINE))
        pair.decode.go_on()
        await until(lambda: bool(pair.decode.facts("retracted")))
        assert pair.decode.engine.scheduler.statistics().waiting == 1
        await let_the_deadline_pass(pair, 2)
        statistics = pair.decode.engine.scheduler.statistics()
        assert (statistics.waiting, statistics.decoding) == (0, 0)
        await nothing_is_left(pair)


async def test_while_prefill_computes() -> None:
    """Prefill's deadline passes first; it aborts at decode, which frees the reserved slots."""
    async with pair_of_workers() as pair:
        pair.prefill.hold()
        with pytest.raises(DeadlineExceeded):
            await pair.run_prefill(pair.order(ASKED, deadline=1.0))
        assert [facts["reason"] for facts in pair.prefill.facts("failed")] == ["DeadlineExceeded"]
        await nothing_is_left(pair)


async def test_while_it_waits_its_turn_at_prefill() -> None:
    async with pair_of_workers() as pair:
        run_limit = pair.prefill.service._ctx.run_limit
        for _ in range(4):
            await run_limit.acquire()
        with pytest.raises(DeadlineExceeded):
            await pair.run_prefill(pair.order(ASKED, deadline=0.2))
        assert not pair.decode.facts("reserved"), "it never came to decode"
        for _ in range(4):
            run_limit.release()
        await nothing_is_left(pair)


async def test_a_request_ends_at_its_deadline_and_is_forgotten_at_its_time() -> None:
    async with pair_of_workers() as pair, stream_of(pair, "router-1"):
        before = pair.decode.clock()
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED, deadline=DEADLINE))
        requests = pair.decode.service.requests
        (deadline,) = requests._deadlines.values()
        assert 0.0 <= deadline - before <= DEADLINE + PATIENT_SECONDS
        assert requests.expire(deadline - 0.001) == []
        assert [context.request_id for context in requests.expire(deadline)] == ["r1"]
        (end,) = requests._ended.values()
        cursor = TokenCursor("r1", 1, 0)
        requests.expire(end - 0.001)
        assert requests.since([cursor]), "a router may ask for its tokens again"
        requests.expire(end)
        assert not requests.since([cursor])
        assert 0.0 <= end - before - LINGER_SECONDS <= PATIENT_SECONDS


async def test_an_idle_worker_looks_for_ends_once_a_second_and_often_with_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair_of_workers() as pair:
        reservations = pair.decode.engine.scheduler.reservations
        expire, looks = reservations.expire, list[float]()

        def counted(now: float) -> None:
            looks.append(now)
            expire(now)

        monkeypatch.setattr(reservations, "expire", counted)
        time = skipped_time(monkeypatch)

        async def looks_in(seconds: float) -> int:
            looks.clear()
            for _ in range(round(seconds / EXPIRY_SECONDS)):
                await time.skip(EXPIRY_SECONDS)
            return len(looks)

        assert 3 <= await looks_in(5.0) <= 6
        pair.decode.hold()
        await pair.run_prefill(pair.order(ASKED, deadline=DEADLINE))
        assert await looks_in(2.0) >= 15
        await let_the_deadline_pass(pair, 1)
        await nothing_is_left(pair)
        await time.skip(EXPIRY_SECONDS)
        assert await looks_in(5.0) <= 6
