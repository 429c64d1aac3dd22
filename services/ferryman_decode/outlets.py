"""Where tokens leave: one stream for each router, one frame for each step.

A router that reads too slowly loses its stream, never its tokens: it opens another and says from
where on it lacks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ferryman.errors import QueueFull, Stale
from ferryman.wire.values import RequestTokens, StepFrame

MAX_WAITING_FRAMES = 1024


class Outlet:
    """One router's stream: frames wait here until the router has read them."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._sequence = 0
        self._frames: asyncio.Queue[StepFrame | Exception] = asyncio.Queue(MAX_WAITING_FRAMES + 1)
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return self._frames.qsize()

    def send(self, requests: list[RequestTokens]) -> None:
        """Never waits; a reader that is too far behind is cut off."""
        if self._is_closed:
            return
        if self._frames.qsize() >= MAX_WAITING_FRAMES:
            self.close(QueueFull(f"{MAX_WAITING_FRAMES} frames wait to be read"))
            return
        self._sequence += 1
        self._frames.put_nowait(StepFrame(self._epoch, self._sequence, tuple(requests)))

    def close(self, why: Exception) -> None:
        """Ends the stream with `why`, behind what waits already."""
        if not self._is_closed:
            self._is_closed = True
            self._frames.put_nowait(why)

    async def frames(self) -> AsyncGenerator[StepFrame, None]:
        """Until the stream is closed; then raises why."""
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Exception):
                raise frame
            yield frame


class Outlets:
    """The streams of all routers, and what the step under way has for each of them."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._open: dict[str, Outlet] = {}
        self._gathered: dict[str, list[RequestTokens]] = {}

    def open(self, router_id: str) -> Outlet:
        """A fresh stream; an older one of the same router ends."""
        if router_id in self._open:
            self._open[router_id].close(Stale("another stream of this router took over"))
        outlet = self._open[router_id] = Outlet(self._epoch)
        return outlet

    def forget(self, router_id: str, outlet: Outlet) -> None:
        """The reader is gone."""
        if self._open.get(router_id) is outlet:
            del self._open[router_id]
            self._gathered.pop(router_id, None)

    def gather(self, router_id: str, tokens: RequestTokens) -> None:
        """Belongs to the frame that `flush` sends."""
        if router_id in self._open:
            self._gathered.setdefault(router_id, []).append(tokens)

    def flush(self) -> None:
        """One frame to each router that this step has something for."""
        gathered, self._gathered = self._gathered, {}
        for router_id, requests in gathered.items():
            self._open[router_id].send(requests)

    def close(self, why: Exception) -> None:
        """The worker ends: so do all streams."""
        for outlet in self._open.values():
            outlet.close(why)
