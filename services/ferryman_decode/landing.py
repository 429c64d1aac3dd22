"""Where NIXL writers may write: for each life of a writer an agent of its own, and a watch on it.

Decode cannot refuse a one-sided write. It can know that no more comes: over a network bytes land
only through this side's agent, so closing the agent ends that; on one machine the writer copies by
itself, so its word or its death ends that. An agent for each writer is what makes it possible to
close one without breaking what the others write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import ConfigError, FerrymanError, Unavailable
from ferryman.handoff.effects import Writer
from ferryman.runtime.background import Background
from ferryman.wire.nixl_agent import NixlAgent
from ferryman.wire.planes import GRPC, NIXL
from ferryman.wire.presence import Watch, watch
from ferryman.worker.planes import NixlSide, PlaneSide

log = logging.getLogger(__name__)

OPEN_SECONDS = 5.0


@dataclass(slots=True)
class Strip:
    """One writer's agent here. It listens while reservations of that writer are open."""

    agent: NixlAgent
    watch: Watch
    num_open: int = 0

    def opened(self) -> None:
        self.num_open += 1
        self.agent.begin_listening()

    def closed(self) -> None:
        self.num_open -= 1
        self.agent.end_listening()


class Landing:
    """All writers of one decode worker. `died` hears of lives that are over, once nothing lands."""

    def __init__(
        self, side: PlaneSide, name: str, background: Background, died: Callable[[Writer], None]
    ) -> None:
        self._side = side
        self._name = name
        self._background = background
        self._died = died
        self._strips: dict[Writer, Strip] = {}
        self._turns: dict[Writer, asyncio.Lock] = {}
        self._num_made = 0

    @property
    def planes(self) -> tuple[str, ...]:
        return (NIXL, GRPC) if isinstance(self._side, NixlSide) else (GRPC,)

    @property
    def side(self) -> NixlSide:
        assert isinstance(self._side, NixlSide), "only who has NIXL grants it"
        return self._side

    def strip_of(self, writer: Writer) -> Strip | None:
        return self._strips.get(writer)

    def strips(self) -> list[Strip]:
        """Those on which something may land."""
        return [strip for strip in self._strips.values() if strip.num_open]

    async def prepare(self, writer: Writer, address: str) -> bool:
        """Whether this writer may write by itself: its life is watched, and it has an agent here.

        What stands in the way is logged; then its units come by gRPC.
        """
        if not isinstance(self._side, NixlSide):
            return False
        async with self._turns.setdefault(writer, asyncio.Lock()):
            if writer in self._strips:
                return True
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    await self._open(writer, address)
            except (OSError, TimeoutError, ConfigError, FerrymanError) as error:
                log.warning("no NIXL from %s, it goes by gRPC: %s", writer.worker_id, error)
                return False
        return True

    async def _open(self, writer: Writer, address: str) -> None:
        seen = await watch(address, writer)
        self._num_made += 1
        name = f"{self._name}.{self._num_made}"
        making = asyncio.to_thread(NixlAgent, name, self.side.regions, self.side.options)
        try:
            agent = await making
        except BaseException:
            await seen.close()
            raise
        self._strips[writer] = Strip(agent, seen)
        self._background.start(self._mourn(writer, seen))

    async def _mourn(self, writer: Writer, seen: Watch) -> None:
        """Waits for the end of a life; when nothing of it can land any more, says so."""
        try:
            await seen.ended()
        finally:
            await seen.close()
        log.info("writer gone worker=%s epoch=%d", writer.worker_id, writer.epoch)
        await self.close(writer)
        self._turns.pop(writer, None)
        self._died(writer)

    async def close(self, writer: Writer) -> None:
        """Ends what is on its way over a network from this writer; the next Reserve opens anew."""
        strip = self._strips.pop(writer, None)
        if strip is not None:
            await asyncio.to_thread(strip.agent.close)

    async def close_other_lives(self, writer: Writer) -> None:
        """Before a new life of a worker is believed to be the only one."""
        for other in [each for each in self._strips if each.worker_id == writer.worker_id]:
            if other.epoch != writer.epoch:
                await self.close(other)

    async def run(self) -> None:
        """Fails at once when NIXL was asked for and does not work; closes all agents at the end."""
        try:
            if isinstance(self._side, NixlSide) and self._side.is_required:
                await self._try_out(self._side)
            await asyncio.Event().wait()
        finally:
            strips, self._strips = self._strips, {}
            for strip in strips.values():
                strip.agent.close()

    async def _try_out(self, side: NixlSide) -> None:
        try:
            agent = await asyncio.to_thread(NixlAgent, self._name, side.regions, side.options)
        except (ConfigError, Unavailable) as error:
            raise ConfigError(f"NIXL does not work here: {error}") from error
        agent.close()
