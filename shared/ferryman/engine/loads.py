"""Loads of host units into slots, as a step's prologue does them."""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.engine.transfer import Transfer, arena_view
from ferryman.errors import CorruptState
from ferryman.schedule.batch import Load


class HostTier:
    """The arena that loads read from; empty until one is attached."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._arena = memoryview(b"")

    def attach(self, arena: memoryview) -> None:
        """Reads from this arena from now on. Call it on the forward stream."""
        self._arena = arena

    def load(self, loads: Sequence[Load]) -> tuple[str, ...]:
        """Brings every unit into its slot; says whose bytes were not the ones written."""
        corrupt = []
        for load in loads:
            unit = load.unit
            try:
                view = arena_view(self._arena, unit.offset, unit.num_bytes)
                self._transfer.load_unit(unit.kind, load.dst, view, unit.digest)
            except CorruptState:
                corrupt.append(load.request_id)
        return tuple(dict.fromkeys(corrupt))
