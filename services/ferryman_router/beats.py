"""Listens on the bus to what workers say of themselves, and keeps the fleet up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from ferryman.errors import FerrymanError
from ferryman.runtime.background import Background
from ferryman.wire.beats import beat_from_bytes
from ferryman.wire.bus import Bus, Message
from ferryman.wire.codec.caches import cache_event_from_bytes, cache_snapshot_from_bytes
from ferryman.wire.subjects import Subjects
from ferryman_router.fleet import AskSnapshot, Effect, Fleet, WorkerName
from ferryman_router.holdings import CacheChange, Snapshot

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
SNAPSHOT_SECONDS = 2.0
SNAPSHOT_RETRY_SECONDS = 1.0


class Listener:
    """Turns messages into what the fleet hears. `happened` is told what the fleet makes of it."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        fleet: Fleet,
        *,
        happened: Callable[[Effect], None],
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._bus, self._subjects, self._fleet = bus, subjects, fleet
        self._happened, self._background, self._clock = happened, background, clock
        self._asking: set[WorkerName] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Hears beats and cache events while the block runs."""
        subscribed = self._bus.subscribed
        async with (
            subscribed(self._subjects.all_beats) as beats,
            subscribed(self._subjects.all_cache) as changes,
            asyncio.TaskGroup() as group,
        ):
            jobs = (
                group.create_task(self._each(beats, self._hear_beat)),
                group.create_task(self._each(changes, self._hear_change)),
                group.create_task(self._watch()),
            )
            yield
            for job in jobs:
                job.cancel()

    def apply(self, effects: Iterable[Effect]) -> None:
        """Does what the fleet asks for, and passes the rest on."""
        for effect in effects:
            if not isinstance(effect, AskSnapshot):
                self._happened(effect)
            elif effect.name not in self._asking:
                self._asking.add(effect.name)
                self._background.outlive(self._ask_snapshot(effect.name))

    async def _each(self, messages: AsyncIterator[Message], hear: Callable[[bytes], None]) -> None:
        async for message in messages:
            try:
                hear(message.payload)
            except FerrymanError as error:
                log.warning("not understood subject=%s: %s", message.subject, error)

    def _hear_beat(self, payload: bytes) -> None:
        self.apply(self._fleet.hear_beat(beat_from_bytes(payload), self._clock()))

    def _hear_change(self, payload: bytes) -> None:
        event = cache_event_from_bytes(payload)
        name = WorkerName(event.worker_id, event.epoch)
        change = CacheChange(event.sequence, event.removed, event.stored)
        self.apply(self._fleet.hear_change(name, change))

    async def _watch(self) -> None:
        """Silence only counts while there is a broker through which one could be heard."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._bus.is_connected:
                self.apply(self._fleet.expire(self._clock()))
            else:
                self._fleet.forgive_silence(self._clock())

    async def _ask_snapshot(self, name: WorkerName) -> None:
        """Until it answers or has left; a worker without a prefix cache has nothing to answer."""
        subject = self._subjects.control(name.worker_id, "snapshot")
        try:
            while self._fleet.get(name) is not None:
                try:
                    payload = await self._bus.request(
                        subject, b"", timeout_seconds=SNAPSHOT_SECONDS
                    )
                    snapshot = cache_snapshot_from_bytes(payload)
                except FerrymanError as error:
                    log.debug("no snapshot worker=%s: %s", name.worker_id, error)
                else:
                    if snapshot.epoch == name.epoch:
                        held = Snapshot(snapshot.sequence, snapshot.held)
                        self._asking.discard(name)
                        self.apply(self._fleet.hear_snapshot(name, held))
                        return
                await asyncio.sleep(SNAPSHOT_RETRY_SECONDS)
        finally:
            self._asking.discard(name)
