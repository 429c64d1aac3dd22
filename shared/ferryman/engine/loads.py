"""Loads of host units into slots, on the copy stream.

The loads of a step begin when it is submitted: its slots are nobody's by then, because slots come
back only behind the last step that may use them (`schedule/residence.py`). The step's launch waits
for their fence. Bytes are verified where they arrive, before any forward reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ferryman.engine.copy_side import PASSED, CopySide, Fence, HostSide
from ferryman.engine.copy_stream import AtOnce, Copies
from ferryman.engine.transfer import Transfer, arena_view
from ferryman.errors import CorruptState
from ferryman.schedule.batch import NOTHING_LOADED, Load, LoadReport


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of the loads of a step; `corrupt` names requests whose bytes were wrong."""

    corrupt: tuple[str, ...]
    num_bytes: int
    fence: Fence

    def report(self) -> LoadReport:
        """Waits for the fence."""
        seconds = self.fence.seconds()
        return LoadReport(self.num_bytes, seconds) if self.num_bytes else NOTHING_LOADED


NO_LOADS = Loaded((), 0, PASSED)
AT_ONCE = AtOnce()
ON_HOST = HostSide()


class HostTier:
    """The arena that loads read from, empty until one is attached, and the loads under way."""

    def __init__(
        self, transfer: Transfer, copies: Copies = AT_ONCE, side: CopySide = ON_HOST
    ) -> None:
        self._transfer = transfer
        self._copies = copies
        self._side = side
        self._arena = memoryview(b"")
        self._under_way: dict[int, Future[Loaded]] = {}
        self._highest = -1

    def attach(self, arena: memoryview) -> None:
        """Reads from this arena from now on; on return nobody reads from the one before."""
        self._copies.submit(lambda: self._exchange(arena)).result()

    def _exchange(self, arena: memoryview) -> None:
        self._arena = arena

    def begin(self, step_id: int, loads: Sequence[Load]) -> None:
        """Starts the loads of a step that is being submitted, once. Raises QueueFull.

        Call it from the thread that submits, before the step can be launched.
        """
        if not loads or step_id <= self._highest:
            return
        self._under_way[step_id] = self._copies.submit(lambda: self._load(loads))
        self._highest = step_id

    def arrived(self, step_id: int, loads: Sequence[Load]) -> Loaded:
        """Waits until a launch may queue its step behind the fence. Raises what a load raised.

        Loads that were not begun run now: a step that reaches its launch with loads has not had
        them (`OnceOnly`).
        """
        if not loads:
            return NO_LOADS
        under_way = self._under_way.pop(step_id, None)
        if under_way is None:
            under_way = self._copies.submit(lambda: self._load(loads))
        loaded = under_way.result()
        loaded.fence.wait()
        return loaded

    def _load(self, loads: Sequence[Load]) -> Loaded:
        with self._side.entered():
            run, num_bytes, corrupt = self._side.begin(), 0, []
            for load in loads:
                if self._try_load(load):
                    num_bytes += load.unit.num_bytes
                else:
                    corrupt.append(load.request_id)
            return Loaded(tuple(dict.fromkeys(corrupt)), num_bytes, run.end())

    def _try_load(self, load: Load) -> bool:
        """Brings a unit into its slot; False if these are not the bytes that were written."""
        unit = load.unit
        try:
            view = arena_view(self._arena, unit.offset, unit.num_bytes)
            self._transfer.load_unit(unit.kind, load.dst, view, unit.digest)
        except CorruptState:
            return False
        return True
