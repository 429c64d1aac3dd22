"""What is done when workers come and go: token streams are held, journeys hear of losses."""

from __future__ import annotations

import asyncio
import logging

from ferryman.runtime.background import Background
from ferryman.wire.rpc import Channels
from ferryman_router.dispatch import Dispatcher
from ferryman_router.fleet import Effect, Fleet, Joined, Lost, WorkerName
from ferryman_router.journeys import Journeys
from ferryman_router.metrics import RouterMetrics
from ferryman_router.tokens import TokenStream

log = logging.getLogger(__name__)


class Attendance:
    """One token stream for every decode worker that is believed to live."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        journeys: Journeys,
        channels: Channels,
        background: Background,
        metrics: RouterMetrics,
    ) -> None:
        self._router_id, self._fleet, self._journeys = router_id, fleet, journeys
        self._channels, self._background, self._metrics = channels, background, metrics
        self._streams: dict[WorkerName, tuple[TokenStream, asyncio.Task[None]]] = {}

    def happened(self, effect: Effect, dispatcher: Dispatcher, patience: float) -> None:
        """A worker came or went; those who wait are looked at again."""
        match effect:
            case Joined(beat):
                name = WorkerName(beat.worker_id, beat.epoch)
                log.info("worker joined id=%s address=%s", beat.worker_id, beat.address)
                if beat.role == "decode":
                    self._hold(name, beat.address, dispatcher, patience)
            case Lost(name, role, cause):
                log.warning("worker lost id=%s cause=%s", name.worker_id, cause)
                self._metrics.lost_workers.labels(role, cause).inc()
                self._journeys.lost(name, cause)
                if (held := self._streams.pop(name, None)) is not None:
                    held[1].cancel()
        dispatcher.serve()

    def ask_again(self, name: WorkerName) -> None:
        """Tokens are lacking on this worker's stream."""
        if (held := self._streams.get(name)) is not None:
            held[0].ask_again()

    def _hold(
        self, name: WorkerName, address: str, dispatcher: Dispatcher, patience: float
    ) -> None:
        stream = TokenStream(
            name,
            address,
            self._router_id,
            cursors=self._journeys.cursors,
            give=self._journeys.give,
        )

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._lose(name, dispatcher, patience)

        task = self._background.start(stream.run(self._channels, patience))
        task.add_done_callback(ended)
        self._streams[name] = stream, task

    def _lose(self, name: WorkerName, dispatcher: Dispatcher, patience: float) -> None:
        """Nobody answers there any more, whatever the beats say."""
        self._streams.pop(name, None)
        for effect in self._fleet.lose(name, "unreachable"):
            self.happened(effect, dispatcher, patience)
