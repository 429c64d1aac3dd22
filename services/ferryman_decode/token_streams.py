"""Sends tokens to routers: one stream for each router, one frame for each step.

A router that reads too slowly loses its stream, never its tokens: it opens another one and names
the offset from which it lacks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ferryman.errors import QueueFull, Stale
from ferryman.wire.codec.tokens import request_tokens_to_wire
from ferryman.wire.v1.decode_pb2 import RequestTokens as WireTokens
from ferryman.wire.v1.decode_pb2 import TokensResponse
from ferryman.wire.values import RequestTokens

MAX_WAITING_FRAMES = 1024
# A router that loses this worker goes on elsewhere after two seconds; one that was stopped for a
# while, and comes back within this time, finds its requests as they were.
ORPHAN_SECONDS = 30.0


class RouterStream:
    """One router's stream: frames wait here, as messages, until the router has read them."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._sequence = 0
        self._frames: asyncio.Queue[TokensResponse | Exception] = asyncio.Queue(
            MAX_WAITING_FRAMES + 1
        )
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return self._frames.qsize()

    def send(self, requests: list[WireTokens]) -> None:
        """Never waits; a reader that is too far behind loses its stream."""
        if self._is_closed:
            return
        if self._frames.qsize() >= MAX_WAITING_FRAMES:
            self.close(QueueFull(f"{MAX_WAITING_FRAMES} frames wait to be read"))
            return
        self._sequence += 1
        self._frames.put_nowait(
            TokensResponse(epoch=self._epoch, sequence=self._sequence, requests=requests)
        )

    def close(self, why: Exception) -> None:
        """Ends the stream with the error `why`, after the frames that wait already."""
        if not self._is_closed:
            self._is_closed = True
            self._frames.put_nowait(why)

    async def next_frame(self) -> TokensResponse:
        """Waits for a frame; raises the stream's closing error after all frames before it are
        read."""
        frame = await self._frames.get()
        if isinstance(frame, Exception):
            raise frame
        return frame


class RouterStreams:
    """The streams of all routers, and their tokens of the current step."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._open: dict[str, RouterStream] = {}
        self._gathered: dict[str, list[WireTokens]] = {}

    def open(self, router_id: str) -> RouterStream:
        """Opens a new stream; an older one of the same router ends."""
        if router_id in self._open:
            self._open[router_id].close(Stale("another stream of this router took over"))
        outlet = self._open[router_id] = RouterStream(self._epoch)
        return outlet

    def forget(self, router_id: str, outlet: RouterStream) -> None:
        """Removes the stream of a reader that is gone."""
        if self._open.get(router_id) is outlet:
            del self._open[router_id]
            self._gathered.pop(router_id, None)

    def is_open(self, router_id: str) -> bool:
        """Whether this router reads its tokens."""
        return router_id in self._open

    def gather(self, router_id: str, tokens: RequestTokens) -> None:
        """Adds tokens to the frame that `flush` sends."""
        if router_id in self._open:
            # Converted here, so that an error in one request ends that request and not the whole
            # frame.
            self._gathered.setdefault(router_id, []).append(request_tokens_to_wire(tokens))

    def flush(self) -> None:
        """Sends one frame to each router that has tokens in this step."""
        gathered, self._gathered = self._gathered, {}
        for router_id, requests in gathered.items():
            self._open[router_id].send(requests)

    def close(self, why: Exception) -> None:
        """Ends all streams, because the worker ends."""
        for outlet in self._open.values():
            outlet.close(why)


class OrphanWatch:
    """Since when each router that has requests here has had no stream for their tokens. A router
    that is gone does not come back to end them."""

    def __init__(self, has_stream: Callable[[str], bool]) -> None:
        self._has_stream = has_stream
        self._silent_since: dict[str, float] = {}

    def gone(self, routers: Iterable[str], now: float) -> frozenset[str]:
        """Those of the routers of all requests that have had no stream for ORPHAN_SECONDS."""
        silent = {one for one in routers if not self._has_stream(one)}
        self._silent_since = {one: self._silent_since.get(one, now) for one in silent}
        since = self._silent_since.items()
        return frozenset(one for one, begun in since if now - begun >= ORPHAN_SECONDS)
