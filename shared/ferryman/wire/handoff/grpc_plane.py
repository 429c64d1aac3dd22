"""Units from prefill to decode over gRPC: the data plane that works everywhere.

    sender      units as they become ready → frames of at most 1 MiB → WritePages
    receiver    frames → pieces, each checked → a sink, which fences and copies in one go

A frame holds pieces of one or many units, so that small pages do not cost a message each. A frame
is sent at once and never held back for a unit that is still being computed. The other data planes
(`memory_plane.py`, `nixl_writer.py`) have the same interface: units in, `Sent` out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc.aio

from ferryman.cache.manifest import Kind
from ferryman.cancellation import finished_in_thread
from ferryman.errors import CorruptState, InvalidRequest, Unreachable
from ferryman.handoff.effects import WriteFence, fence_of
from ferryman.handoff.values import Reservation, UnitDigest, UnitName, WantedUnit
from ferryman.wire.codec.pieces import (
    Piece,
    WriteHeader,
    header_from_wire,
    header_to_wire,
    piece_from_wire,
    piece_to_wire,
)
from ferryman.wire.handoff.outgoing_units import (
    AnyUnit,
    UnitCut,
    UnitDigests,
    frames_of,
    must_copy,
    read_cuts,
)
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc

MAX_FRAME_BYTES = 1 << 20
ASK_SECONDS = 2.0
LOST_STATUS = "Internal error from Core"

WriteCall = grpc.aio.StreamUnaryCall[decode_pb2.WritePagesRequest, decode_pb2.WritePagesResponse]


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a send: a digest for each unit, and their bytes. `path` is the plane's name."""

    digests: tuple[UnitDigest, ...]
    num_bytes: int
    path: str = "grpc"


async def send_units(
    stub: decode_pb2_grpc.DecodeServiceStub,
    reservation: Reservation,
    request_id: str,
    manifest_digest: str,
    batches: AsyncIterator[Sequence[AnyUnit]],
) -> Sent:
    """Writes units as they come, batch by batch; returns when decode has them all.

    Raises gRPC's errors as they are (see `status.typed_errors`), and CorruptState when decode
    counted another number of bytes.
    """
    fence = fence_of(reservation)
    header = WriteHeader(fence, request_id, manifest_digest)
    ledger = _Ledger()
    call = stub.WritePages()
    try:
        answer = await _write(call, header, _frames(batches, ledger))
    except grpc.aio.AioRpcError as error:
        if error.details() != LOST_STATUS:
            raise
        await ask_what_became_of(stub, fence)
        raise Unreachable("the stream to decode broke") from error
    except BaseException:
        call.cancel()
        raise
    if answer.bytes_received != ledger.num_bytes:
        raise CorruptState(f"{ledger.num_bytes} bytes were sent, {answer.bytes_received} arrived")
    return Sent(tuple(ledger.hashers.digests), ledger.num_bytes)


async def _write(
    call: WriteCall,
    header: WriteHeader,
    frames: AsyncGenerator[decode_pb2.WritePagesRequest, None],
) -> decode_pb2.WritePagesResponse:
    async with aclosing(frames):
        with suppress(asyncio.InvalidStateError):  # decode has ended it; the status has the reason
            await call.write(decode_pb2.WritePagesRequest(header=header_to_wire(header)))
            async for frame in frames:
                await call.write(frame)
            await call.done_writing()
    return await call


async def ask_what_became_of(stub: decode_pb2_grpc.DecodeServiceStub, fence: WriteFence) -> None:
    """Asks decode why it ended a stream: a write that fails meanwhile makes gRPC lose that status
    (https://github.com/grpc/grpc/issues/36066), and a renewal repeats it."""
    request = decode_pb2.RenewRequest(
        reservation_id=fence.reservation_id, epoch=fence.epoch, attempt=fence.attempt
    )
    await stub.Renew(request, timeout=ASK_SECONDS)


@dataclass(slots=True)
class _Ledger:
    hashers: UnitDigests = field(default_factory=UnitDigests)
    num_bytes: int = 0


async def _frames(
    batches: AsyncIterator[Sequence[AnyUnit]], ledger: _Ledger
) -> AsyncGenerator[decode_pb2.WritePagesRequest, None]:
    """Slots that are read by copying are read in a thread, one frame at a time."""
    async for batch in batches:
        for cuts in frames_of(batch, MAX_FRAME_BYTES):
            frame = decode_pb2.WritePagesRequest()
            filling = partial(_fill, frame, cuts, ledger)
            if must_copy(cuts):
                await finished_in_thread(filling)
            else:
                filling()
            yield frame


def _fill(frame: decode_pb2.WritePagesRequest, cuts: Sequence[UnitCut], ledger: _Ledger) -> None:
    def take(cut: UnitCut, offset: int, content: memoryview) -> None:
        ledger.hashers.add(cut, offset, content)
        ledger.num_bytes += len(content)
        piece = Piece(cut.unit.unit, cut.offset + offset, content)
        frame.pieces.append(piece_to_wire(piece))

    read_cuts(cuts, take)


class PageSink(Protocol):
    """Takes pieces. Each call is made in one tick of the loop; an error of it ends the stream."""

    def begin(self, header: WriteHeader) -> None:
        """Takes the writer's identity; raises if the writer may not write."""
        ...

    def write(self, fence: WriteFence, piece: Piece) -> None:
        """Checks the fence, then copies the piece or skips one that is not wanted."""
        ...

    def finish(self, fence: WriteFence, unit: WantedUnit) -> None:
        """All bytes of the unit have been written: records their digest."""
        ...


async def receive_pages(
    requests: AsyncIterator[decode_pb2.WritePagesRequest],
    unit_bytes: Mapping[Kind, int],
    sink: PageSink,
) -> int:
    """Passes a WritePages stream to the sink, piece by piece; returns its size in bytes.

    InvalidRequest: no header, a header in the middle, a frame too large, a piece outside its unit,
    a gap, or a unit that is not finished when the stream ends.
    """
    assembly = Assembly(unit_bytes)
    header: WriteHeader | None = None
    async for request in requests:
        if request.HasField("header") is not (header is None):
            raise InvalidRequest("the header is in the first frame and in no other", "header")
        if header is None:
            header = header_from_wire(request.header)
            sink.begin(header)
        room = MAX_FRAME_BYTES
        for message in request.pieces:
            piece = piece_from_wire(message)
            room -= len(piece.content)
            if room < 0:
                raise InvalidRequest(f"a frame has at most {MAX_FRAME_BYTES} bytes", "pieces")
            is_last = assembly.accept(piece)
            sink.write(header.fence, piece)
            if is_last:
                sink.finish(header.fence, piece.unit)
    if header is None:
        raise InvalidRequest("the stream has no header", "header")
    return assembly.finish()


class Assembly:
    """Counts how much of each unit has come. Pure: it holds no bytes."""

    def __init__(self, unit_bytes: Mapping[Kind, int]) -> None:
        self._unit_bytes = unit_bytes
        self._open: dict[UnitName, int] = {}
        self._num_bytes = 0

    def accept(self, piece: Piece) -> bool:
        """Whether this piece completes its unit; InvalidRequest when it does not follow the last
        one."""
        name, size = piece.unit.name, self._unit_bytes.get(piece.unit.kind, 0)
        expected, end = self._open.get(name, 0), piece.offset + len(piece.content)
        if piece.offset != expected:
            raise InvalidRequest(
                f"{name[0]} unit {name[1]} goes on at {expected}, not {piece.offset}", "offset"
            )
        if not piece.content or end > size:
            raise InvalidRequest(
                f"[{piece.offset}, {end}) is no part of {name[0]} unit {name[1]} of {size} bytes",
                "data",
            )
        self._num_bytes += len(piece.content)
        if end < size:
            self._open[name] = end
            return False
        self._open.pop(name, None)
        return True

    @property
    def num_bytes(self) -> int:
        """All bytes that came so far, wanted or not."""
        return self._num_bytes

    def finish(self) -> int:
        """All bytes that came, wanted or not. Raises InvalidRequest when a unit is incomplete."""
        for kind, index in self._open:
            raise InvalidRequest(f"{kind} unit {index} is not complete", "pieces")
        return self._num_bytes
