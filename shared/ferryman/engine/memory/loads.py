"""Loads of host units into slots, on the copy stream.

The loads of a step begin when it is submitted, those of a reservation when it is made. No earlier
step uses their slots by then, because slots are given back only after the last step that may use
them (`schedule/slot_allocator.py`). The step's launch waits for their fence; a reservation is
committed, or freed, after their end. Bytes are verified where they arrive, before any forward reads
them.

vLLM says onload, SGLang load back.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ferryman.engine.memory.copy_stream import PASSED, AtOnce, Copies, CopyFence, CopySide, HostSide
from ferryman.engine.memory.transfer import Transfer, arena_view
from ferryman.errors import CorruptState
from ferryman.schedule.batch import NOTHING_LOADED, LoadReport, SlotLoad


@dataclass(frozen=True, slots=True)
class LoadedUnits:
    """The result of a step's loads; `corrupt` names requests whose bytes were wrong."""

    corrupt: tuple[str, ...]
    num_bytes: int
    fence: CopyFence

    def report(self) -> LoadReport:
        """Waits for the fence."""
        seconds = self.fence.seconds()
        return LoadReport(self.num_bytes, seconds) if self.num_bytes else NOTHING_LOADED


NO_LOADS = LoadedUnits((), 0, PASSED)
AT_ONCE = AtOnce()
ON_HOST = HostSide()


class LoadQueue:
    """The arena that loads read from, empty until one is attached, and the loads that are
    running."""

    def __init__(
        self, transfer: Transfer, copies: Copies = AT_ONCE, side: CopySide = ON_HOST
    ) -> None:
        self._transfer = transfer
        self._copies = copies
        self._side = side
        self._arena = memoryview(b"")
        self._under_way: dict[int, Future[LoadedUnits]] = {}
        self._highest = -1

    def attach(self, arena: memoryview) -> None:
        """Reads from this arena from now on; on return no load reads from the one before."""
        self._copies.submit(lambda: self._exchange(arena)).result()

    def detach(self) -> None:
        """Releases the arena, when the copies have ended for good."""
        self._exchange(memoryview(b""))

    def _exchange(self, arena: memoryview) -> None:
        self._arena = arena

    def begin(self, step_id: int, loads: Sequence[SlotLoad]) -> None:
        """Starts the loads of a step that is being submitted, once. Raises QueueFull.

        Call it from the thread that submits, before the step can be launched.
        """
        if not loads or step_id <= self._highest:
            return
        self._under_way[step_id] = self._copies.submit(lambda: self._load(loads))
        self._highest = step_id

    def arrived(self, step_id: int, loads: Sequence[SlotLoad]) -> LoadedUnits:
        """Waits until a launch may queue its step after the fence. Raises the error of a load.

        Loads that were not begun run now: `OnceOnly` leaves loads only in a plan that runs for the
        first time.
        """
        if not loads:
            return NO_LOADS
        under_way = self._under_way.pop(step_id, None)
        if under_way is None:
            under_way = self._copies.submit(lambda: self._load(loads))
        loaded = under_way.result()
        loaded.fence.wait()
        return loaded

    def load(self, loads: Sequence[SlotLoad]) -> Future[LoadedUnits]:
        """Loads outside a step, into slots that no step names before the future has ended; its
        copies have ended then. Raises QueueFull, StreamClosed."""
        return self._copies.submit(lambda: self._load_to_end(loads))

    def _load_to_end(self, loads: Sequence[SlotLoad]) -> LoadedUnits:
        loaded = self._load(loads)
        loaded.fence.finish()
        return loaded

    def _load(self, loads: Sequence[SlotLoad]) -> LoadedUnits:
        with self._side.entered():
            run, num_bytes, corrupt = self._side.begin(), 0, []
            for load in loads:
                if self._try_load(load):
                    num_bytes += load.unit.num_bytes
                else:
                    corrupt.append(load.request_id)
            return LoadedUnits(tuple(dict.fromkeys(corrupt)), num_bytes, run.end())

    def _try_load(self, load: SlotLoad) -> bool:
        """Brings a unit into its slot; False if its bytes differ from those written."""
        unit = load.unit
        try:
            view = arena_view(self._arena, unit.offset, unit.num_bytes)
            self._transfer.load_unit(unit.kind, load.dst, view, unit.digest)
        except CorruptState:
            return False
        return True
