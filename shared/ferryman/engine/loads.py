"""Loads of host units into slots, as a step's prologue does them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from ferryman.engine.transfer import Transfer, arena_view
from ferryman.errors import CorruptState
from ferryman.schedule.batch import NOTHING_LOADED, Load, LoadReport


class Loaded(NamedTuple):
    """What became of the loads of a step; `corrupt` names requests whose bytes were wrong."""

    corrupt: tuple[str, ...] = ()
    report: LoadReport = NOTHING_LOADED


class HostTier:
    """The arena that loads read from; empty until one is attached."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._arena = memoryview(b"")

    def attach(self, arena: memoryview) -> None:
        """Reads from this arena from now on. Call it on the forward stream."""
        self._arena = arena

    def load(self, loads: Sequence[Load]) -> Loaded:
        """Brings every unit into its slot; says whose bytes were not the ones written."""
        if not loads:
            return Loaded()
        began, num_bytes, corrupt = perf_counter(), 0, []
        for load in loads:
            unit = load.unit
            try:
                view = arena_view(self._arena, unit.offset, unit.num_bytes)
                self._transfer.load_unit(unit.kind, load.dst, view, unit.digest)
                num_bytes += unit.num_bytes
            except CorruptState:
                corrupt.append(load.request_id)
        report = LoadReport(num_bytes, perf_counter() - began)
        return Loaded(tuple(dict.fromkeys(corrupt)), report)
