"""What this prefill worker offers decode beside gRPC: its NIXL agent, once there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ferryman.errors import Unavailable
from ferryman.handoff.effects import Writer
from ferryman.wire.nixl_plane import NixlWriter
from ferryman.wire.planes import GRPC, NIXL, GrpcPlane, NixlOffer, PlaneOffer
from ferryman.wire.presence import presence
from ferryman.worker.agents import AgentMaker
from ferryman.worker.planes import NixlSide, PlaneSide

log = logging.getLogger(__name__)

# How long hand-offs to a decode worker go by gRPC after one by NIXL failed.
APART_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Offered:
    """What decode is offered, and in a few words why it is no more than that."""

    offer: PlaneOffer
    why: str = ""


class Writing(Protocol):
    """The planes of one prefill worker."""

    @property
    def planes(self) -> tuple[str, ...]: ...

    @property
    def writer(self) -> NixlWriter:
        """Raises Unavailable when there is none, or none any more."""
        ...

    async def offer_to(self, decode_id: str) -> Offered:
        """What a decode worker is offered now."""
        ...

    def failed(self, decode_id: str, error: Exception) -> None:
        """A hand-off to that worker by NIXL came to nothing."""
        ...

    async def run(self) -> None: ...


def writing_of(side: PlaneSide, who: Writer, clock: Callable[[], float]) -> Writing:
    return NixlWriting(side, who, clock) if isinstance(side, NixlSide) else GrpcWriting(side.why)


@dataclass(frozen=True, slots=True)
class GrpcWriting:
    """A worker without NIXL, and why it is."""

    why: str

    @property
    def planes(self) -> tuple[str, ...]:
        return (GRPC,)

    @property
    def writer(self) -> NixlWriter:
        raise Unavailable(f"this worker {self.why}")

    async def offer_to(self, decode_id: str) -> Offered:
        return Offered(GrpcPlane(), f"prefill {self.why}")

    def failed(self, decode_id: str, error: Exception) -> None:
        """Nothing was written by NIXL."""

    async def run(self) -> None:
        """There is nothing to do."""


class NixlWriting:
    """A worker with NIXL: until `run` has an agent there is gRPC, or, if NIXL is required, a wait.

    A hand-off that NIXL failed is tried again by gRPC; when two decode workers had such, the fault
    may well be here, and nobody is offered NIXL for a while. Where NIXL is required it is offered
    all the same.
    """

    def __init__(self, side: NixlSide, who: Writer, clock: Callable[[], float]) -> None:
        self._side = side
        self._who = who
        self._clock = clock
        self._maker = AgentMaker(side, f"{who.worker_id}.{who.epoch}")
        self._writer: NixlWriter | None = None
        self._presence = ""
        self._is_made = asyncio.Event()
        self._apart: dict[str, float] = {}

    @property
    def planes(self) -> tuple[str, ...]:
        return (NIXL, GRPC) if self._writer else (GRPC,)

    @property
    def writer(self) -> NixlWriter:
        if self._writer is None:
            raise Unavailable("this worker's NIXL agent is gone")
        return self._writer

    async def offer_to(self, decode_id: str) -> Offered:
        if self._side.is_required:
            await self._is_made.wait()
        if why := self._objection(decode_id):
            return Offered(GrpcPlane(), why)
        return Offered(NixlOffer(self._presence))

    def _objection(self, decode_id: str) -> str:
        if self._writer is None:
            return f"prefill: {self._maker.trouble}"
        now = self._clock()
        self._apart = {name: end for name, end in self._apart.items() if now < end}
        is_apart = decode_id in self._apart or len(self._apart) > 1
        if is_apart and not self._side.is_required:
            return "prefill: a hand-off by NIXL failed a moment ago"
        return ""

    def failed(self, decode_id: str, error: Exception) -> None:
        log.warning(
            "a hand-off by NIXL failed decode=%s, gRPC for %.0f s: %s",
            decode_id,
            0.0 if self._side.is_required else APART_SECONDS,
            error,
        )
        self._apart[decode_id] = self._clock() + APART_SECONDS

    async def run(self) -> None:
        """An agent and a presence for as long as this runs; the presence is the last to go."""
        async with presence(self._side.listen_host, self._who) as port:
            agent = await self._maker.make()
            try:
                self._writer = NixlWriter(agent)
                self._presence = f"{self._side.advertise}:{port}"
                self._is_made.set()
                await asyncio.Event().wait()
            finally:
                self._writer = None
                agent.close()
