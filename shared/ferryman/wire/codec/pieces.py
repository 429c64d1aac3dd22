"""WritePages and LandPages: the header that fences a stream, and the pieces in its frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
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
    content: bytes | memoryview


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
        data=bytes(piece.content),
    )


def piece_from_wire(message: decode_pb2.UnitPiece) -> Piece:
    kind = kind_from_wire(message.kind)
    unit = WantedUnit(kind, message.page_index, message.generation)
    return Piece(unit, message.offset, message.data)


@dataclass(slots=True)
class LandedRun:
    """Whole units of one kind with consecutive indices, or a part of one unit, at a `place` of lent
    memory; `generations` has one entry per unit."""

    kind: Kind
    first: int
    generations: list[int]
    offset: int
    place: int
    num_bytes: int


def run_to_wire(run: LandedRun) -> decode_pb2.LandedPiece:
    return decode_pb2.LandedPiece(
        kind=kind_to_wire(run.kind),
        page_index=run.first,
        generations=run.generations,
        offset=run.offset,
        place=run.place,
        num_bytes=run.num_bytes,
    )


def pieces_from_wire(
    message: decode_pb2.LandedPiece, memory: memoryview, unit_bytes: Mapping[Kind, int]
) -> Iterator[Piece]:
    """The pieces of a run, as views of `memory`. Raises InvalidRequest for a run that lies outside,
    or whose units are not whole: so a frame has no more units than its bytes fill."""
    kind, num_units = kind_from_wire(message.kind), len(message.generations)
    place, end = message.place, message.place + message.num_bytes
    if end > len(memory):
        raise InvalidRequest(f"[{place}, {end}) is no part of {len(memory)} lent bytes", "place")
    size = message.num_bytes if num_units == 1 else unit_bytes.get(kind, 0)
    is_whole = num_units == 1 or (size and not message.offset)
    if not num_units or not is_whole or num_units * size != message.num_bytes:
        text = f"{message.num_bytes} bytes at {message.offset} are not {num_units} whole units"
        raise InvalidRequest(f"{text} of {size} bytes", "generations")
    for nth, generation in enumerate(message.generations):
        unit = WantedUnit(kind, message.page_index + nth, generation)
        begin = place + nth * size
        yield Piece(unit, message.offset, memory[begin : begin + size])
