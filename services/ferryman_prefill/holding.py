"""Prefill's slots of every hand-off: leased until nothing reads them, and what is sent of them.

The table in `ferryman.handoff.holder` decides; this carries its effects out. A send is a task that
nobody but this cancels, and only once: it ends when its last byte is sent or will never be.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.errors import LeaseLost
from ferryman.handoff.holder import Hold, HoldEffect, HoldTable, ReleaseHold, StopSending
from ferryman.schedule.scheduler import Scheduler
from ferryman.wire.data_plane import Sent
from ferryman.wire.nixl_plane import FailedWrites

EXPIRY_SECONDS = 0.5
LEAVE_SECONDS = 2.0
MAX_FAILED = 4096


@dataclass(slots=True)
class _Held:
    hold: Hold
    holder: Holder
    slots: list[SlotHandle] = field(default_factory=list)
    sends: set[asyncio.Task[Sent]] = field(default_factory=set)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """What a writer may say of a reservation: whether it is done with it, and how that went."""

    is_stopped: bool
    has_failed_writes: bool = False


class Holding:
    """All holds of one prefill worker."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._table = HoldTable()
        self._held: dict[str, _Held] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()

    def begin(self, hold: Hold) -> None:
        """From the reservation on. Raises QueueFull."""
        self._table.hold(hold, self._clock())
        holder = Holder(Role.TRANSFER_OUT, hold.reservation_id)
        self._held[hold.reservation_id] = _Held(hold, holder)

    def lease(self, reservation_id: str, slot: SlotHandle) -> None:
        """Keeps a slot as it is. Raises LeaseLost when the hold is over."""
        held = self._held.get(reservation_id)
        if held is None:
            raise LeaseLost(f"reservation {reservation_id} is no longer held for")
        self._scheduler.lease((slot,), held.holder)
        held.slots.append(slot)

    async def send(self, reservation_id: str, sending: Coroutine[Any, Any, Sent]) -> Sent:
        """Runs `sending`; being cancelled does not end it.

        Raises LeaseLost when it is stopped, also where that takes it long: nobody needs it then.
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

    def _send_ended(self, held: _Held, task: asyncio.Task[Sent]) -> None:
        held.sends.discard(task)
        if not task.cancelled() and isinstance(task.exception(), FailedWrites):
            held.has_failed = True
        self._carry_out(self._table.send_ended(held.hold.reservation_id))

    def renew(self, reservation_id: str) -> None:
        self._table.renew(reservation_id, self._clock())

    def answered(self, reservation_id: str, decode_epoch: int) -> None:
        """Decode has verified what it got."""
        self._carry_out(self._table.answered(reservation_id, decode_epoch))

    def cancel(self, request_id: str, attempt: int) -> None:
        self._carry_out(self._table.cancel(request_id, attempt))

    def expire(self) -> None:
        self._carry_out(self._table.expire(self._clock()))

    async def expiring(self) -> None:
        """Ends what decode did not renew, by this process's own clock; for ever."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            self.expire()

    async def word_on(self, reservation_id: str, patience_seconds: float) -> Word:
        """Stops what is sent there, waits so long, and says how it stands."""
        held = self._held.get(reservation_id)
        if held is None:
            return Word(True, reservation_id in self._failed)
        self.cancel(held.hold.request_id, held.hold.attempt)
        try:
            async with asyncio.timeout(patience_seconds):
                await held.released.wait()
        except TimeoutError:
            return Word(False)
        return Word(True, held.has_failed)

    async def released(self, reservation_id: str) -> Word:
        """Cancels, and waits as long as it takes."""
        held = self._held.get(reservation_id)
        if held is None:
            return Word(True, reservation_id in self._failed)
        self.cancel(held.hold.request_id, held.hold.attempt)
        await held.released.wait()
        return Word(True, held.has_failed)

    async def leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        """Runs what must be done to its end; being cancelled, however often, does not end it.

        Waits for it a moment only: writes that do not end hold their slots, and nobody else.
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

    def _release(self, held: _Held) -> None:
        del self._held[held.hold.reservation_id]
        slots, held.slots = held.slots, []
        self._scheduler.release(slots, held.holder)
        if held.has_failed:
            self._failed[held.hold.reservation_id] = None
            while len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
        held.released.set()


async def _set(event: asyncio.Event) -> None:
    await event.wait()
