"""Agents that are made, or whose writes end, when a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tests.harness.pair import PairWorker

from ferryman.errors import Unavailable
from ferryman.wire.handoff.nixl_agent import NixlAgent
from ferryman.wire.handoff.nixl_library import MemoryRegion, NixlOptions, RunTable
from ferryman.worker.handoff_transport import HandoffTransport

Write = tuple[str, RunTable, "Future[None]"]
End = Callable[[str, RunTable, "Future[None]"], None]


class SlowMaking:
    """Makes agents once `go_on` was called; `num_begun` and `made` say how far it is."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self.num_begun = 0
        self.made: list[NixlAgent] = []

    def go_on(self) -> None:
        self._gate.set()

    def __call__(
        self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions
    ) -> NixlAgent:
        self.num_begun += 1
        assert self._gate.wait(60), "a test lets it go on"
        self.made.append(NixlAgent(name, regions, options))
        return self.made[-1]


class BrokenMaking:
    """Has NIXL fail as it does where UCX finds no way."""

    num_begun = 0

    def __call__(
        self, name: str, regions: Sequence[MemoryRegion], options: NixlOptions
    ) -> NixlAgent:
        self.num_begun += 1
        raise Unavailable("NIXL: NIXL_ERR_BACKEND")


class LateAgent:
    """The writer's agent, whose writes are in flight until a test decides how they end.

    The decision holds for all later writes.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._waiting: list[Write] = []
        self._end: End = self._wait

    def write(self, peer: str, runs: RunTable) -> Future[None]:
        landed: Future[None] = Future()
        self._end(peer, runs, landed)
        return landed

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def remote_addresses(self) -> set[int]:
        """Where what waits will be written to."""
        return {int(run[1]) for _, runs, _ in self._waiting for run in runs}

    def arrive(self) -> None:
        """They land, or end as the library says. Blocks until those that waited have."""
        for _, _, landed in self._become(self._really_write):
            landed.exception(timeout=120)

    def lose(self) -> None:
        """Ends the writes with an error; whether they land is unknown."""
        self._become(_lost)

    def _become(self, end: End) -> list[Write]:
        self._end = end
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            end(*write)
        return waiting

    def _wait(self, peer: str, runs: RunTable, landed: Future[None]) -> None:
        self._waiting.append((peer, runs, landed))

    def _really_write(self, peer: str, runs: RunTable, landed: Future[None]) -> None:
        def pass_on(done: Future[None]) -> None:
            error = done.exception()
            landed.set_result(None) if error is None else landed.set_exception(error)

        self._agent.write(peer, runs).add_done_callback(pass_on)

    async def add_peer(self, metadata: bytes) -> str:
        return await self._agent.add_peer(metadata)

    async def remove_peer(self, peer: str) -> None:
        """Ends the writes in flight to the peer with an error, as the library does."""
        await self._agent.remove_peer(peer)
        theirs = [write for write in self._waiting if write[0] == peer]
        self._waiting = [write for write in self._waiting if write[0] != peer]
        for write in theirs:
            _lost(*write)

    def tell(self, peer: str, message: bytes) -> None:
        self._agent.tell(peer, message)


def _lost(peer: str, runs: RunTable, landed: Future[None]) -> None:
    landed.set_exception(Unavailable("the connection broke"))


def late_agent_of(prefill: PairWorker) -> LateAgent:
    """Put in place of the worker's own; no write is too late for this test's patience."""
    return late_agent_in(prefill.service._transport)


def late_agent_in(transport: HandoffTransport) -> LateAgent:
    """The same, of a writer by its transport."""
    writer = transport.writer
    writer._stall_seconds = 600.0
    late = LateAgent(writer._agent)
    writer._agent = late  # type: ignore[assignment]
    return late
