"""The hand-off under faults on the wire: recomputed or refused, never answered wrongly.

Each fault counts when it takes effect. Afterwards only the trees hold slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.harness.pair import WorkerPair, expected, pair_of_workers, request
from tests.planes import plane_of
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, FerrymanError, InvalidRequest, OutOfSlots, Unavailable
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import UnitDigest, UnitName
from ferryman.wire.codec.prefill import prefill_order_to_wire
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.plane_values import PlaneChoice
from ferryman.wire.v1 import decode_pb2
from ferryman.worker.handoff_transport import APART_SECONDS
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.server import DecodeServicer

PROMPT = [3] * 21
PLANES = [
    "grpc",
    "auto",
    pytest.param("nixl-unlocked", marks=pytest.mark.skipif(not has_nixl(), reason="not installed")),
]


async def nothing_is_held(pair: WorkerPair) -> None:
    await until(lambda: not pair.leased())
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.check_integrity()


async def second_attempt_succeeds(pair: WorkerPair) -> None:
    asked = request("r1", PROMPT)
    reading = asyncio.create_task(pair.read_tokens("r1", attempt=2))
    await pair.run_prefill(pair.order(asked, attempt=2))
    tokens, _ = await asyncio.wait_for(reading, 120)
    assert tokens == expected(asked)


class FlipsBitOnItsWay(DecodeServicer):
    """Bytes change on the wire, once."""

    num_flipped = 0

    async def WritePages(self, request_iterator: Any, context: Any) -> Any:
        return await super().WritePages(self._flipped(request_iterator), context)

    async def LandPages(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in super().LandPages(self._misplaced(request_iterator), context):
            yield answer

    async def _misplaced(self, frames: Any) -> AsyncIterator[decode_pb2.LandPagesRequest]:
        """The bytes are one place beside those that were lent for it."""
        async for frame in frames:
            if frame.pieces and not self.num_flipped:
                frame.pieces[0].place += 1
                self.num_flipped += 1
            yield frame

    async def _flipped(self, frames: Any) -> AsyncIterator[decode_pb2.WritePagesRequest]:
        async for frame in frames:
            if frame.pieces and not self.num_flipped:
                data = bytearray(frame.pieces[0].data)
                data[0] ^= 1
                frame.pieces[0].data = bytes(data)
                self.num_flipped += 1
            yield frame


@pytest.mark.parametrize("planes", ["grpc", "auto"])
async def test_corrupted_pages_are_recomputed_not_answered(planes: PlaneChoice) -> None:
    async with pair_of_workers(FlipsBitOnItsWay, planes=planes) as pair:
        with pytest.raises(CorruptState):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert pair.decode.service.num_flipped == 1
        await nothing_is_held(pair)
        await second_attempt_succeeds(pair)
        await nothing_is_held(pair)
        (facts,) = pair.prefill.facts("handed_off")
        assert facts["path"] == "grpc", "wrong bytes may be those of the plane alone"
        pair.prefill.clock.ahead += 2 * APART_SECONDS
        await pair.run_prefill(pair.order(request("r2", PROMPT)))
        assert pair.prefill.facts("handed_off")[-1]["path"] == plane_of(planes)


class SpoilsOneUnit(DecodeServicer):
    """The next of the wanted units in turn has other bytes, when all has landed, than were sent."""

    def __init__(self, parts: WorkerContext) -> None:
        super().__init__(parts)
        self.spoilt: list[UnitName] = []
        self.num_wanted = 0

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        fence = WriteFence(request.epoch, request.reservation_id, request.context.attempt)
        await self.receiver.verify_all(fence)
        slots = self.receiver._slots[request.reservation_id]
        (kind, index), at = list(slots.items())[len(self.spoilt)]
        transfer = self._parts.engine.transfer
        transfer.read(kind, at.slot)[0] ^= 1
        digest = UnitDigest(kind, index, transfer.digest(kind, at.slot))
        self.receiver.table.record(fence, digest, self._parts.clock())
        self.spoilt.append((kind, index))
        self.num_wanted = len(slots)
        return await super().Commit(request, context)


@pytest.mark.parametrize("planes", PLANES)
async def test_every_unit_that_was_spoilt_is_noticed(planes: PlaneChoice) -> None:
    """Row 59: each in turn, of every kind, and the last one, the recurrent state, as well."""
    async with pair_of_workers(SpoilsOneUnit, planes=planes) as pair:
        decode = pair.decode.service
        decode.num_wanted = 1
        while len(decode.spoilt) < decode.num_wanted:
            pair.prefill.clock.ahead += 2 * APART_SECONDS  # on the same plane again
            with pytest.raises(CorruptState, match="other bytes"):
                await pair.run_prefill(pair.order(request(f"r{len(decode.spoilt)}", PROMPT)))
        assert len(set(decode.spoilt)) == decode.num_wanted
        assert {kind for kind, _ in decode.spoilt} == set(Kind)
        assert decode.spoilt[-1] == (Kind.RECURRENT, len(PROMPT))
        assert not pair.decode.facts("verified")
        await nothing_is_held(pair)


class DropsTheStream(DecodeServicer):
    """The first stream of pages breaks behind its first pieces."""

    num_dropped = 0

    async def WritePages(self, request_iterator: Any, context: Any) -> Any:
        return await super().WritePages(self._cut(request_iterator), context)

    async def LandPages(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in super().LandPages(self._cut(request_iterator), context):
            yield answer

    async def _cut(self, frames: Any) -> AsyncIterator[Any]:
        async for frame in frames:
            yield frame
            if frame.pieces and not self.num_dropped:
                self.num_dropped += 1
                raise Unavailable("the stream was dropped")


@pytest.mark.parametrize("planes", ["grpc", "auto"])
async def test_a_dropped_stream_of_pages_ends_the_attempt_and_frees_both_sides(
    planes: PlaneChoice,
) -> None:
    async with pair_of_workers(DropsTheStream, planes=planes) as pair:
        with pytest.raises(Unavailable):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert pair.decode.service.num_dropped == 1
        await nothing_is_held(pair)
        await second_attempt_succeeds(pair)
        await nothing_is_held(pair)


class AnswersTwice(DecodeServicer):
    """Every Commit comes twice, as from a writer that lost the first answer."""

    answers: list[decode_pb2.CommitResponse]

    async def Commit(self, request: Any, context: Any) -> decode_pb2.CommitResponse:
        first = await super().Commit(request, context)
        second = await super().Commit(request, context)
        self.answers = [first, second]
        return second


@pytest.mark.parametrize("planes", PLANES)
async def test_a_repeated_commit_is_answered_as_the_first_and_starts_nothing_anew(
    planes: PlaneChoice,
) -> None:
    async with pair_of_workers(AnswersTwice, planes=planes) as pair:
        asked = request("r1", PROMPT)
        await pair.run_prefill(pair.order(asked))
        tokens, _ = await pair.read_tokens("r1")
        first, second = pair.decode.service.answers
        assert first == second
        assert tokens == expected(asked)
        await nothing_is_held(pair)


class RemembersDeadlines(DecodeServicer):
    """Notes how much time each Reserve says is left."""

    left: list[float]

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveResponse:
        self.left = [request.context.deadline_ms / 1000]
        return await super().Reserve(request, context)


async def test_the_time_spent_in_prefills_queue_is_taken_off_the_deadline() -> None:
    async with pair_of_workers(RemembersDeadlines) as pair:
        run_limit = pair.prefill.service._ctx.run_limit
        for _ in range(4):
            await run_limit.acquire()
        running = asyncio.create_task(
            pair.run_prefill(pair.order(request("r1", PROMPT), deadline=30.0))
        )
        await until(lambda: pair.prefill.service.load().num_queued == 1)
        pair.prefill.clock.ahead = 7.0
        for _ in range(4):
            run_limit.release()
        await running
        assert pair.decode.service.left[0] <= 23.0


@pytest.mark.parametrize("planes", PLANES)
async def test_a_hand_off_goes_by_the_plane_that_was_chosen(planes: PlaneChoice) -> None:
    async with pair_of_workers(planes=planes) as pair:
        for name, prompt in (("r1", PROMPT), ("r2", [*PROMPT, 7, 7, 7, 7])):
            asked = request(name, prompt)
            await pair.run_prefill(pair.order(asked))
            assert pair.prefill.facts("handed_off")[-1]["path"] == plane_of(planes)
            tokens, _ = await pair.read_tokens(name)
            assert tokens == expected(asked)
        await nothing_is_held(pair)


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("phase", ["computing", "sending"])
async def test_a_cancelled_prefill_gives_everything_back(phase: str, planes: PlaneChoice) -> None:
    async with pair_of_workers(planes=planes) as pair:
        if phase == "computing":
            pair.prefill.hold()
        running = asyncio.create_task(pair.run_prefill(pair.order(request("r1", PROMPT))))
        roles = {"request"} if phase == "computing" else {"transfer_out"}
        await until(lambda: roles <= pair.prefill.leased() or running.done())
        running.cancel()
        await asyncio.wait([running])
        pair.prefill.go_on()
        await until(lambda: pair.prefill.service.load().num_queued == 0)
        if phase == "computing":
            await nothing_is_held(pair)


async def test_a_full_decode_worker_costs_prefill_nothing() -> None:
    async with pair_of_workers(num_slots=14) as pair:
        for index in range(2):
            await pair.reserve(pair.wish(request(f"held{index}", [index] * 21)))
        with pytest.raises(OutOfSlots):
            await pair.run_prefill(pair.order(request("r1", PROMPT)))
        assert not pair.prefill.leased()


async def test_a_token_id_beyond_the_vocabulary_is_refused_at_the_door() -> None:
    async with pair_of_workers() as pair:
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await pair.run_prefill(pair.order(request("r1", [1, 5000, 1])))
        await pair.run_prefill(pair.order(request("r2", PROMPT)))


async def test_a_stale_epoch_of_decode_ends_the_attempt() -> None:
    async with pair_of_workers() as pair:
        order = pair.order(request("r1", PROMPT))
        gone = replace(order.decode, epoch=order.decode.epoch + 1)
        with pytest.raises(FerrymanError, match="epoch"):
            await pair.run_prefill(replace(order, decode=gone))
        await nothing_is_held(pair)


async def test_an_attempt_cancelled_twice_is_forgotten_all_the_same() -> None:
    async with pair_of_workers() as pair:
        pair.prefill.hold()
        service = pair.prefill.service
        call = service.Prefill(prefill_order_to_wire(pair.order(request("r1", PROMPT))), None)

        async def read() -> None:
            async for _ in call:
                pass

        reading = asyncio.create_task(read())
        await until(lambda: "request" in pair.prefill.leased())
        reading.cancel()
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await call.aclose()
        pair.prefill.go_on()
        async with asyncio.timeout(120):
            await service.drain()
        await nothing_is_held(pair)
