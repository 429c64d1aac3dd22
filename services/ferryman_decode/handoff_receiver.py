"""Decode's half of a hand-off: promises slots, has them written, verifies them, then runs.

The table in `ferryman.handoff.receiver` decides which writer may write; this class carries out its
effects. Over gRPC this process itself writes: it copies within one tick, so it has stopped as soon
as the table says so, and quarantine ends in the same tick. A writer with a grant writes into the
slots itself: it must be asked to stop, and its slots stay leased until it has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.cache.slots import SlotHandle
from ferryman.engine.engine import Engine
from ferryman.errors import CorruptState, InvalidRequest, LeaseLost, ManifestMismatch, Stale
from ferryman.handoff.commit_check import Corrupt, Gaps, LeaseOver, Verified
from ferryman.handoff.effects import (
    Effect,
    FreeSlots,
    ReceiverLimits,
    StartDecoding,
    StopWriter,
    WriteFence,
    WriterId,
    fence_of,
)
from ferryman.handoff.offer import offered_ranges
from ferryman.handoff.receiver import ReservationTable
from ferryman.handoff.values import Reservation, UnitDigest, UnitName, WantedUnit
from ferryman.ids import make_reservation_id
from ferryman.wire.codec.pieces import Piece, WriteHeader
from ferryman.wire.plane_values import GrpcOnly, NixlGrant
from ferryman.wire.values import CommitOrder, ReserveOrder
from ferryman.worker.planes import rank_slabs
from ferryman_decode.decode_request import name_of
from ferryman_decode.nixl_receiver import WriterAgent

LEASE_SECONDS = 5.0


@dataclass(slots=True)
class GrantedWrites:
    """A reservation that a remote writer writes directly, and the units verified so far.

    It is removed as soon as its slots are free: then no writer has to be asked any more.
    """

    plane: NixlGrant
    writer_address: str
    writer_agent: WriterAgent
    examined: set[UnitName] = field(default_factory=set)
    examining: set[asyncio.Future[list[UnitDigest]]] = field(default_factory=set)


class ArrivedBytes:
    """Digests of units that come in pieces: of one on the host over the bytes in its slot, of one
    on a card over the pinned memory that its driver was given.

    A whole slot on the host would be hashed when it is not near the processor any more; one on a
    card would have to come back for that. The event loop would wait for either.
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[UnitName, xxhash.xxh3_128]] = {}

    def hasher(self, reservation_id: str, name: UnitName, offset: int) -> xxhash.xxh3_128:
        """The hasher of a unit, for its bytes from `offset` on.

        The pieces of a unit come in order, the first one at offset 0: a unit may come again.
        Raises InvalidRequest when two streams bring it at once.
        """
        units = self._open.setdefault(reservation_id, {})
        if offset == 0:
            units[name] = xxhash.xxh3_128()
        if name not in units:
            raise InvalidRequest(f"two streams bring {name[0]} unit {name[1]}", "pieces")
        return units[name]

    def digest(self, reservation_id: str, name: UnitName) -> bytes:
        """The digest of a unit that is complete: its last piece was the last that was added."""
        return self._open[reservation_id].pop(name).digest()

    def forget(self, reservation_id: str) -> None:
        self._open.pop(reservation_id, None)


class HandoffReceiver:
    """All reservations of this worker and their slots."""

    def __init__(
        self,
        engine: Engine,
        epoch: int,
        clock: Callable[[], float],
        freed: Callable[[str], None],
        ask_to_stop: Callable[[StopWriter], None],
        when_loads_over: Callable[[str, Callable[[], None]], None],
    ) -> None:
        """`ask_to_stop` asks a remote writer to stop; `freed` gets names of requests.

        `when_loads_over` calls back when no load writes to a reservation's slots.
        """
        self._engine = engine
        self._epoch = epoch
        self._clock = clock
        self._freed = freed
        self._slots: dict[str, dict[UnitName, SlotHandle]] = {}
        self._hashed = ArrivedBytes()
        self._ask_to_stop = ask_to_stop
        self._when_loads_over = when_loads_over
        self.granted: dict[str, GrantedWrites] = {}
        self.table = ReservationTable(epoch, ReceiverLimits())

    def reserve(self, order: ReserveOrder, host: HostView = EMPTY_HOST) -> Reservation:
        """Takes slots for every unit that decode lacks; those in `host` are not asked for, and
        the caller runs their loads. Raises OutOfSlots, Stale."""
        context, now = order.context, self._clock()
        writer = WriterId(order.writer.worker_id, order.writer.epoch)
        self.carry_out(self.table.writer_seen(writer))
        self.table.check_new(context.request_id, context.attempt, now)
        reservation_id = make_reservation_id()
        name = name_of(context.request_id, context.attempt)
        request = replace(order.request, request_id=name)
        self._engine.scheduler.reservations.reserve(reservation_id, request, now, host)
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

    def grant(
        self, reservation: Reservation, order: ReserveOrder, writer_agent: WriterAgent
    ) -> None:
        """Lets the writer of this reservation write directly into its slots."""
        engine, slots = self._engine, self._slots[reservation.reservation_id]
        grant = NixlGrant(
            writer_agent.agent.name,
            writer_agent.agent.metadata,
            rank_slabs(engine.places),
            tuple(slots[unit.name].slot for unit in reservation.wanted),
            engine.shares.digest,
        )
        writer_agent.opened()
        granted = GrantedWrites(grant, order.writer.address, writer_agent)
        self.granted[reservation.reservation_id] = granted

    def plane_of(self, reservation: Reservation) -> NixlGrant | GrpcOnly:
        """The grant of a reservation whose writer writes into its slots itself."""
        granted = self.granted.get(reservation.reservation_id)
        return granted.plane if granted else GrpcOnly()

    def writer_stopped(self, fence: WriteFence) -> None:
        """No further byte will land."""
        self.carry_out(self.table.writer_stopped(fence))

    def writer_died(self, writer: WriterId) -> None:
        self.carry_out(self.table.writer_died(writer))

    async def verify(self, fence: WriteFence, units: Iterable[UnitName]) -> None:
        """Takes digests, in a thread, of units that have landed. Raises the fence's errors."""
        self.table.renew(fence, self._clock())
        slots = self._slots.get(fence.reservation_id, {})
        granted = self.granted.get(fence.reservation_id)
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

    async def verify_all(self, fence: WriteFence) -> None:
        """Before a commit of units written directly: verifies every unit without a digest."""
        granted = self.granted.get(fence.reservation_id)
        if granted is None:
            return
        await self.verify(fence, tuple(self._slots.get(fence.reservation_id, ())))
        while granted.examining:
            await asyncio.wait(granted.examining)
            await asyncio.sleep(0)  # lets the tasks that waited for them record first

    async def _digests(self, units: list[tuple[UnitName, SlotHandle]]) -> list[UnitDigest]:
        transfer = self._engine.transfer

        def digests() -> list[UnitDigest]:
            return [UnitDigest(*name, transfer.digest(name[0], at.slot)) for name, at in units]

        return await asyncio.to_thread(digests)

    def begin(self, header: WriteHeader) -> None:
        """A writer begins its stream. Raises ManifestMismatch, WrongEpoch or LeaseLost."""
        digest = self._engine.manifest.digest
        if header.manifest_digest != digest:
            raise ManifestMismatch((f"digest: {digest} here, {header.manifest_digest} there",))
        self.table.renew(header.fence, self._clock())

    def write(self, fence: WriteFence, piece: Piece) -> None:
        """Checks and copies in one tick. After WrongEpoch, LeaseLost or Stale the writer must
        stop."""
        unit = piece.unit
        if self.table.try_write(fence, unit, self._clock()):
            slot = self._slots[fence.reservation_id][unit.name].slot
            hasher = self._hashed.hasher(fence.reservation_id, unit.name, piece.offset)
            # Not the bytes of the piece: lent memory may change between the copy and the digest.
            write = self._engine.transfer.write
            write(unit.kind, slot, piece.offset, piece.content, hasher.update)

    def finish(self, fence: WriteFence, unit: WantedUnit) -> None:
        """A unit is complete: records the digest of its bytes."""
        if unit.name in self._slots.get(fence.reservation_id, {}):
            digest = self._hashed.digest(fence.reservation_id, unit.name)
            self.table.record(fence, UnitDigest(unit.kind, unit.index, digest), self._clock())

    def commit(self, fence: WriteFence, order: CommitOrder) -> bool:
        """True when the request starts to run now, False for a repetition.

        Raises CorruptState or LeaseLost; then its slots are free again.
        """
        self.table.check_request(fence, order.context.request_id)
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
        """Carries out the table's effects."""
        for effect in effects:
            reservation = effect.reservation
            match effect:
                case StopWriter():
                    is_asked = reservation.reservation_id in self.granted
                    (self._ask_to_stop if is_asked else self._stopped_at_once)(effect)
                case FreeSlots(request_id=request_id):
                    self._forget(reservation)
                    free = partial(self._free, reservation, request_id)
                    self._when_loads_over(reservation.reservation_id, free)
                case StartDecoding():
                    self._forget(reservation)

    def load_failed(self, fence: WriteFence) -> None:
        """Gives up a reservation whose slots lack units that decode was to load, if it is open."""
        with suppress(Stale):
            self.carry_out(self.table.give_up(fence))

    def _free(self, reservation: Reservation, request_id: str) -> None:
        self._engine.scheduler.reservations.free(reservation.reservation_id)
        self._freed(name_of(request_id, reservation.attempt))

    def _stopped_at_once(self, order: StopWriter) -> None:
        """Over gRPC only this process copies, so the writer has stopped."""
        self.writer_stopped(fence_of(order.reservation))

    def _forget(self, reservation: Reservation) -> None:
        self._slots.pop(reservation.reservation_id, None)
        self._hashed.forget(reservation.reservation_id)
        if granted := self.granted.pop(reservation.reservation_id, None):
            granted.writer_agent.closed()
