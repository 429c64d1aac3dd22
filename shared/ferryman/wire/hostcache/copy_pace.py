"""The pace of copies from a worker's slots to the host tier, between steps that draw tokens.

On a processor copies and steps share the cores, and a step waits for its slowest thread. A whole
prompt copied beside one step would double the gap between two tokens of every stream. So a copy
takes a piece after each such step. It takes no breaks while only prompts are computed, or nothing.
Workers of one role, and those on a card, never bind it: prompts are copied where no tokens are
drawn, or not on the cores that draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

LEAST_BYTES = 1 << 20
"""A piece has at least so many bytes: 0.4 to 0.6 ms on two cores, where the memory is touched for
the first time, and a step of the smallest models takes 10."""

SPREAD_STEPS = 16
"""All that waits is copied in so many steps, so a backlog does not grow however many streams there
are: after each step a sixteenth of the most that waited, or LEAST_BYTES."""

RUN_BYTES = 4 << 20
"""The longest run without a look whether a step draws tokens: 2 ms."""


class CopyPace(Protocol):
    """Decides when units may be copied."""

    async def next_run(self, sizes: Sequence[int], first: int) -> int:
        """Waits until units may be copied, and returns how many from unit `first` on: at least one.
        `sizes` are the bytes of all."""
        ...


class AllAtOnce:
    """All units in one run."""

    async def next_run(self, sizes: Sequence[int], first: int) -> int:
        return len(sizes) - first


ALL_AT_ONCE: CopyPace = AllAtOnce()


class StepPace:
    """Gives room for copies, step by step. Used from one event loop."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self._least_bytes = self._piece = least_bytes
        self._has_drawn = self._is_bound = False
        self._num_hurried = 0
        self._room = 0  # what the last piece had too much counts against the next
        self._left_bytes = 0  # of the copy that is under way
        self._changed = asyncio.Event()

    @property
    def is_bound(self) -> bool:
        """Whether a copy waits for steps."""
        return self._is_bound and not self._num_hurried

    def stepped(self, num_ended: int, waiting_bytes: int, *, is_drawing: bool) -> None:
        """So many steps that draw tokens have ended, and now one runs, or none. `waiting_bytes`
        are those of copies that have not begun."""
        self._has_drawn |= is_drawing
        if not is_drawing:
            self._is_bound = False
        elif not self._is_bound:
            self._is_bound, self._room = True, 0
        elif num_ended:
            self._piece = self._piece_of(waiting_bytes + self._left_bytes)
            self._room = min(self._room, 0) + num_ended * self._piece
        self._changed.set()

    def _piece_of(self, num_bytes: int) -> int:
        """The bytes after a step. They do not shrink with what is left, which would never end."""
        if not num_bytes:
            return self._least_bytes
        return max(self._piece, -(-num_bytes // SPREAD_STEPS))

    def begin(self) -> None:
        """Copies begin after a while without any: the first piece comes after a step from now on,
        not beside the first token, with which comes much other work."""
        self._room, self._left_bytes = min(self._room, 0), 0

    def hurry(self) -> None:
        """Copies wait for no step from now on: the process ends."""
        self._num_hurried += 1
        self._changed.set()

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Copies wait for no step within the block: somebody waits for them."""
        self._num_hurried += 1
        self._changed.set()
        try:
            yield
        finally:
            self._num_hurried -= 1

    async def turn(self) -> None:
        """Waits for the next piece."""
        while self.is_bound and self._room <= 0:
            self._changed.clear()
            await self._changed.wait()

    async def next_run(self, sizes: Sequence[int], first: int) -> int:
        """Waits until units may be copied, and returns how many from unit `first` on: at least one.
        A unit is never cut: a step of one stream reads and writes more."""
        if not self._has_drawn:
            return len(sizes) - first
        if not first:
            self._left_bytes = sum(sizes)
        await self.turn()
        room, end = self._room if self.is_bound else RUN_BYTES, first
        while end < len(sizes) and room > 0:
            room -= sizes[end]
            self._left_bytes -= sizes[end]
            end += 1
        if self.is_bound:
            self._room = room
        return end - first
