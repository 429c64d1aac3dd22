"""What this prefill worker offers decode beside gRPC: its NIXL agent, once there is one."""

from __future__ import annotations

import asyncio
import logging

from ferryman.errors import ConfigError, Unavailable
from ferryman.handoff.effects import Writer
from ferryman.wire.nixl_agent import NixlAgent
from ferryman.wire.nixl_plane import NixlWriter
from ferryman.wire.planes import GRPC, NIXL, GrpcPlane, NixlOffer, PlaneOffer
from ferryman.wire.presence import presence
from ferryman.worker.planes import NixlSide, PlaneSide

log = logging.getLogger(__name__)


class Writing:
    """The planes of one prefill worker. Until `run` has an agent, there is gRPC."""

    def __init__(self, side: PlaneSide, who: Writer) -> None:
        self._side = side
        self._who = who
        self._writer: NixlWriter | None = None
        self.offer: PlaneOffer = GrpcPlane()

    @property
    def planes(self) -> tuple[str, ...]:
        return (NIXL, GRPC) if self._writer else (GRPC,)

    @property
    def writer(self) -> NixlWriter:
        if self._writer is None:
            raise Unavailable("this worker's NIXL agent is gone")
        return self._writer

    async def run(self) -> None:
        """An agent and a presence for as long as this runs; the presence is the last to go."""
        if not isinstance(self._side, NixlSide):
            return
        side = self._side
        async with presence(side.listen_host, self._who) as port:
            agent = await self._agent(side)
            if agent is None:
                return
            try:
                self._writer = NixlWriter(agent)
                self.offer = NixlOffer(f"{side.advertise}:{port}")
                await asyncio.Event().wait()
            finally:
                self._writer, self.offer = None, GrpcPlane()
                agent.close()

    async def _agent(self, side: NixlSide) -> NixlAgent | None:
        name = f"{self._who.worker_id}.{self._who.epoch}"
        try:
            return await asyncio.to_thread(NixlAgent, name, side.regions, side.options)
        except (ConfigError, Unavailable) as error:
            if side.is_required:
                raise ConfigError(f"NIXL does not work here: {error}") from error
            log.warning("no NIXL, hand-offs go by gRPC: %s", error)
            return None
