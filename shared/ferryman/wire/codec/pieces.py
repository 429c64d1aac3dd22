"""WritePages: the header that fences a stream, and the pieces of units in its frames."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.handoff.effects import Fence
from ferryman.handoff.values import WantedUnit
from ferryman.wire.codec.scalars import kind_from_wire, kind_to_wire
from ferryman.wire.v1 import decode_pb2


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """What fences all pieces of a stream. `manifest_digest` states the layout of the units."""

    fence: Fence
    request_id: str
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one unit, from `offset` on."""

    unit: WantedUnit
    offset: int
    content: bytes


def header_to_wire(header: WriteHeader) -> decode_pb2.WriteHeader:
    return decode_pb2.WriteHeader(
        reservation_id=header.fence.reservation_id,
        epoch=header.fence.epoch,
        request_id=header.request_id,
        attempt=header.fence.attempt,
        manifest_digest=header.manifest_digest,
    )


def header_from_wire(message: decode_pb2.WriteHeader) -> WriteHeader:
    fence = Fence(message.epoch, message.reservation_id, message.attempt)
    return WriteHeader(fence, message.request_id, message.manifest_digest)


def piece_to_wire(piece: Piece) -> decode_pb2.UnitPiece:
    return decode_pb2.UnitPiece(
        kind=kind_to_wire(piece.unit.kind),
        page_index=piece.unit.index,
        generation=piece.unit.slot_generation,
        offset=piece.offset,
        data=piece.content,
    )


def piece_from_wire(message: decode_pb2.UnitPiece) -> Piece:
    kind = kind_from_wire(message.kind)
    unit = WantedUnit(kind, message.page_index, message.generation)
    return Piece(unit, message.offset, message.data)
