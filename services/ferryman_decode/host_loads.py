"""Units that decode loads from its node's host tier while prefill computes and sends the others.

A reservation's loads begin when it is made. Until they have ended, the host lease holds the units,
no commit is answered, and the reservation's slots are not given back. A load that fails gives up
the reservation; the router tries again, and decode loads nothing for a later attempt: prefill sends
it all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ferryman.cache.units import HostUnit
from ferryman.errors import CorruptState
from ferryman.handoff.effects import WriteFence, fence_of
from ferryman.handoff.values import Reservation
from ferryman.schedule.batch import LoadReport, SlotLoad
from ferryman.wire.grpc.rpc import tags_for
from ferryman.wire.hostcache.client import MISS, HostLease
from ferryman.wire.values import ReserveOrder
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import name_of

log = logging.getLogger(__name__)

LOAD_FAILED = "load_failed"


@dataclass(slots=True)
class _RunningLoads:
    """The loads of one reservation, and the calls that wait for their end."""

    name: str
    fence: WriteFence
    lease: HostLease
    units: tuple[HostUnit, ...]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


class HostLoads:
    """The loads of all reservations of this worker.

    `on_loaded` gets the name of a request, the units that were loaded for it, and the seconds that
    it took; `on_failed` the name and the fence of a reservation whose slots lack units.
    """

    def __init__(
        self,
        parts: WorkerContext,
        on_loaded: Callable[[str, tuple[HostUnit, ...], float], None],
        on_failed: Callable[[str, WriteFence], None],
    ) -> None:
        self._parts = parts
        self._on_loaded, self._on_failed = on_loaded, on_failed
        self._running: dict[str, _RunningLoads] = {}

    async def lease_for(self, order: ReserveOrder) -> HostLease:
        """The host's units of this prompt. The caller passes the lease to `begin` or releases
        it."""
        # A later attempt may follow a load that failed, and the host-cache may not know that yet.
        if order.context.attempt > 1:
            return MISS
        return await self._parts.host.lease_for_receive(
            order.request,
            tags_for(order.context),
            seconds_left=order.context.deadline_seconds,
        )

    def release(self, lease: HostLease) -> None:
        """Nothing is loaded from it."""
        self._parts.host.release(lease)

    def begin(
        self,
        request_id: str,
        reservation: Reservation,
        loads: tuple[SlotLoad, ...],
        lease: HostLease,
    ) -> None:
        """Starts the loads, and takes the lease over."""
        if not loads:
            self.release(lease)
            return
        name = name_of(request_id, reservation.attempt)
        units = tuple(load.unit for load in loads)
        running = _RunningLoads(name, fence_of(reservation), lease, units)
        self._running[reservation.reservation_id] = running
        self._parts.host.loading(name, units)
        self._parts.background.start(self._run(running, loads))

    async def _run(self, running: _RunningLoads, loads: tuple[SlotLoad, ...]) -> None:
        report: LoadReport | None = None
        try:
            report = await self._loaded(loads)
        finally:
            self._end(running, report)

    async def _loaded(self, loads: tuple[SlotLoad, ...]) -> LoadReport | None:
        """The report of loads that all succeeded; None if a unit's bytes are not those written."""
        try:
            loaded = await asyncio.wrap_future(self._parts.engine.host_tier.load(loads))
        except Exception:  # whatever it was, the slots lack units, and prefill can send them
            log.exception("units of the host tier could not be loaded")
            return None
        return None if loaded.corrupt else loaded.report()

    def _end(self, running: _RunningLoads, report: LoadReport | None) -> None:
        # First: from here on no load writes to the slots, so what follows may free them.
        del self._running[running.fence.reservation_id]
        running.has_failed = report is None
        self._parts.host.release(running.lease, was_corrupt=running.has_failed)
        if running.then:  # the reservation had ended before its loads did
            for call in running.then:
                call()
        elif report is None:
            self._on_failed(running.name, running.fence)
        else:
            self._on_loaded(running.name, running.units, report.seconds)
        running.over.set()

    async def check_over(self, reservation_id: str) -> None:
        """Waits until the loads of a reservation have ended. Raises CorruptState if one failed."""
        if (running := self._running.get(reservation_id)) is None:
            return
        await running.over.wait()
        if running.has_failed:
            raise CorruptState("units of the host tier were not those that had been written there")

    def when_over(self, reservation_id: str, call: Callable[[], None]) -> None:
        """Calls back once no load writes to the reservation's slots: now, if none does."""
        if (running := self._running.get(reservation_id)) is None:
            call()
        else:
            running.then.append(call)
