"""The receiving side of NIXL: for each life of a writer an agent of its own, and a watch on it.

Decode cannot refuse a one-sided write. It can know that no more will land: over a network bytes
land only through this side's agent, so closing the agent ends the writes; on one machine the writer
copies itself, so the writes end when it confirms that, or dies. Each writer has its own agent, so
that closing one does not break the writes of others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ferryman.errors import FerrymanError, Unavailable
from ferryman.handoff.effects import WriterId
from ferryman.runtime.background import Background
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.process_liveness import LivenessWatch, watch_process
from ferryman.wire.plane_values import GRPC, NIXL, GrpcOnly
from ferryman.worker.planes import NOT_YET, AgentMaker, PlaneSide

log = logging.getLogger(__name__)

# How long a Reserve waits for an agent: where NIXL is required, and where gRPC is an alternative.
REQUIRED_SECONDS = 8.0
OPEN_SECONDS = 1.0
SHARE_OF_TIME = 0.5
# How long a writer that could not be watched is not tried again.
AGAIN_SECONDS = 10.0
MAX_REFUSED = 1024


class StandbyAgent:
    """Keeps one agent ready. Taking it makes the next one."""

    def __init__(self, side: PlaneSide, name: str) -> None:
        self._maker = AgentMaker(side, name)
        self.is_required = self._maker.is_required
        self._agent: NixlAgent | None = None
        self._is_made, self._is_wanted = asyncio.Event(), asyncio.Event()
        self._is_wanted.set()

    @property
    def trouble(self) -> str:
        """Why there is no agent, in a few words; empty when there is one, or soon will be."""
        return self._maker.trouble

    @property
    def is_made(self) -> bool:
        return self._agent is not None

    async def take(self) -> NixlAgent:
        """Waits for an agent, as long as necessary."""
        while self._agent is None:
            await self._is_made.wait()
        agent, self._agent = self._agent, None
        self._is_made.clear()
        self._is_wanted.set()
        return agent

    async def run(self) -> None:
        """Makes an agent whenever there is none. Raises ConfigError if NIXL is required and never
        works."""
        try:
            while True:
                await self._is_wanted.wait()
                self._agent = await self._maker.make()
                self._is_wanted.clear()
                self._is_made.set()
        finally:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.close()


@dataclass(eq=False, slots=True)
class WriterAgent:
    """The agent for one writer. It listens while reservations of that writer are open."""

    writer: WriterId
    agent: NixlAgent
    is_closing: bool = False

    def opened(self) -> None:
        self.agent.begin_listening()

    def closed(self) -> None:
        self.agent.end_listening()


@dataclass(slots=True)
class _Life:
    """A watched writer, and its agents that may still be open."""

    watch: LivenessWatch
    writer_agents: list[WriterAgent] = field(default_factory=list)

    @property
    def writer_agent(self) -> WriterAgent | None:
        """The agent for new grants."""
        return next((each for each in self.writer_agents if not each.is_closing), None)


class NixlReceiver:
    """All writers of one decode worker. `died` is called for ended lives, once no byte can land;
    `told` is called with each message of a writer.

    Without NIXL it has no writers: all units come by gRPC.
    """

    def __init__(
        self,
        side: PlaneSide,
        name: str,
        background: Background,
        died: Callable[[WriterId], None],
        told: Callable[[bytes], None],
    ) -> None:
        self._spare = StandbyAgent(side, name)
        self._background = background
        self._died, self._told = died, told
        self._lives: dict[WriterId, _Life] = {}
        self._openings: dict[WriterId, asyncio.Task[None]] = {}
        self._refused: dict[WriterId, float] = {}

    @property
    def planes(self) -> tuple[str, ...]:
        """The data planes that a writer can be granted now."""
        return (GRPC,) if self._spare.trouble else (NIXL, GRPC)

    async def agent_for(
        self, writer: WriterId, presence: str, seconds_left: float
    ) -> WriterAgent | GrpcOnly:
        """The agent for this writer's direct writes; its life is watched.

        Waits a moment for it, and at most half of the time that its request has left. An agent that
        is not ready in time is ready for a later request.
        """
        if found := self._agent_of(writer) or self._why_not(writer):
            return found
        opening = self._openings.get(writer) or self._begin_opening(writer, presence)
        patience = REQUIRED_SECONDS if self._spare.is_required else OPEN_SECONDS
        await asyncio.wait((opening,), timeout=min(patience, seconds_left * SHARE_OF_TIME))
        return (
            self._agent_of(writer) or self._recent_failure(writer) or GrpcOnly(f"decode: {NOT_YET}")
        )

    def _agent_of(self, writer: WriterId) -> WriterAgent | None:
        life = self._lives.get(writer)
        return life.writer_agent if life else None

    def _why_not(self, writer: WriterId) -> GrpcOnly | None:
        """The reason not to wait at all; where NIXL is required, only a failure here is one."""
        if self._spare.trouble not in ("", NOT_YET):
            return GrpcOnly(f"decode: {self._spare.trouble}")
        if self._spare.is_required:
            return None
        return (
            self._recent_failure(writer) if self._spare.is_made else GrpcOnly(f"decode: {NOT_YET}")
        )

    def _begin_opening(self, writer: WriterId, presence: str) -> asyncio.Task[None]:
        opening = self._background.start(self._open(writer, presence))
        self._openings[writer] = opening
        opening.add_done_callback(lambda _: self._openings.pop(writer, None))
        return opening

    async def _open(self, writer: WriterId, presence: str) -> None:
        try:
            life = self._lives.get(writer) or await self._watched(writer, presence)
        except (OSError, FerrymanError) as error:
            self._refuse(writer, error)
            return
        agent = await self._spare.take()
        if self._lives.get(writer) is life:
            life.writer_agents.append(WriterAgent(writer, agent))
            self._background.start(self._hear(agent))
        else:
            await asyncio.to_thread(agent.close)

    async def _hear(self, agent: NixlAgent) -> None:
        """Passes the writer's messages on until the agent is closed."""
        with suppress(Unavailable):
            while True:
                for message in await agent.notifications():
                    self._told(message)

    async def _watched(self, writer: WriterId, presence: str) -> _Life:
        life = _Life(await watch_process(presence, writer))
        self._lives[writer] = life
        self._background.start(self._watch_writer_death(writer, life))
        return life

    def _refuse(self, writer: WriterId, error: Exception) -> None:
        """Logs a warning once for each writer."""
        level = logging.DEBUG if writer in self._refused else logging.WARNING
        log.log(level, "no NIXL from %s, it goes by gRPC: %s", writer.worker_id, error)
        self._refused[writer] = asyncio.get_running_loop().time() + AGAIN_SECONDS
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _recent_failure(self, writer: WriterId) -> GrpcOnly | None:
        if asyncio.get_running_loop().time() < self._refused.get(writer, 0.0):
            return GrpcOnly("decode: it cannot watch the writer's life")
        return None

    async def _watch_writer_death(self, writer: WriterId, life: _Life) -> None:
        """Waits for the end of a life; reports it when no byte of it can land any more."""
        try:
            await life.watch.ended()
        finally:
            await life.watch.close()
        log.info("writer gone worker=%s epoch=%d", writer.worker_id, writer.epoch)
        while life.writer_agents:
            await self.close(life.writer_agents[0])
        del self._lives[writer]
        self._died(writer)

    async def close(self, writer_agent: WriterAgent) -> None:
        """Ends writes in the network to this agent; the writer's next Reserve opens a new one.

        Every caller waits for that end, also when another call began it.
        """
        writer_agent.is_closing = True
        await asyncio.to_thread(writer_agent.agent.close)
        life = self._lives.get(writer_agent.writer)
        if life and writer_agent in life.writer_agents:
            life.writer_agents.remove(writer_agent)

    async def close_other_lives(self, writer: WriterId) -> None:
        """Closes the agents of a worker's other lives, before its new life counts as the only
        one."""
        for other, life in tuple(self._lives.items()):
            if other.worker_id == writer.worker_id and other.epoch != writer.epoch:
                for writer_agent in tuple(life.writer_agents):
                    await self.close(writer_agent)

    async def run(self) -> None:
        """Fails at once when NIXL is required and does not work; closes all agents at the end."""
        try:
            await self._spare.run()
        finally:
            for life in self._lives.values():
                for writer_agent in life.writer_agents:
                    writer_agent.is_closing = True
                    writer_agent.agent.close()
