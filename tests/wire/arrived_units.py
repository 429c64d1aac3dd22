"""A receiver of hand-offs that keeps what arrives, over whichever plane."""

from __future__ import annotations

import asyncio

from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.wire.codec.pieces import Piece, WriteHeader

RESERVATION = Reservation("res-1", 77, 2, (), 10.0)
PAGE = WantedUnit(Kind.FULL, 3, 9)
STATE = WantedUnit(Kind.RECURRENT, 200, 4)


class ArrivedUnits:
    """Keeps copies of the pieces that arrive, or refuses all of them if so set."""

    def __init__(self, refusal: FerrymanError | None = None) -> None:
        self.refusal = refusal
        self.headers: list[WriteHeader] = []
        self.content: dict[WantedUnit, bytearray] = {}
        self.finished: list[WantedUnit] = []
        self.wrote = asyncio.Event()

    def begin(self, header: WriteHeader) -> None:
        self.headers.append(header)

    def write(self, fence: WriteFence, piece: Piece) -> None:
        if self.refusal:
            raise self.refusal
        self.content.setdefault(piece.unit, bytearray()).extend(piece.content)
        self.wrote.set()

    def finish(self, fence: WriteFence, unit: WantedUnit) -> None:
        self.finished.append(unit)
