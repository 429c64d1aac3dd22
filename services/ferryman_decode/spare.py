"""The NIXL agent of the next writer, made before it comes: no Reserve waits for the making."""

from __future__ import annotations

import asyncio

from ferryman.wire.nixl_agent import NixlAgent
from ferryman.worker.agents import AgentMaker
from ferryman.worker.planes import NixlSide


class SpareAgent:
    """One agent ahead. Whoever takes it has the next one made."""

    def __init__(self, side: NixlSide, name: str) -> None:
        self._maker = AgentMaker(side, name)
        self._agent: NixlAgent | None = None
        self._is_made, self._is_wanted = asyncio.Event(), asyncio.Event()
        self._is_wanted.set()

    @property
    def trouble(self) -> str:
        """Why there is none, in a few words; empty when there is one, or soon will be."""
        return self._maker.trouble

    @property
    def is_made(self) -> bool:
        return self._agent is not None

    async def take(self) -> NixlAgent:
        """Waits for one, as long as it takes."""
        while self._agent is None:
            await self._is_made.wait()
        agent, self._agent = self._agent, None
        self._is_made.clear()
        self._is_wanted.set()
        return agent

    async def run(self) -> None:
        """Makes one whenever there is none. Raises ConfigError where required NIXL never works."""
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
