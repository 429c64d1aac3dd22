"""Decode's half of a hand-off: slots are promised, written, verified, then run.

The table in `ferryman.handoff.receiver` decides who may write; this carries its effects out. Over
gRPC the writer that counts is this process: it copies within one tick, so a writer that must stop
has stopped as soon as the table says so, and quarantine ends in the same tick. A writer with a
grant writes by itself: it has to be asked, and its slots stay leased until it has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.cache.slots import SlotHandle
from ferryman.engine.assembly import Engine
from ferryman.engine.places import HOST
from ferryman.errors import CorruptState, LeaseLost, ManifestMismatch
from ferryman.handoff.effects import (
    Effect,
    Fence,
    FreeSlots,
    ReceiverLimits,
    StartDecoding,
    StopWriter,
    Writer,
)
from ferryman.handoff.offer import offered_ranges
from ferryman.handoff.receiver import ReservationTable
from ferryman.handoff.values import Reservation, UnitDigest, UnitName, WantedUnit
from ferryman.handoff.verdict import Corrupt, Gaps, LeaseOver, Verified
from ferryman.ids import make_reservation_id
from ferryman.wire.codec.pieces import Piece, WriteHeader
from ferryman.wire.planes import GrpcPlane, NixlGrant, Plane
from ferryman.wire.values import CommitOrder, ReserveOrder
from ferryman_decode.landing import Strip
from ferryman_decode.running import name_of

LEASE_SECONDS = 5.0
NOBODY = Fence(0, "", 0)


class Receiving:
    """All reservations of this worker and the slots behind them."""

    def __init__(
        self, engine: Engine, epoch: int, clock: Callable[[], float], freed: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._epoch = epoch
        self._clock = clock
        self._freed = freed
        self._slots: dict[str, dict[UnitName, SlotHandle]] = {}
        self._granted: dict[str, _Granted] = {}
        self._stop: Callable[[StopWriter], None] = self._stopped_at_once
        self.table = ReservationTable(epoch, ReceiverLimits())

    def on_stop(self, stop: Callable[[StopWriter], None]) -> None:
        """Who asks writers that write by themselves to stop."""
        self._stop = stop

    def reserve(self, order: ReserveOrder) -> Reservation:
        """Slots for all that decode lacks. Raises OutOfSlots, Stale."""
        context, now = order.context, self._clock()
        writer = Writer(order.writer.worker_id, order.writer.epoch)
        self.carry_out(self.table.writer_seen(writer))
        self.table.check_new(context.request_id, context.attempt, now)
        reservation_id = make_reservation_id()
        request = replace(
            order.request,
            request_id=name_of(context.request_id, context.attempt),
            tenant_salt=context.tenant_salt,
        )
        self._engine.scheduler.reservations.reserve(reservation_id, request, now)
        slots = self._slots[reservation_id] = self._wanted(reservation_id, request.prompt_len)
        reservation = Reservation(
            reservation_id,
            self._epoch,
            context.attempt,
            tuple(WantedUnit(*name, handle.generation) for name, handle in slots.items()),
            LEASE_SECONDS,
        )
        self.carry_out(self.table.offer(context.request_id, reservation, writer, now))
        return reservation

    def _wanted(self, reservation_id: str, prompt_len: int) -> dict[UnitName, SlotHandle]:
        units_at = self._engine.scheduler.reservations.units_at
        return {
            (span.kind, index): handle
            for span in offered_ranges(self._engine.manifest, prompt_len)
            for index, handle in units_at(reservation_id, span.kind, span.first, span.end)
        }

    def grant(self, reservation: Reservation, order: ReserveOrder, strip: Strip) -> None:
        """Lets the writer of this reservation write by itself."""
        places = self._engine.places
        slots = self._slots[reservation.reservation_id]
        addresses = tuple(
            places[unit.kind].address_of(slots[unit.name].slot) for unit in reservation.wanted
        )
        device = next(iter(places.values())).device
        grant = NixlGrant(strip.agent.name, strip.agent.metadata, device, addresses)
        strip.opened()
        granted = _Granted(grant, order.writer.address, strip)
        self._granted[reservation.reservation_id] = granted

    def plane_of(self, reservation_id: str) -> Plane:
        granted = self._granted.get(reservation_id)
        return granted.plane if granted else GrpcPlane()

    def strip_of(self, reservation_id: str) -> Strip | None:
        """Where its writer was let write by itself; None as well once its slots are free."""
        granted = self._granted.get(reservation_id)
        return granted.strip if granted else None

    def address_of(self, reservation_id: str) -> str:
        """Where the writer listens; empty when nobody has to be asked any more."""
        granted = self._granted.get(reservation_id)
        return granted.writer_address if granted else ""

    def writer_stopped(self, fence: Fence) -> None:
        """Nothing more will land."""
        self.carry_out(self.table.writer_stopped(fence))

    def has_pending_writes(self, request_id: str, attempt: int) -> bool:
        """Whether slots of this attempt, or of one before it, are in quarantine."""
        return self.table.is_quarantined(request_id, attempt)

    def writer_died(self, writer: Writer) -> None:
        self.carry_out(self.table.writer_died(writer))

    async def examine(self, fence: Fence, units: Iterable[UnitName]) -> None:
        """Takes digests, in a thread, of what has landed. Raises what the fence raises."""
        self.table.renew(fence, self._clock())
        slots = self._slots.get(fence.reservation_id, {})
        granted = self._granted.get(fence.reservation_id)
        if granted is None:
            return
        names = [name for name in units if name in slots and name not in granted.examined]
        granted.examined.update(names)
        examining = asyncio.ensure_future(self._digests([(name, slots[name]) for name in names]))
        granted.examining.add(examining)
        try:
            digests = await asyncio.shield(examining)
        finally:
            granted.examining.discard(examining)
        for digest in digests:
            self.table.record(fence, digest, self._clock())

    async def examine_all(self, fence: Fence) -> None:
        """Before a commit of what landed by itself: whatever has no digest yet."""
        granted = self._granted.get(fence.reservation_id)
        if granted is None:
            return
        await self.examine(fence, tuple(self._slots.get(fence.reservation_id, ())))
        while granted.examining:
            await asyncio.wait(granted.examining)
            await asyncio.sleep(0)  # who waited for them records before this goes on

    async def _digests(self, units: list[tuple[UnitName, SlotHandle]]) -> list[UnitDigest]:
        transfer = self._engine.transfer

        def digests() -> list[UnitDigest]:
            return [UnitDigest(*name, transfer.digest(name[0], at.slot)) for name, at in units]

        if all(place.device == HOST for place in self._engine.places.values()):
            return await asyncio.to_thread(digests)
        return await asyncio.wrap_future(self._engine.stream.call(digests))

    def begin(self, header: WriteHeader) -> None:
        """A writer shows itself. Raises ManifestMismatch, WrongEpoch or LeaseLost."""
        digest = self._engine.manifest.digest
        if header.manifest_digest != digest:
            raise ManifestMismatch((f"digest: {digest} here, {header.manifest_digest} there",))
        self.table.renew(header.fence, self._clock())

    def write(self, fence: Fence, piece: Piece) -> None:
        """Checks and copies in one tick. Raises WrongEpoch, LeaseLost or Stale: write no more."""
        unit = piece.unit
        if self.table.try_write(fence, unit, self._clock()):
            slot = self._slots[fence.reservation_id][unit.name].slot
            self._engine.transfer.write(unit.kind, slot, piece.offset, piece.content)

    def written(self, fence: Fence, unit: WantedUnit) -> None:
        """A unit is complete: what lies in the slot now is what its digest is taken of."""
        if unit.name in self._slots.get(fence.reservation_id, {}):
            slot = self._slots[fence.reservation_id][unit.name].slot
            digest = self._engine.transfer.digest(unit.kind, slot)
            self.table.record(fence, UnitDigest(unit.kind, unit.index, digest), self._clock())

    def commit(self, fence: Fence, order: CommitOrder) -> bool:
        """True when the request starts to run now, False for a repetition.

        Raises CorruptState or LeaseLost; then its slots are free again.
        """
        answer = self.table.commit(fence, order.written, order.digests, self._clock())
        starts = any(isinstance(effect, StartDecoding) for effect in answer.effects)
        self.carry_out(answer.effects)
        match answer.verdict:
            case Verified():
                return starts
            case Gaps(missing):
                raise CorruptState(f"wanted and not written: {missing}")
            case Corrupt(units):
                raise CorruptState(f"other bytes than were sent: {units}")
            case LeaseOver():
                raise LeaseLost("the reservation was given up before the commit came")

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Does what the table decided."""
        for effect in effects:
            reservation = effect.reservation
            match effect:
                case StopWriter():
                    is_asked = reservation.reservation_id in self._granted
                    (self._stop if is_asked else self._stopped_at_once)(effect)
                case FreeSlots(request_id=request_id):
                    self._forget(reservation)
                    self._engine.scheduler.reservations.free(reservation.reservation_id)
                    self._freed(name_of(request_id, reservation.attempt))
                case StartDecoding():
                    self._forget(reservation)

    def _stopped_at_once(self, order: StopWriter) -> None:
        """Over gRPC only this process copies, and it has heard."""
        reservation = order.reservation
        self.writer_stopped(Fence(self._epoch, reservation.reservation_id, reservation.attempt))

    def _forget(self, reservation: Reservation) -> None:
        self._slots.pop(reservation.reservation_id, None)
        if granted := self._granted.pop(reservation.reservation_id, None):
            granted.strip.closed()


@dataclass(slots=True)
class _Granted:
    """A reservation into which its writer writes by itself, and what was examined of it."""

    plane: NixlGrant
    writer_address: str
    strip: Strip
    examined: set[UnitName] = field(default_factory=set)
    examining: set[asyncio.Future[list[UnitDigest]]] = field(default_factory=set)


class Sink:
    """Where the pieces of one WritePages stream go; its header fences all of them."""

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._fence = NOBODY

    def begin(self, header: WriteHeader) -> None:
        self._receiving.begin(header)
        self._fence = header.fence

    def write(self, piece: Piece) -> None:
        self._receiving.write(self._fence, piece)

    def finish(self, unit: WantedUnit) -> None:
        self._receiving.written(self._fence, unit)


def reused_tokens(manifest: StateManifest, reservation: Reservation, prompt_len: int) -> int:
    """The prefix that decode holds already: the full pages that it does not want."""
    pages = resume_set(manifest, prompt_len).full.num_pages
    wanted = sum(unit.kind is Kind.FULL for unit in reservation.wanted)
    return (pages - wanted) * manifest.page_size
