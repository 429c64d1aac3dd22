"""The slots and sends of every hand-off of a prefill worker: slots stay leased while a send reads
them.

The table in `ferryman.handoff.holder` decides; this class carries out its effects. Only this class
cancels the task of a send, and only once: the task ends when its last byte is sent, or will never
be.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.engine.engine import Engine
from ferryman.errors import LeaseLost, WrongEpoch
from ferryman.handoff.holder import Hold, HoldEffect, HoldTable, ReleaseHold, StopSending
from ferryman.handoff.offer import UnitsToSend
from ferryman.handoff.values import WantedUnit
from ferryman.runtime.background import next_tick
from ferryman.schedule.scheduler import Scheduler
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.handoff.nixl_writer import FailedWrites
from ferryman.wire.handoff.outgoing_units import AnyUnit, CopiedUnit, OutgoingUnit
from ferryman.wire.values import StopAnswer, StopOrder

EXPIRY_SECONDS, IDLE_SECONDS = 0.5, 1.0
LEAVE_SECONDS = 2.0
MAX_FAILED = 4096
# How long a call that asks for a stop waits; then decode asks again.
STOP_SECONDS = 1.0


@dataclass(slots=True)
class _LeasedSend:
    hold: Hold
    holder: Holder
    slots: list[SlotHandle] = field(default_factory=list)
    sends: set[asyncio.Task[Sent]] = field(default_factory=set)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """A writer's report on a reservation: whether it has stopped, and whether writes failed."""

    is_stopped: bool
    has_failed_writes: bool = False


class SendLeases:
    """All holds of one prefill worker."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._table = HoldTable()
        self._held: dict[str, _LeasedSend] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()

    def begin(self, hold: Hold) -> None:
        """Begins a hold with its reservation. Raises QueueFull."""
        self._table.hold(hold, self._clock())
        holder = Holder(Role.TRANSFER_OUT, hold.reservation_id)
        self._held[hold.reservation_id] = _LeasedSend(hold, holder)

    def lease(self, reservation_id: str, slot: SlotHandle) -> None:
        """Keeps a slot unchanged. Raises LeaseLost when the hold has ended."""
        held = self._held.get(reservation_id)
        if held is None:
            raise LeaseLost(f"reservation {reservation_id} is no longer held for")
        self._scheduler.lease((slot,), held.holder)
        held.slots.append(slot)

    async def send(self, reservation_id: str, sending: Coroutine[Any, Any, Sent]) -> Sent:
        """Runs `sending`; cancelling this call does not end it.

        Raises LeaseLost as soon as the send is ordered to stop, even if it takes long to end: its
        result is not needed then.
        """
        if not self._table.try_send(reservation_id, self._clock()):
            sending.close()
            raise LeaseLost(f"nothing may be sent for reservation {reservation_id}")
        held = self._held[reservation_id]
        task = asyncio.create_task(sending)
        held.sends.add(task)
        task.add_done_callback(lambda ended: self._send_ended(held, ended))
        stopping = asyncio.create_task(_set(held.is_stopped))
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not task.done() or task.cancelled():
            raise LeaseLost("the reservation was given up while it was written")
        return task.result()

    def _send_ended(self, held: _LeasedSend, task: asyncio.Task[Sent]) -> None:
        held.sends.discard(task)
        if not task.cancelled() and isinstance(task.exception(), FailedWrites):
            held.has_failed = True
        self._carry_out(self._table.send_ended(held.hold.reservation_id))

    def renew(self, reservation_id: str) -> None:
        self._table.renew(reservation_id, self._clock())

    def answered(self, reservation_id: str, decode_epoch: int) -> None:
        """Decode has verified the hand-off."""
        self._carry_out(self._table.answered(reservation_id, decode_epoch))

    def cancel(self, request_id: str, attempt: int) -> None:
        self._carry_out(self._table.cancel(request_id, attempt))

    def expire(self) -> None:
        self._carry_out(self._table.expire(self._clock()))

    async def expiring(self) -> None:
        """Ends holds that decode did not renew, by this process's own clock; for ever."""
        while True:
            await next_tick(EXPIRY_SECONDS if self._held else IDLE_SECONDS)
            self.expire()

    async def stop_and_report(self, reservation_id: str, patience_seconds: float) -> WriterStatus:
        """Stops the sends of a reservation, waits up to `patience_seconds`, and returns the
        status."""
        held = self._held.get(reservation_id)
        if held is None:
            return WriterStatus(True, reservation_id in self._failed)
        self.cancel(held.hold.request_id, held.hold.attempt)
        try:
            async with asyncio.timeout(patience_seconds):
                await held.released.wait()
        except TimeoutError:
            return WriterStatus(False)
        return WriterStatus(True, held.has_failed)

    async def released(self, reservation_id: str) -> WriterStatus:
        """Cancels the hold and waits, as long as necessary, until it is released."""
        held = self._held.get(reservation_id)
        if held is None:
            return WriterStatus(True, reservation_id in self._failed)
        self.cancel(held.hold.request_id, held.hold.attempt)
        await held.released.wait()
        return WriterStatus(True, held.has_failed)

    async def leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        """Runs `leaving` to its end; cancelling this call, however often, does not end it.

        Waits for it a moment only: writes that do not end must hold only their own slots.
        """
        task = asyncio.create_task(leaving)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        await asyncio.wait((task,), timeout=LEAVE_SECONDS)

    def _carry_out(self, effects: Iterable[HoldEffect]) -> None:
        for effect in effects:
            held = self._held[effect.hold.reservation_id]
            match effect:
                case StopSending():
                    held.is_stopped.set()
                    for task in held.sends:
                        task.cancel()
                case ReleaseHold():
                    self._release(held)

    def _release(self, held: _LeasedSend) -> None:
        del self._held[held.hold.reservation_id]
        slots, held.slots = held.slots, []
        self._scheduler.release(slots, held.holder)
        if held.has_failed:
            self._failed[held.hold.reservation_id] = None
            while len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
        held.released.set()


@dataclass(frozen=True, slots=True)
class _LeasedUnit:
    """A unit whose slot is leased until decode has answered."""

    unit: WantedUnit
    slot: int


class OutgoingUnits:
    """The units of one reservation to send: each is leased to the transfer when it is ready.

    The lease lasts until decode has answered, even if the prefix tree drops the unit meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        send_leases: SendLeases,
        name: str,
        reservation_id: str,
        units: UnitsToSend,
    ) -> None:
        """`name` is the request that holds the slots, by its name in the schedule."""
        self._engine, self._send_leases, self._units = engine, send_leases, units
        self._name, self._reservation_id = name, reservation_id
        self._ready: asyncio.Queue[list[_LeasedUnit]] = asyncio.Queue()

    def up_to(self, position: int) -> None:
        """Releases full pages that end at or before `position` to be sent. Raises LeaseLost."""
        if ready := [self._leased(unit) for unit in self._units.up_to(position)]:
            self._ready.put_nowait(ready)

    def finish(self) -> None:
        """Releases all other units to be sent and ends the batches. Raises LeaseLost."""
        if ready := [self._leased(unit) for unit in self._units.remaining()]:
            self._ready.put_nowait(ready)
        self._ready.put_nowait([])

    async def batches(self) -> AsyncIterator[list[AnyUnit]]:
        """Units as they become ready, until the empty batch that ends them."""
        while batch := await self._ready.get():
            yield [self._outgoing(leased) for leased in batch]

    def _outgoing(self, leased: _LeasedUnit) -> AnyUnit:
        transfer, kind = self._engine.transfer, leased.unit.kind
        if transfer.is_in_place:
            return OutgoingUnit(leased.unit, transfer.read(kind, leased.slot), leased.slot)
        num_bytes = self._engine.manifest.layout(kind).slot_bytes
        return CopiedUnit(leased.unit, leased.slot, num_bytes, transfer)

    def _leased(self, unit: WantedUnit) -> _LeasedUnit:
        engine, (kind, index) = self._engine, unit.name
        ((_, handle),) = engine.scheduler.units_at(self._name, kind, index, index + 1)
        self._send_leases.lease(self._reservation_id, handle)
        return _LeasedUnit(unit, handle.slot)


async def _set(event: asyncio.Event) -> None:
    await event.wait()


class StopOrders:
    """The answers of a writer in the life `epoch` to decode workers that give up a reservation.

    A prefill worker writes prompts that it computes; a decode worker that drains writes the
    requests that leave it. Decode asks both by the same call, `PrefillService.StopWriting`.

    `refuse` is called with each order: before the answer to Reserve has come, an attempt does not
    know its reservation's id.
    """

    def __init__(
        self, epoch: int, send_leases: SendLeases, refuse: Callable[[StopOrder], None]
    ) -> None:
        self._epoch = epoch
        self._send_leases, self._refuse = send_leases, refuse

    async def obey(self, order: StopOrder) -> StopAnswer:
        """Whether nothing more will be written. Raises WrongEpoch for another life."""
        if order.worker_epoch != self._epoch:
            raise WrongEpoch(f"this is epoch {self._epoch}, not {order.worker_epoch}")
        self._refuse(order)
        status = await self._send_leases.stop_and_report(order.reservation_id, STOP_SECONDS)
        return StopAnswer(status.is_stopped, status.has_failed_writes, self._epoch)
