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
from dataclasses import dataclass, field

from ferryman.errors import FerrymanError
from ferryman.handoff.effects import Writer
from ferryman.runtime.background import Background
from ferryman.wire.nixl_agent import NixlAgent
from ferryman.wire.planes import GRPC, NIXL
from ferryman.wire.presence import Watch, watch
from ferryman.worker.agents import NOT_YET
from ferryman.worker.planes import NixlSide, PlaneSide
from ferryman_decode.spare import SpareAgent

log = logging.getLogger(__name__)

# How long a Reserve waits for a strip: where NIXL is required, and where gRPC does as well.
REQUIRED_SECONDS = 8.0
OPEN_SECONDS = 1.0
SHARE_OF_TIME = 0.5
# How long a writer that could not be watched is not tried again.
AGAIN_SECONDS = 10.0
MAX_REFUSED = 1024


@dataclass(eq=False, slots=True)
class Strip:
    """A writer's agent here. It listens while reservations of that writer are open."""

    writer: Writer
    agent: NixlAgent
    num_open: int = 0
    is_closing: bool = False

    def opened(self) -> None:
        self.num_open += 1
        self.agent.begin_listening()

    def closed(self) -> None:
        self.num_open -= 1
        self.agent.end_listening()


@dataclass(frozen=True, slots=True)
class NoStrip:
    """This writer may not write by itself; `why` in a few words."""

    why: str


@dataclass(slots=True)
class _Life:
    """A writer that is watched, and the strips of it that may still be open."""

    watch: Watch
    strips: list[Strip] = field(default_factory=list)

    @property
    def strip(self) -> Strip | None:
        """The one that is granted."""
        return next((each for each in self.strips if not each.is_closing), None)


class NixlLanding:
    """All writers of one decode worker. `died` hears of lives that are over, once nothing lands."""

    def __init__(
        self, side: NixlSide, name: str, background: Background, died: Callable[[Writer], None]
    ) -> None:
        self._is_required = side.is_required
        self._spare = SpareAgent(side, name)
        self._background = background
        self._died = died
        self._lives: dict[Writer, _Life] = {}
        self._openings: dict[Writer, asyncio.Task[None]] = {}
        self._refused: dict[Writer, float] = {}

    @property
    def planes(self) -> tuple[str, ...]:
        """What a writer can be granted now."""
        return (GRPC,) if self._spare.trouble else (NIXL, GRPC)

    def strips(self) -> list[Strip]:
        """Those on which something may land."""
        return [each for life in self._lives.values() for each in life.strips if each.num_open]

    async def strip_for(
        self, writer: Writer, presence: str, seconds_left: float
    ) -> Strip | NoStrip:
        """Where this writer may write by itself: its life is watched, and it has an agent here.

        Waits a moment for that, and no more than half of what its request has left: what is not
        ready for this one is ready for the next.
        """
        if found := self._strip_of(writer) or self._objection(writer):
            return found
        opening = self._openings.get(writer) or self._begin_opening(writer, presence)
        patience = REQUIRED_SECONDS if self._is_required else OPEN_SECONDS
        await asyncio.wait((opening,), timeout=min(patience, seconds_left * SHARE_OF_TIME))
        return self._strip_of(writer) or self._refusal(writer) or NoStrip(f"decode: {NOT_YET}")

    def _strip_of(self, writer: Writer) -> Strip | None:
        life = self._lives.get(writer)
        return life.strip if life else None

    def _objection(self, writer: Writer) -> NoStrip | None:
        """What speaks against waiting at all; where NIXL is required only that it fails here."""
        if self._spare.trouble not in ("", NOT_YET):
            return NoStrip(f"decode: {self._spare.trouble}")
        if self._is_required:
            return None
        return self._refusal(writer) if self._spare.is_made else NoStrip(f"decode: {NOT_YET}")

    def _begin_opening(self, writer: Writer, presence: str) -> asyncio.Task[None]:
        opening = self._background.start(self._open(writer, presence))
        self._openings[writer] = opening
        opening.add_done_callback(lambda _: self._openings.pop(writer, None))
        return opening

    async def _open(self, writer: Writer, presence: str) -> None:
        try:
            life = self._lives.get(writer) or await self._watched(writer, presence)
        except (OSError, FerrymanError) as error:
            self._refuse(writer, error)
            return
        agent = await self._spare.take()
        if self._lives.get(writer) is life:
            life.strips.append(Strip(writer, agent))
        else:
            await asyncio.to_thread(agent.close)

    async def _watched(self, writer: Writer, presence: str) -> _Life:
        life = _Life(await watch(presence, writer))
        self._lives[writer] = life
        self._background.start(self._mourn(writer, life))
        return life

    def _refuse(self, writer: Writer, error: Exception) -> None:
        """Says so once of each writer."""
        level = logging.DEBUG if writer in self._refused else logging.WARNING
        log.log(level, "no NIXL from %s, it goes by gRPC: %s", writer.worker_id, error)
        self._refused[writer] = asyncio.get_running_loop().time() + AGAIN_SECONDS
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _refusal(self, writer: Writer) -> NoStrip | None:
        if asyncio.get_running_loop().time() < self._refused.get(writer, 0.0):
            return NoStrip("decode: it cannot watch the writer's life")
        return None

    async def _mourn(self, writer: Writer, life: _Life) -> None:
        """Waits for the end of a life; when nothing of it can land any more, says so."""
        try:
            await life.watch.ended()
        finally:
            await life.watch.close()
        log.info("writer gone worker=%s epoch=%d", writer.worker_id, writer.epoch)
        while life.strips:
            await self.close(life.strips[0])
        del self._lives[writer]
        self._died(writer)

    async def close(self, strip: Strip) -> None:
        """Ends what is on its way to it over a network; the writer's next Reserve opens anew.

        Whoever asks waits for that end, also when another has asked before.
        """
        strip.is_closing = True
        await asyncio.to_thread(strip.agent.close)
        life = self._lives.get(strip.writer)
        if life and strip in life.strips:
            life.strips.remove(strip)

    async def close_other_lives(self, writer: Writer) -> None:
        """Before a new life of a worker is believed to be the only one."""
        for other, life in tuple(self._lives.items()):
            if other.worker_id == writer.worker_id and other.epoch != writer.epoch:
                for strip in tuple(life.strips):
                    await self.close(strip)

    async def run(self) -> None:
        """Fails at once when NIXL was asked for and does not work; closes all agents at the end."""
        try:
            await self._spare.run()
        finally:
            for life in self._lives.values():
                for strip in life.strips:
                    strip.is_closing = True
                    strip.agent.close()


@dataclass(frozen=True, slots=True)
class NoLanding:
    """A decode worker without NIXL, and why it is: everything comes by gRPC."""

    why: str

    @property
    def planes(self) -> tuple[str, ...]:
        return (GRPC,)

    def strips(self) -> list[Strip]:
        return []

    async def strip_for(
        self, writer: Writer, presence: str, seconds_left: float
    ) -> Strip | NoStrip:
        return NoStrip(f"decode {self.why}")

    async def close(self, strip: Strip) -> None:
        """There is none."""

    async def close_other_lives(self, writer: Writer) -> None:
        """There is nothing of them."""

    async def run(self) -> None:
        """There is nothing to do."""


Landing = NixlLanding | NoLanding


def landing_of(
    side: PlaneSide, name: str, background: Background, died: Callable[[Writer], None]
) -> Landing:
    if isinstance(side, NixlSide):
        return NixlLanding(side, name, background, died)
    return NoLanding(side.why)
