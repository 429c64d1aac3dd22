"""The receiving end of the data plane: frames in, pieces in their places out, to a sink."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.handoff.values import UnitName, WantedUnit
from ferryman.wire.codec.pieces import Piece, WriteHeader, header_from_wire, piece_from_wire
from ferryman.wire.data_plane import MAX_FRAME_BYTES
from ferryman.wire.v1 import decode_pb2


class PageSink(Protocol):
    """Where pieces go. A call is made in one tick of the loop; what it raises ends the stream."""

    def begin(self, header: WriteHeader) -> None:
        """The writer says who it is; raise what keeps it from writing."""
        ...

    def write(self, piece: Piece) -> None:
        """Check the fence and copy, or skip what nobody wants."""
        ...

    def finish(self, unit: WantedUnit) -> None:
        """All bytes of the unit have been written: note their digest."""
        ...


@dataclass(frozen=True, slots=True)
class Received:
    """What a stream brought, wanted or not."""

    num_bytes: int
    num_units: int


async def receive_pages(
    requests: AsyncIterator[decode_pb2.WritePagesRequest],
    unit_bytes: Mapping[Kind, int],
    sink: PageSink,
) -> Received:
    """Feeds a WritePages stream to the sink, piece by piece, each in its place.

    InvalidRequest: no header, a header in the middle, a frame too large, a piece outside its unit,
    a gap, or a unit that is not finished when the stream ends.
    """
    assembly = Assembly(unit_bytes)
    is_first = True
    async for request in requests:
        if request.HasField("header") is not is_first:
            raise InvalidRequest("the header is in the first frame and in no other", "header")
        if is_first:
            sink.begin(header_from_wire(request.header))
            is_first = False
        room = MAX_FRAME_BYTES
        for message in request.pieces:
            piece = piece_from_wire(message)
            room -= len(piece.content)
            if room < 0:
                raise InvalidRequest(f"a frame has at most {MAX_FRAME_BYTES} bytes", "pieces")
            is_last = assembly.accept(piece)
            sink.write(piece)
            if is_last:
                sink.finish(piece.unit)
    if is_first:
        raise InvalidRequest("the stream has no header", "header")
    return assembly.received()


class Assembly:
    """How much of each unit has come. Pure: it holds no bytes."""

    def __init__(self, unit_bytes: Mapping[Kind, int]) -> None:
        self._unit_bytes = unit_bytes
        self._open: dict[UnitName, int] = {}
        self._num_bytes, self._num_units = 0, 0

    def accept(self, piece: Piece) -> bool:
        """Whether the unit is complete with this piece; InvalidRequest when it does not follow."""
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
        self._num_units += 1
        return True

    def received(self) -> Received:
        """All that came, when no unit is left half done."""
        for kind, index in self._open:
            raise InvalidRequest(f"{kind} unit {index} is not complete", "pieces")
        return Received(self._num_bytes, self._num_units)
