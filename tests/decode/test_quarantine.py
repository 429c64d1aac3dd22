"""Slots that a writer may still write to by itself: kept until it answers, or is dead.

Rows 28, 29 and 31 of the catalogue, for writes that decode cannot refuse.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from tests.harness.pair import (
    MANIFEST,
    PATIENT_SECONDS,
    PairWorker,
    WorkerPair,
    expected,
    pair_of_workers,
    request,
    worker,
)
from tests.harness.pair.lone import Lone, lone_worker
from tests.waiting import until
from tests.worker.late_agents import late_agent_of

from ferryman.errors import CorruptState, FerrymanError, LeaseLost, Unavailable, WrongEpoch
from ferryman.handoff.effects import StopWriter
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.grpc.rpc import channel, ending
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import (
    PrefillOrder,
    RequestContext,
    RouterAbort,
    StopAnswer,
    WorkerAddress,
)
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode import aborts
from ferryman_decode.aborts import Quarantine
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

pytestmark = pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed")

PROMPT = [3] * 21


async def nothing_is_held(pair: WorkerPair) -> None:
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()


async def given_up(pair: WorkerPair, request_id: str) -> decode_pb2.AbortResponse:
    """Decode's answer when the router aborts the attempt."""
    return await pair.abort(RouterAbort(request_id, 1, "client_gone", "router-1"))


async def test_rows_28_and_31_a_late_write_lands_in_quarantined_slots_only() -> None:
    """A write that cannot be recalled arrives after its attempt was aborted."""
    async with pair_of_workers(planes="nixl-unlocked") as pair:
        late = late_agent_of(pair.prefill)
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        await until(lambda: late.num_waiting > 0)
        written = late.remote_addresses
        assert (await given_up(pair, "r1")).has_pending_writes
        pair.decode.clock.ahead = 10 * PATIENT_SECONDS
        promise = await pair.reserve(pair.wish(request("r2", [5] * 21)))
        assert "transfer_in" in pair.decode.leased()
        slots = pair.decode.service.receiver._slots[promise.reservation_id]
        places = pair.decode.engine.places
        theirs = {places[kind].ranks[0].address_of(at.slot) for (kind, _), at in slots.items()}
        assert not theirs & written, "the next tenant has other slots"
        before = {
            name: pair.decode.engine.transfer.digest(name[0], at.slot) for name, at in slots.items()
        }
        late.arrive()
        with suppress(FerrymanError):
            await running
        for (kind, index), at in slots.items():
            assert pair.decode.engine.transfer.digest(kind, at.slot) == before[kind, index]
        await given_up(pair, "r2")
        await nothing_is_held(pair)


async def test_row_28_a_cancelled_prefill_keeps_what_is_being_sent() -> None:
    async with pair_of_workers(planes="nixl-unlocked") as pair:
        late = late_agent_of(pair.prefill)
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        await until(lambda: late.num_waiting > 0)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: "request" not in pair.prefill.leased())
        pair.prefill.engine.scheduler.flush()
        assert pair.prefill.leased() == {"transfer_out"}
        assert "transfer_in" in pair.decode.leased()
        late.arrive()
        await nothing_is_held(pair)


async def test_a_write_whose_fate_is_unknown_closes_the_agent_it_was_made_to() -> None:
    async with pair_of_workers(planes="nixl-unlocked") as pair:
        late = late_agent_of(pair.prefill)
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        await until(lambda: late.num_waiting > 0)
        (life,) = pair.decode.service._nixl_receiver._lives.values()
        (writer_agent,) = life.writer_agents
        late.lose()
        with pytest.raises(FerrymanError):
            await running
        await nothing_is_held(pair)
        with pytest.raises(Unavailable, match="closed"):
            await writer_agent.agent.notifications()
        late.arrive()
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked, attempt=2))
        path = pair.prefill.facts("handed_off")[-1]["path"]
        assert path == "nixl", "the next one has an agent of its own"
        tokens, _ = await pair.read_tokens("r1", attempt=2)
        assert tokens == expected(asked)


class AnotherLife(PrefillServicer):
    """Another process at the writer's address answers in the writer's place, until `is_gone`."""

    how = ""
    is_gone = False
    num_answers = 0

    async def StopWriting(
        self, request: prefill_pb2.StopWritingRequest, context: object
    ) -> prefill_pb2.StopWritingResponse:
        if self.is_gone:
            return await super().StopWriting(request, context)
        self.num_answers += 1
        if self.how == "refuses":
            raise WrongEpoch("this is another life")
        epoch = request.worker_epoch + 1 if self.how == "says who it is" else 0
        return prefill_pb2.StopWritingResponse(is_stopped=True, worker_epoch=epoch)


@pytest.mark.parametrize("how", ["refuses", "says who it is", "says nothing of itself"])
async def test_another_life_at_the_writers_address_frees_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 60: only an answer of the process that was granted the slots counts."""
    monkeypatch.setattr(AnotherLife, "how", how)
    async with pair_of_workers(planes="nixl-unlocked", make_prefill=AnotherLife) as pair:
        other = pair.prefill.service
        late = late_agent_of(pair.prefill)
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        await until(lambda: late.num_waiting > 0)
        assert (await given_up(pair, "r1")).has_pending_writes
        await until(lambda: other.num_answers >= 2)
        assert "transfer_in" in pair.decode.leased(), "the writer itself has said nothing"
        other.is_gone = True
        late.arrive()
        with suppress(FerrymanError):
            await running
        await nothing_is_held(pair)


class FlipsBitWhenWritten(DecodeServicer):
    """A byte changes between landing and commit, once."""

    num_flipped = 0

    async def Commit(
        self, request: decode_pb2.CommitRequest, context: object
    ) -> decode_pb2.CommitResponse:
        if not self.num_flipped:
            slots = self.receiver._slots[request.reservation_id]
            (kind, _), at = next(iter(slots.items()))
            content = self._parts.engine.transfer.read(kind, at.slot)
            content[0] ^= 1
            self.receiver.granted[request.reservation_id].examined.clear()
            self.num_flipped += 1
        return await super().Commit(request, context)


async def test_other_bytes_than_were_sent_are_recomputed_not_answered() -> None:
    """The second attempt does not use NIXL, because the cause of the damage is unknown."""
    async with pair_of_workers(FlipsBitWhenWritten, planes="nixl-unlocked-or-grpc") as pair:
        asked = request("r1", PROMPT)
        with pytest.raises(CorruptState):
            await pair.run_prefill(pair.order(asked))
        assert pair.decode.service.num_flipped == 1
        await nothing_is_held(pair)
        await pair.run_prefill(pair.order(asked, attempt=2))
        assert pair.prefill.facts("handed_off")[-1]["path"] == "grpc"
        tokens, _ = await pair.read_tokens("r1", attempt=2)
        assert tokens == expected(asked)


async def test_row_29_a_reservation_given_up_before_its_writer_knows_it_is_never_written() -> None:
    """The stop overtakes the answer to Reserve."""
    async with pair_of_workers(OvertakesItself, planes="nixl-unlocked") as pair:
        pair.decode.service.prefill = prefill_pb2_grpc.PrefillServiceStub(
            pair.prefill.parts.channels.to(pair.prefill.address)
        )
        pair.decode.service.epoch = pair.prefill.parts.epoch
        with pytest.raises(LeaseLost, match="before it was known"):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert pair.decode.service.answer.is_stopped
        assert not pair.prefill.leased()
        await given_up(pair, "r1")
        await nothing_is_held(pair)


class OvertakesItself(DecodeServicer):
    """Asks for a stop before it answers."""

    prefill: prefill_pb2_grpc.PrefillServiceStub
    epoch: int
    answer: prefill_pb2.StopWritingResponse

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: object
    ) -> decode_pb2.ReserveResponse:
        answer = await super().Reserve(request, context)
        stop = prefill_pb2.StopWritingRequest(
            request_id=request.context.request_id,
            attempt=request.context.attempt,
            reservation_id=answer.reservation_id,
            worker_epoch=self.epoch,
        )
        self.answer = await self.prefill.StopWriting(stop, timeout=120)
        return answer


# Between processes: what a kernel knows of a process, and what only the process can say.


def order_for(prefill: WorkerAddress, decode: WorkerAddress) -> PrefillOrder:
    context = RequestContext("r1", 1, 60.0)
    return PrefillOrder(
        context, prefill.epoch, decode, "router-1", request("r1", PROMPT), MANIFEST.digest
    )


async def run_order(order: PrefillOrder, address: str) -> list[prefill_pb2.PrefillResponse]:
    async with channel(address) as connection:
        await connection.channel_ready()
        stub = prefill_pb2_grpc.PrefillServiceStub(connection)
        with typed_errors(), ending(stub.Prefill(prefill_order_to_wire(order))) as call:
            return [progress async for progress in call]


class CountsSilence(DecodeServicer):
    """Notes how often its writer did not answer."""

    num_unanswered = 0

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self._quarantine = CountingQuarantine(
            self.receiver, self._nixl_receiver, parts.channels, self._count
        )

    def _count(self) -> None:
        self.num_unanswered += 1


@dataclass(frozen=True, slots=True)
class CountingQuarantine(Quarantine):
    count: Callable[[], None]

    async def _ask(self, order: StopWriter) -> StopAnswer:
        answer = await Quarantine._ask(self, order)
        if not answer.is_stopped:
            self.count()
        return answer


@asynccontextmanager
async def half_written() -> AsyncIterator[tuple[Lone, PairWorker, asyncio.Task[object]]]:
    """A prefill process that has written its first chunk into this process, and holds."""
    with lone_worker("prefill", "nixl-unlocked", num_steps=2) as prefill:
        async with worker("decode", CountsSilence, planes="nixl-unlocked") as decode:
            here = WorkerAddress(decode.parts.worker_id, decode.address, decode.parts.epoch)
            order = order_for(prefill.where, here)
            running = asyncio.create_task(run_order(order, prefill.where.address))
            table = decode.service.receiver.table
            await until(lambda: any(each.received for each in table._live.values()))
            try:
                yield prefill, decode, running
            finally:
                running.cancel()
                await asyncio.wait([running])


async def test_row_28_a_stopped_writer_keeps_its_slots_in_quarantine_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aborts, "ASK_SECONDS", 1.0)
    async with half_written() as (prefill, decode, _running):
        os.kill(prefill.process.pid, signal.SIGSTOP)
        decode.clock.ahead = 100 * PATIENT_SECONDS
        table = decode.service.receiver.table
        await until(lambda: table.statistics().num_quarantined == 1)
        asking = decode.service
        await until(lambda: asking.num_unanswered >= 2)
        assert decode.leased() == {"transfer_in"}, "it was asked and was silent: they stay"
        os.kill(prefill.process.pid, signal.SIGCONT)
        await until(lambda: not decode.leased())
        decode.engine.scheduler.check_integrity()


async def test_row_28_a_dead_writer_frees_its_slots() -> None:
    async with half_written() as (prefill, decode, running):
        assert decode.leased() == {"transfer_in"}
        prefill.process.kill()
        await until(lambda: not decode.leased())
        assert decode.clock.ahead == 0.0, "no lease was over"
        with pytest.raises(FerrymanError):
            await running


async def test_a_dead_receiver_frees_what_was_sent_to_it() -> None:
    with lone_worker("decode", "nixl-unlocked") as decode:
        async with worker("prefill", PrefillServicer, planes="nixl-unlocked") as prefill:
            await until(lambda: prefill.service.load().planes[0] == "nixl")
            late = late_agent_of(prefill)
            parts = prefill.parts
            here = WorkerAddress(parts.worker_id, prefill.address, parts.epoch)
            running = asyncio.create_task(run_order(order_for(here, decode.where), prefill.address))
            await until(lambda: late.num_waiting > 0)
            decode.process.kill()
            decode.process.wait()
            await asyncio.to_thread(late.arrive)
            with pytest.raises(FerrymanError):
                await running
            await until(lambda: not prefill.leased())
