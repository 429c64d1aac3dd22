"""The making of a worker's NIXL agents: off the loop, and never left behind half made."""

from __future__ import annotations

import asyncio
import logging

from ferryman.errors import ConfigError, Unavailable
from ferryman.wire.nixl_agent import NixlAgent
from ferryman.worker.planes import NixlSide

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
MAX_WORDS = 120
NOT_YET = "its NIXL agent is not ready"


class AgentMaker:
    """Makes agents, one at a time; `trouble` is in a few words why there is none, or empty."""

    def __init__(self, side: NixlSide, name: str) -> None:
        self._side = side
        self._name = name
        self._num_tried = 0
        self._has_worked = False
        self.trouble = NOT_YET

    async def make(self) -> NixlAgent:
        """Until it works, warning once of what stands in the way.

        Raises ConfigError where NIXL is required and did not work even once.
        """
        while True:
            try:
                agent = await self._try()
            except (ConfigError, Unavailable) as error:
                self._failed(error)
            else:
                self._has_worked, self.trouble = True, ""
                return agent
            await asyncio.sleep(AGAIN_SECONDS)

    def _failed(self, error: Exception) -> None:
        if self._side.is_required and not self._has_worked:
            raise ConfigError(f"NIXL does not work here: {error}") from error
        if self.trouble in ("", NOT_YET):
            log.warning("NIXL does not work here, hand-offs go by gRPC: %s", error)
        self.trouble = f"NIXL does not work here: {error}"[:MAX_WORDS]

    async def _try(self) -> NixlAgent:
        """In a thread, which cannot be stopped: whoever is cancelled waits for it.

        An agent must not outlive the memory that it may touch.
        """
        self._num_tried += 1
        name = f"{self._name}.{self._num_tried}"
        side = self._side
        making = asyncio.ensure_future(
            asyncio.to_thread(side.make, name, side.regions, side.options)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close)
            await asyncio.wait((making,))
            raise


def _close(making: asyncio.Future[NixlAgent]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()
