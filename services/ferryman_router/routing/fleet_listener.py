"""Keeps the fleet up to date: reads workers' messages, and probes workers that cannot be reached.

A broken call does not show what broke. The worker may have died, the connection may have been
cut, or this process may itself have stood still, and then the calls to all workers break at once.
Only a worker that no new connection reaches is lost, and its requests get that as one event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from prometheus_client import Counter

from ferryman.errors import FerrymanError, PermissionDenied
from ferryman.runtime.background import Background, seconds_to_tick
from ferryman.wire.codec.caches import cache_event_from_bytes, cache_snapshot_from_bytes
from ferryman.wire.grpc.rpc import is_worker_at
from ferryman.wire.nats.bus import Bus, BusMessage
from ferryman.wire.nats.heartbeat import ROUTER, Heartbeat, StartBeat, beat_from_bytes
from ferryman.wire.nats.sender_proof import CheckSender
from ferryman.wire.nats.subjects import Subjects
from ferryman_router.routing.fleet import (
    UNREACHABLE,
    AskSnapshot,
    Effect,
    Fleet,
    WorkerName,
    WorkerUnproven,
)

log = logging.getLogger(__name__)

LOOK_SECONDS, LEAST_LOOK_SECONDS = 0.5, 0.05
AWAY_SECONDS = 0.25  # between two looks whether the broker is back
SNAPSHOT_SECONDS = 2.0
SNAPSHOT_RETRY_SECONDS = 1.0
MAX_NAMED = 64  # forged names that are warned of


class Liveness:
    """Probes a worker once for all callers that ask. A worker has `patience` seconds to answer;
    `lost` is called for one that does not. `connect` makes a channel to an address."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        patience: float,
        connect: Callable[[str], grpc.aio.Channel],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        lost: Callable[[WorkerName, str], None],
    ) -> None:
        self._fleet, self._patience, self._start = fleet, patience, start
        self._connect, self.lost = connect, lost
        self._probes: dict[WorkerName, asyncio.Task[None]] = {}

    async def is_alive(self, name: WorkerName) -> bool:
        """Whether a worker still answers; nothing new is sent there until that is known. If not,
        its loss has reached all its requests when this returns."""
        if (worker := self._fleet.get(name)) is None:
            return False
        probe = self._begin(name, self._find_out(name, worker.beat.address))
        # One caller may be cancelled; the others still wait for the answer.
        await asyncio.shield(probe)
        return self._fleet.get(name) is not None

    def prove(
        self,
        beat: Heartbeat,
        welcome: Callable[[Heartbeat], None],
        disbelieve: Callable[[Heartbeat], None],
    ) -> None:
        """Probes a worker that beats but was unreachable, or that claims another's address: it is
        welcome once this life answers there, and not believed while another one does."""
        name = WorkerName(beat.worker_id, beat.epoch)
        self._begin(name, self._prove(beat, welcome, disbelieve))

    def _begin(self, name: WorkerName, probe: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts the probe; at most one at a time for each worker."""
        if (running := self._probes.get(name)) is not None:
            probe.close()
            return running
        task = self._probes[name] = self._start(probe)
        task.add_done_callback(lambda _: self._probes.pop(name, None))
        return task

    async def _find_out(self, name: WorkerName, address: str) -> None:
        self._fleet.suspect(name)
        if await self._answers(address):
            self._fleet.trust(name)
        else:
            self.lost(name, UNREACHABLE)

    async def _prove(
        self,
        beat: Heartbeat,
        welcome: Callable[[Heartbeat], None],
        disbelieve: Callable[[Heartbeat], None],
    ) -> None:
        async with self._connect(beat.address) as fresh:
            try:
                is_there = await is_worker_at(fresh, beat.worker_id, self._patience)
            except grpc.aio.AioRpcError as error:
                log.debug("nobody answers at %s: %s", beat.address, error.details())
                return
        (welcome if is_there else disbelieve)(beat)

    async def _answers(self, address: str) -> bool:
        """Whether a new connection succeeds: the old one may be broken without a sign of it
        yet."""
        try:
            async with self._connect(address) as fresh, asyncio.timeout(self._patience):
                await fresh.channel_ready()
        except TimeoutError:
            return False
        return True


class SenderChecks:
    """Checks that messages come from the worker whose name they bear. Others are counted, with one
    warning a name, and so are beats from an address where another life answers."""

    def __init__(self, check: CheckSender, forged: Counter, misplaced: Counter) -> None:
        self._check, self._forged, self._misplaced = check, forged, misplaced
        self._named: set[str] = set()

    def is_from(self, message: BusMessage, subject: str, worker_id: str) -> bool:
        """Whether it came on the one `subject` for it, from that worker."""
        try:
            if message.subject != subject:
                raise PermissionDenied(f"{worker_id} does not speak on {message.subject}")
            self._check(message, worker_id)
        except PermissionDenied as error:
            self._forged.inc()
            if self._is_new(worker_id):
                log.warning("forged subject=%s: %s", message.subject, error)
            return False
        return True

    def misplaced(self, beat: Heartbeat) -> None:
        """Another life answers at the address of this beat: it came late, or names another's."""
        self._misplaced.inc()
        if self._is_new(beat.worker_id):
            log.warning("misplaced worker=%s: another is at %s", beat.worker_id, beat.address)

    def _is_new(self, worker_id: str) -> bool:
        if worker_id in self._named or len(self._named) >= MAX_NAMED:
            return False
        self._named.add(worker_id)
        return True


class FleetListener:
    """Passes messages to the fleet. `happened` gets the effects that come back."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        fleet: Fleet,
        liveness: Liveness,
        *,
        happened: Callable[[Effect], None],
        senders: SenderChecks,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._bus, self._subjects = bus, subjects
        self._fleet, self._liveness = fleet, liveness
        self._happened, self._background, self._clock = happened, background, clock
        self._senders = senders
        self._asking: set[WorkerName] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Reads beats and cache events while the block runs."""
        subscribed = self._bus.subscribed
        async with (
            subscribed(self._subjects.all_beats) as beats,
            subscribed(self._subjects.all_cache) as changes,
            asyncio.TaskGroup() as group,
        ):
            jobs = (
                group.create_task(self._each(beats, self._on_beat)),
                group.create_task(self._each(changes, self._on_cache_event)),
                group.create_task(self._watch()),
            )
            yield
            for job in jobs:
                job.cancel()

    def apply(self, effects: Iterable[Effect]) -> None:
        """Does what the fleet asks for, and passes the rest on."""
        for effect in effects:
            match effect:
                case AskSnapshot(name):
                    if name not in self._asking:
                        self._asking.add(name)
                        self._background.start(self._ask_snapshot(name))
                case WorkerUnproven(beat):
                    self._liveness.prove(beat, self._welcome, self._senders.misplaced)
                case _:
                    self._happened(effect)

    def _welcome(self, beat: Heartbeat) -> None:
        self.apply(self._fleet.welcome(beat, self._clock()))

    async def _each(
        self, messages: AsyncIterator[BusMessage], hear: Callable[[BusMessage], None]
    ) -> None:
        async for message in messages:
            try:
                hear(message)
            except FerrymanError as error:
                log.warning("not understood subject=%s: %s", message.subject, error)

    def _on_beat(self, message: BusMessage) -> None:
        beat = beat_from_bytes(message.payload)
        if beat.role == ROUTER:
            return  # nothing is sent to routers
        subject = self._subjects.beat(beat.role, beat.worker_id)
        if not self._senders.is_from(message, subject, beat.worker_id):
            return
        if isinstance(beat, StartBeat):
            self._fleet.starts.on_start_beat(beat, self._clock())
        else:
            self.apply(self._fleet.on_heartbeat(beat, self._clock()))

    def _on_cache_event(self, message: BusMessage) -> None:
        event = cache_event_from_bytes(message.payload)
        subject = self._subjects.cache(event.worker_id, event.epoch)
        if self._senders.is_from(message, subject, event.worker_id):
            self.apply(self._fleet.on_cache_event(event))

    async def _watch(self) -> None:
        """Silence counts only while the broker is connected: without it no beat could arrive."""
        seconds = AWAY_SECONDS
        while True:
            await asyncio.sleep(seconds)
            now = self._clock()
            if self._bus.is_connected:
                self.apply(self._fleet.expire(now))
                soon = max(LEAST_LOOK_SECONDS, self._fleet.seconds_to_silence(now))
                seconds = min(soon, seconds_to_tick(LOOK_SECONDS))
            else:
                self._fleet.reset_timeouts(now)
                seconds = AWAY_SECONDS

    async def _ask_snapshot(self, name: WorkerName) -> None:
        """Asks until the worker answers or has left; a worker without a prefix cache has nothing
        to answer."""
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
                        self._asking.discard(name)
                        self.apply(self._fleet.on_cache_snapshot(name, snapshot))
                        return
                await asyncio.sleep(SNAPSHOT_RETRY_SECONDS)
        finally:
            self._asking.discard(name)
