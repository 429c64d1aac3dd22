"""Units from prefill to decode over gRPC: the data plane that works everywhere.

    sender      units as they become ready → frames of at most 1 MiB → WritePages
    receiver    frames → pieces, each checked → a sink, which fences and copies in one go

A frame holds pieces of one or many units, so that small pages do not cost a message each. What is
ready is sent at once: a frame is never held back for a unit that is still being computed.
Another data plane offers the same (`nixl_plane.py`): units in, `Sent` out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import grpc.aio
import xxhash

from ferryman.errors import CorruptState, Unavailable
from ferryman.handoff.effects import Fence
from ferryman.handoff.values import Reservation, UnitDigest, WantedUnit
from ferryman.wire.codec.pieces import Piece, WriteHeader, header_to_wire, piece_to_wire
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc

MAX_FRAME_BYTES = 1 << 20
ASK_SECONDS = 2.0
_LOST_STATUS = "Internal error from Core"

WriteCall = grpc.aio.StreamUnaryCall[decode_pb2.WritePagesRequest, decode_pb2.WritePagesResponse]


@dataclass(frozen=True, slots=True)
class OutgoingUnit:
    """A wanted unit and its bytes, which must not change until decode has answered.

    `address` is where they lie in memory that NIXL knows; 0 where it does not matter.
    """

    unit: WantedUnit
    content: memoryview
    address: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """What was written: a digest for each unit, and all their bytes. `path` is the plane's name."""

    digests: tuple[UnitDigest, ...]
    num_bytes: int
    path: str = "grpc"


async def send_units(
    stub: decode_pb2_grpc.DecodeServiceStub,
    reservation: Reservation,
    request_id: str,
    manifest_digest: str,
    batches: AsyncIterator[Sequence[OutgoingUnit]],
) -> Sent:
    """Writes units as they come, in batches that are ready; returns when decode has them all.

    Raises gRPC's errors as they are (see `status.typed_errors`), and CorruptState when decode
    counted other bytes than were sent.
    """
    fence = Fence(reservation.epoch, reservation.reservation_id, reservation.attempt)
    header = WriteHeader(fence, request_id, manifest_digest)
    ledger = _Ledger()
    call = stub.WritePages()
    try:
        answer = await _write(call, header, _frames(batches, ledger))
    except grpc.aio.AioRpcError as error:
        if error.details() != _LOST_STATUS:
            raise
        await _ask_what_became_of(stub, fence)
        raise Unavailable("the stream to decode broke") from error
    except BaseException:
        call.cancel()
        raise
    if answer.bytes_received != ledger.num_bytes:
        raise CorruptState(f"{ledger.num_bytes} bytes were sent, {answer.bytes_received} arrived")
    return Sent(tuple(ledger.digests), ledger.num_bytes)


async def _write(
    call: WriteCall,
    header: WriteHeader,
    frames: AsyncGenerator[decode_pb2.WritePagesRequest, None],
) -> decode_pb2.WritePagesResponse:
    async with aclosing(frames):
        with suppress(asyncio.InvalidStateError):  # decode has ended it; the status says why
            await call.write(decode_pb2.WritePagesRequest(header=header_to_wire(header)))
            async for frame in frames:
                await call.write(frame)
            await call.done_writing()
    return await call


async def _ask_what_became_of(stub: decode_pb2_grpc.DecodeServiceStub, fence: Fence) -> None:
    """When decode ends a stream while we write, gRPC may lose the status: a renewal repeats it."""
    request = decode_pb2.RenewRequest(
        reservation_id=fence.reservation_id, epoch=fence.epoch, attempt=fence.attempt
    )
    await stub.Renew(request, timeout=ASK_SECONDS)


@dataclass(slots=True)
class _Ledger:
    digests: list[UnitDigest] = field(default_factory=list)
    num_bytes: int = 0


async def _frames(
    batches: AsyncIterator[Sequence[OutgoingUnit]], ledger: _Ledger
) -> AsyncGenerator[decode_pb2.WritePagesRequest, None]:
    """Frames as full as they can be without waiting for the next batch."""
    async for batch in batches:
        frame, room = decode_pb2.WritePagesRequest(), MAX_FRAME_BYTES
        for unit in batch:
            hasher, content, offset = xxhash.xxh3_128(), unit.content.cast("B"), 0
            while offset < len(content):
                part = content[offset : offset + room]
                hasher.update(part)
                frame.pieces.append(piece_to_wire(Piece(unit.unit, offset, bytes(part))))
                offset, room = offset + len(part), room - len(part)
                if room == 0:
                    yield frame
                    frame, room = decode_pb2.WritePagesRequest(), MAX_FRAME_BYTES
            ledger.digests.append(UnitDigest(unit.unit.kind, unit.unit.index, hasher.digest()))
            ledger.num_bytes += len(content)
        if frame.pieces:
            yield frame
