"""WritePages: the header that fences a stream, and the pieces of units in its frames."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import WantedUnit
from ferryman.wire.codec.message_table import table, within
from ferryman.wire.codec.scalars import kind_from_wire, kind_to_wire
from ferryman.wire.v1 import decode_pb2


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """The fence of all pieces of a stream. `manifest_digest` states the layout of the units."""

    fence: WriteFence
    request_id: str
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one unit, beginning at `offset`."""

    unit: WantedUnit
    offset: int
    content: bytes


header_to_wire, header_from_wire = table(
    WriteHeader, decode_pb2.WriteHeader, fence=within(WriteFence)
)


# By hand: all bytes of a hand-off go through here.


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
