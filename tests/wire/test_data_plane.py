"""Units arrive over a real loopback stream as they were sent, and nothing odd gets through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.arrived_units import PAGE, RESERVATION, STATE, ArrivedUnits

from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState, InvalidRequest, LeaseLost
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import WantedUnit
from ferryman.wire.codec.pieces import Piece, WriteHeader, header_to_wire
from ferryman.wire.grpc.rpc import Context, channel, listening
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff import grpc_plane as data_plane
from ferryman.wire.handoff.grpc_plane import (
    MAX_FRAME_BYTES,
    Assembly,
    Sent,
    receive_pages,
    send_units,
)
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, types_pb2

SIZES = {Kind.FULL: 3000, Kind.RECURRENT: 2 * MAX_FRAME_BYTES + 5}


class ReceivingDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker that only receives, and may miscount."""

    def __init__(self, sink: ArrivedUnits, miscount: int = 0) -> None:
        self.sink, self.refusal, self.miscount = sink, sink.refusal, miscount

    async def Renew(
        self, request: decode_pb2.RenewRequest, context: Context
    ) -> decode_pb2.RenewResponse:
        if self.refusal:
            raise self.refusal
        return decode_pb2.RenewResponse(lease_ms=1000)

    async def WritePages(
        self, requests: AsyncIterator[decode_pb2.WritePagesRequest], context: Context
    ) -> decode_pb2.WritePagesResponse:
        num_bytes = await receive_pages(requests, SIZES, self.sink)
        return decode_pb2.WritePagesResponse(bytes_received=num_bytes + self.miscount)


@asynccontextmanager
async def connected(decode: ReceivingDecode) -> AsyncIterator[decode_pb2_grpc.DecodeServiceStub]:
    def register(server: object) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)

    async with listening("127.0.0.1:0", register, grace=0) as server:
        async with channel(f"127.0.0.1:{server.port}") as connection:
            yield decode_pb2_grpc.DecodeServiceStub(connection)


def filled(unit: WantedUnit) -> OutgoingUnit:
    size = SIZES[unit.kind]
    pattern = bytes((unit.index + place) % 251 for place in range(251))
    return OutgoingUnit(unit, memoryview((pattern * (size // 251 + 1))[:size]))


async def each(units: Iterable[OutgoingUnit]) -> AsyncIterator[Sequence[OutgoingUnit]]:
    """All of them are ready at once."""
    yield tuple(units)


async def send(
    stub: decode_pb2_grpc.DecodeServiceStub, units: AsyncIterator[Sequence[OutgoingUnit]]
) -> Sent:
    with typed_errors():
        return await send_units(stub, RESERVATION, "req-1", "digest", units)


async def test_units_arrive_byte_for_byte_with_their_digests() -> None:
    units = [filled(WantedUnit(Kind.FULL, page, page + 1)) for page in range(900)] + [filled(STATE)]
    sink = ArrivedUnits()
    async with connected(ReceivingDecode(sink)) as stub:
        sent = await send(stub, each(units))
    assert sink.headers == [WriteHeader(WriteFence(77, "res-1", 2), "req-1", "digest")]
    assert sink.finished == [unit.unit for unit in units]
    for unit, digest in zip(units, sent.digests, strict=True):
        assert sink.content[unit.unit] == unit.content
        assert digest.name == unit.unit.name
        assert digest.digest == xxhash.xxh3_128_digest(unit.content)
    assert sent.num_bytes == sum(len(unit.content) for unit in units)


async def test_a_ready_unit_does_not_wait_for_the_next() -> None:
    sink = ArrivedUnits()

    async def slowly() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        await sink.wrote.wait()
        yield [filled(STATE)]

    async with connected(ReceivingDecode(sink)) as stub:
        sent = await send(stub, slowly())
    assert [digest.name for digest in sent.digests] == [PAGE.name, STATE.name]


async def test_small_units_share_a_frame_and_large_ones_take_several() -> None:
    ledger = data_plane._Ledger()
    units = [filled(WantedUnit(Kind.FULL, page, 1)) for page in range(100)] + [filled(STATE)]
    frames = [frame async for frame in data_plane._frames(each(units), ledger)]
    sizes = [sum(len(piece.data) for piece in frame.pieces) for frame in frames]
    assert max(sizes) <= MAX_FRAME_BYTES
    assert len(frames) == 3
    assert sum(sizes) == ledger.num_bytes


async def test_a_refusal_in_the_middle_reaches_the_sender() -> None:
    async def many() -> AsyncIterator[Sequence[OutgoingUnit]]:
        while True:
            yield [filled(STATE)]

    async with connected(ReceivingDecode(ArrivedUnits(LeaseLost("too late")))) as stub:
        with pytest.raises(LeaseLost, match="too late"):
            await send(stub, many())


async def test_a_sender_that_fails_ends_the_stream_at_decode() -> None:
    async def failing() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        raise InvalidRequest("the prompt is gone")

    async with connected(ReceivingDecode(ArrivedUnits())) as stub:
        with pytest.raises(InvalidRequest, match="the prompt is gone"):
            await send(stub, failing())


async def test_a_cancelled_sender_leaves_nothing_behind() -> None:
    sink = ArrivedUnits()

    async def waiting() -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield [filled(PAGE)]
        await asyncio.Event().wait()

    async with connected(ReceivingDecode(sink)) as stub:
        sending = asyncio.ensure_future(send(stub, waiting()))
        await sink.wrote.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def test_bytes_that_got_lost_are_noticed() -> None:
    async with connected(ReceivingDecode(ArrivedUnits(), miscount=-1)) as stub:
        with pytest.raises(CorruptState, match="bytes were sent"):
            await send(stub, each([filled(PAGE)]))


def piece(offset: int, size: int, unit: WantedUnit = PAGE) -> decode_pb2.UnitPiece:
    return decode_pb2.UnitPiece(
        kind=types_pb2.KIND_FULL,
        page_index=unit.index,
        generation=unit.slot_generation,
        offset=offset,
        data=bytes(size),
    )


HEADER = header_to_wire(WriteHeader(WriteFence(77, "res-1", 2), "req-1", "digest"))


def frame(*pieces: decode_pb2.UnitPiece, with_header: bool = False) -> decode_pb2.WritePagesRequest:
    header = HEADER if with_header else None
    return decode_pb2.WritePagesRequest(header=header, pieces=pieces)


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        pytest.param([], "no header", id="an empty stream"),
        pytest.param([frame(piece(0, 3))], "header is in the first", id="no header"),
        pytest.param([frame(with_header=True)] * 2, "in no other", id="two headers"),
        pytest.param([frame(piece(5, 3), with_header=True)], "goes on at 0", id="a gap"),
        pytest.param([frame(piece(0, 3001), with_header=True)], "no part of", id="too long"),
        pytest.param([frame(piece(0, 0), with_header=True)], "no part of", id="empty"),
        pytest.param([frame(piece(0, 2999), with_header=True)], "not complete", id="too short"),
        pytest.param(
            [frame(piece(0, MAX_FRAME_BYTES + 1), with_header=True)], "at most", id="a huge frame"
        ),
    ],
)
async def test_an_odd_stream_is_refused(
    frames: list[decode_pb2.WritePagesRequest], complaint: str
) -> None:
    async def requests() -> AsyncIterator[decode_pb2.WritePagesRequest]:
        for each_frame in frames:
            yield each_frame

    with pytest.raises(InvalidRequest, match=complaint):
        await receive_pages(requests(), SIZES, ArrivedUnits())


def test_a_kind_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no part of window unit"):
        Assembly(SIZES).accept(Piece(WantedUnit(Kind.WINDOW, 0, 1), 0, b"x"))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_any_interleaving_of_ordered_pieces_completes_every_unit(
    cuts: list[int], data: st.DataObject
) -> None:
    size = sum(cuts)
    assembly = Assembly({Kind.FULL: size})
    waiting = {page: list(cuts) for page in range(3)}
    done = 0
    while waiting:
        page = data.draw(st.sampled_from(sorted(waiting)))
        offset, length = size - sum(waiting[page]), waiting[page].pop(0)
        unit = WantedUnit(Kind.FULL, page, 1)
        done += assembly.accept(Piece(unit, offset, bytes(length)))
        if not waiting[page]:
            del waiting[page]
    assert done == 3
    assert assembly.finish() == 3 * size
