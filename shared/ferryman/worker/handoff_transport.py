"""The data planes that a writer offers decode: gRPC, and memory, or NIXL once it has an agent.

A prefill worker is a writer, and a decode worker that drains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ferryman.cache.rank_runs import RankShares
from ferryman.errors import Unavailable
from ferryman.handoff.effects import WriterId
from ferryman.wire.handoff.borrowed_memories import BorrowedMemories
from ferryman.wire.handoff.nixl_writer import NixlWriter
from ferryman.wire.handoff.process_liveness import liveness_server
from ferryman.wire.plane_values import (
    GRPC,
    MEMORY,
    NIXL,
    GrpcOnly,
    MemoryOffer,
    NixlOffer,
    PlaneOffer,
    memory_at,
)
from ferryman.worker.planes import AgentMaker, MemorySide, NixlSide, PlaneSide, rank_slabs

log = logging.getLogger(__name__)

# How long hand-offs to a decode worker use gRPC after one on a faster plane failed.
APART_SECONDS = 30.0
NIXL_NAME = "NIXL"
FAILED = "a hand-off by {} failed a moment ago"


class HandoffTransport:
    """The planes of one writer (vLLM's KV connector, SGLang's transfer backend).

    Until `run` has an agent, hand-offs use gRPC, or wait if NIXL is required. After a hand-off by
    NIXL or memory failed, hand-offs to that decode worker use gRPC for a while; after failures with
    two decode workers the fault may be here, and hand-offs to all of them do. If NIXL is required
    it is offered all the same.
    """

    def __init__(
        self, side: PlaneSide, shares: RankShares, who: WriterId, clock: Callable[[], float]
    ) -> None:
        """`shares` are those of the worker's ranks."""
        self._side, self._shares = side, shares
        self.memories = BorrowedMemories(side.folder if isinstance(side, MemorySide) else None)
        self._who = who
        self._clock = clock
        self._maker = AgentMaker(side, f"{who.worker_id}.{who.epoch}")
        self._writer: NixlWriter | None = None
        self._presence = ""
        self._is_made = asyncio.Event()
        self._apart: dict[str, float] = {}

    @property
    def planes(self) -> tuple[str, ...]:
        if isinstance(self._side, MemorySide):
            return (memory_at(self._side.place), GRPC)
        return (NIXL, GRPC) if self._writer else (GRPC,)

    @property
    def writer(self) -> NixlWriter:
        """Raises Unavailable when there is no writer, or when it is gone."""
        if self._writer is None:
            raise Unavailable("this worker's NIXL agent is gone")
        return self._writer

    async def made(self) -> None:
        """Waits for the first agent, as long as necessary; not on a side without NIXL."""
        if isinstance(self._side, NixlSide):
            await self._is_made.wait()

    async def offer_to(self, decode_id: str) -> PlaneOffer:
        """The offer to a decode worker, as of now."""
        if isinstance(self._side, MemorySide):
            if self._is_apart(decode_id):
                return GrpcOnly(f"prefill: {FAILED.format(MEMORY)}")
            return MemoryOffer(self._side.place)
        if self._maker.is_required:
            await self._is_made.wait()
        if why := self._why_not(decode_id):
            return GrpcOnly(f"prefill: {why}")
        return NixlOffer(self._presence)

    def _why_not(self, decode_id: str) -> str:
        """The reason against NIXL; empty if there is none."""
        if self._writer is None:
            return self._maker.trouble or "its NIXL agent is gone"
        if self._is_apart(decode_id) and not self._maker.is_required:
            return FAILED.format(NIXL_NAME)
        return ""

    def _is_apart(self, decode_id: str) -> bool:
        """Whether hand-offs to that worker use gRPC, because some failed on the faster plane."""
        now = self._clock()
        self._apart = {name: end for name, end in self._apart.items() if now < end}
        return decode_id in self._apart or len(self._apart) > 1

    def failed(self, decode_id: str, error: Exception) -> None:
        """Records a hand-off to that worker that failed on another plane than gRPC."""
        log.warning(
            "a hand-off by %s failed decode=%s, gRPC for %.0f s: %s",
            MEMORY if isinstance(self._side, MemorySide) else NIXL_NAME,
            decode_id,
            0.0 if self._maker.is_required else APART_SECONDS,
            error,
        )
        self._apart[decode_id] = self._clock() + APART_SECONDS

    async def run(self) -> None:
        """Keeps an agent and a liveness server as long as this runs; the server ends last."""
        side = self._side
        if isinstance(side, MemorySide):
            await self.memories.run()
        if not isinstance(side, NixlSide):
            return
        async with liveness_server(side.listen_host, self._who) as port:
            log.info("presence at %s:%d, which tells everyone its id alone", side.listen_host, port)
            agent = await self._maker.make()
            try:
                self._writer = NixlWriter(agent, rank_slabs(side.places), self._shares)
                self._presence = f"{side.advertise}:{port}"
                self._is_made.set()
                await asyncio.Event().wait()
            finally:
                self._writer = None
                agent.close()
