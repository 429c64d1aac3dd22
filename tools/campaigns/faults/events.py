"""The lifecycle events and heartbeats of a cluster as they come, from a broker that returns too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from tools.campaigns.faults.conditions import Interval
from tools.campaigns.faults.endurance import Endurance
from tools.campaigns.faults.processes import Target

from ferryman.errors import InvalidRequest
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.bus import Bus
from ferryman.wire.nats.heartbeat import beat_from_bytes
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects

T = TypeVar("T")

# An older one says nothing of the stage that lasts now.
FRESH_MS = 60
# A connection that has broken is noticed by pings: two seconds of them, and the machine is busy.
UNNOTICED_SECONDS = 4.0


class EventWatch:
    """Calls `strike` with each event, and knows which process has published it.

    Events are kept, because a full disk or a killed broker may lose those of its log.
    """

    @property
    def events(self) -> list[LifecycleEntry]:
        """All so far."""
        return [event for log in self.logs.values() for event in log]

    def __init__(self, target: Target) -> None:
        self._target = target
        self._names: dict[str, str] = {}
        self._listeners: list[Callable[[LifecycleEntry, str], bool]] = []
        self.logs: dict[tuple[str, int], list[LifecycleEntry]] = {}
        self.endurance = Endurance(self._names)
        self.num_stale = 0
        self.deaf: list[Interval] = []

    async def run(self, bus: NatsBus) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._note_deafness(bus))
            group.create_task(self._beats(bus))
            group.create_task(self._events(bus))

    async def knows(self, number: int) -> None:
        """Waits until so many processes have sent a heartbeat."""
        while len(self._names) < number:
            await asyncio.sleep(0.05)

    async def next(self, is_it: Callable[[LifecycleEntry, str], bool], seconds: float) -> bool:
        """Calls `is_it` with each event and its process until one is; it acts within the call, not
        a moment later. False: none came in time."""
        done = asyncio.Event()

        def listener(event: LifecycleEntry, name: str) -> bool:
            if done.is_set() or not is_it(event, name):
                return False
            done.set()
            return True

        self._listeners.append(listener)
        try:
            async with asyncio.timeout(seconds):
                await done.wait()
        except TimeoutError:
            return done.is_set()
        finally:
            self._listeners.remove(listener)
        return True

    async def _note_deafness(self, bus: NatsBus) -> None:
        """Events that come while this listener has no connection are in the log alone, and there
        only until a full disk begins it anew."""
        while True:
            await bus.disconnected()
            start = time.monotonic() - UNNOTICED_SECONDS
            await bus.connected()
            self.deaf.append(Interval(start, time.monotonic() + UNNOTICED_SECONDS))

    async def _beats(self, bus: Bus) -> None:
        async for beat in _decoded(bus, Subjects().all_beats, beat_from_bytes):
            address = getattr(beat, "address", "")
            if address and beat.worker_id not in self._names:
                name = self._target.name_at(int(address.rpartition(":")[2]))
                if name is not None:
                    self._names[beat.worker_id] = name

    async def _events(self, bus: Bus) -> None:
        async for event in _decoded(bus, Subjects().all_life, decode_event):
            self.logs.setdefault((event.request_id, event.attempt), []).append(event)
            self.endurance.saw(event)
            name = self._names.get(event.worker_id)
            is_fresh = time.time() * 1000 - event.unix_ms <= FRESH_MS
            self.num_stale += not is_fresh
            if name is not None and is_fresh:
                # An event is for one fault.
                any(listener(event, name) for listener in tuple(self._listeners))


async def _decoded(bus: Bus, subject: str, decode: Callable[[bytes], T]) -> AsyncIterator[T]:
    """The messages on a subject, for ever; one that cannot be read is passed over."""
    async with bus.subscribed(subject) as messages:
        async for message in messages:
            try:
                value = decode(message.payload)
            except (InvalidRequest, ValueError):
                continue
            yield value
