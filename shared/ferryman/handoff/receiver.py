"""All reservations of one decode worker: the slots, the writer and the end of each.

The table decides; the decode server carries out the effects it returns. Every write is checked in
the same tick as its copy against (epoch, reservation, attempt, slot generation), so a writer of an
earlier process, attempt or owner of a slot is refused at once.

The data plane decides which process writes. With one-sided writes it is the prefill process; with
frames over gRPC only decode's own servicer copies, and it stops as soon as its last copy has
returned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ferryman.errors import LeaseLost, QueueFull, Stale, WrongEpoch
from ferryman.handoff.commit_check import LeaseOver, Verdict, Verified, check_commit
from ferryman.handoff.effects import (
    AbortAnswer,
    CommitAnswer,
    Effect,
    FreeSlots,
    ReceiverLimits,
    ReceiverStatistics,
    StartDecoding,
    StopWriter,
    WriteFence,
    WriterId,
)
from ferryman.handoff.reservation import (
    OPEN,
    TERMINAL,
    Aborted,
    CommitRefused,
    CommitVerified,
    Renewed,
    ReservationEvent,
    ReservationLeaseEnded,
    ReservationState,
    WriterDied,
    WriterStopped,
    Written,
    next_state,
)
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, UnitName, WantedUnit


class Tombstones:
    """A bounded memory of cancelled attempts: an attempt stands for all earlier ones of its
    request.

    At the bound the oldest is forgotten; a reservation that it would have refused then ends with
    its lease.
    """

    def __init__(self, max_tombstones: int, lifetime_seconds: float) -> None:
        self._max_tombstones = max_tombstones
        self._lifetime_seconds = lifetime_seconds
        self._graves: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, request_id: str, attempt: int, now: float) -> None:
        earlier, _ = self._graves.pop(request_id, (attempt, now))
        self._graves[request_id] = max(attempt, earlier), now + self._lifetime_seconds
        while len(self._graves) > self._max_tombstones:
            self._graves.popitem(last=False)

    def holds(self, request_id: str, attempt: int, now: float) -> bool:
        cancelled, end = self._graves.get(request_id, (attempt - 1, now))
        return attempt <= cancelled and now < end

    def expire(self, now: float) -> None:
        while self._graves and next(iter(self._graves.values()))[1] <= now:
            self._graves.popitem(last=False)


@dataclass(slots=True)
class _OpenReservation:
    request_id: str
    reservation: Reservation
    writer: WriterId
    lease_end: float
    generations: dict[UnitName, int]
    state: ReservationState = ReservationState.OFFERED
    received: dict[UnitName, bytes] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=LeaseOver)


class ReservationTable:
    """The reservations of one decode process, with that `epoch`."""

    def __init__(self, epoch: int, limits: ReceiverLimits) -> None:
        self.epoch = epoch
        self._limits = limits
        self._live: dict[str, _OpenReservation] = {}
        self._closed: OrderedDict[str, _OpenReservation] = OrderedDict()
        self._of_request: dict[str, list[_OpenReservation]] = {}
        self._tombstones = Tombstones(limits.max_tombstones, limits.tombstone_seconds)
        self._num_refused = 0
        self._num_skipped_units = 0

    def check_new(self, request_id: str, attempt: int, now: float) -> None:
        """Raises unless this attempt may reserve; call it before slots are allocated."""
        if self._tombstones.holds(request_id, attempt, now):
            raise self._refusal(Stale(f"attempt {attempt} of {request_id} was cancelled"))
        earlier = [e.reservation.attempt for e in self._of_request.get(request_id, ())]
        if earlier and attempt <= max(earlier):
            raise self._refusal(Stale(f"{request_id} has reserved for attempt {max(earlier)}"))
        if len(self._live) >= self._limits.max_open:
            raise QueueFull(f"{len(self._live)} reservations are open")

    def offer(
        self, request_id: str, reservation: Reservation, writer: WriterId, now: float
    ) -> tuple[Effect, ...]:
        """Enters a reservation and gives up earlier attempts of the same request."""
        assert reservation.epoch == self.epoch, "a reservation carries the epoch of its own worker"
        self.check_new(request_id, reservation.attempt, now)
        earlier = list(self._of_request.get(request_id, ()))
        effects = [effect for entry in earlier for effect in self._apply(entry, Aborted())]
        generations = {unit.name: unit.slot_generation for unit in reservation.wanted}
        lease_end = now + reservation.lease_seconds
        entry = _OpenReservation(request_id, reservation, writer, lease_end, generations)
        self._live[reservation.reservation_id] = entry
        self._of_request.setdefault(request_id, []).append(entry)
        return tuple(effects)

    def try_write(self, fence: WriteFence, unit: WantedUnit, now: float) -> bool:
        """Whether to copy this part of a unit; False: it is not wanted, skip it. Renews the lease.

        Raises WrongEpoch, LeaseLost or Stale when the writer must not write here any more.
        """
        entry = self._open_entry(fence, now)
        if unit.name not in entry.generations:
            self._num_skipped_units += 1
            return False
        if entry.generations[unit.name] != unit.slot_generation:
            raise self._refusal(
                Stale(
                    f"{unit.kind} unit {unit.index} lies in generation "
                    f"{entry.generations[unit.name]} of its slot, not {unit.slot_generation}"
                )
            )
        entry.received.pop(unit.name, None)  # written again, so an earlier digest is void
        self._progress(entry, Written(), now)
        return True

    def record(self, fence: WriteFence, unit: UnitDigest, now: float) -> None:
        """A wanted unit is complete; `unit` has the digest of its bytes as they lie here."""
        entry = self._open_entry(fence, now)
        if unit.name in entry.generations:
            entry.received[unit.name] = unit.digest
            self._progress(entry, Written(), now)

    def renew(self, fence: WriteFence, now: float) -> None:
        """Prefill is still working on the hand-off."""
        self._progress(self._open_entry(fence, now), Renewed(), now)

    def check_request(self, fence: WriteFence, request_id: str) -> None:
        """Raises LeaseLost when the reservation is another request's."""
        if self._entry(fence).request_id != request_id:
            raise self._refusal(
                LeaseLost(f"reservation {fence.reservation_id} is not for {request_id}")
            )

    def commit(
        self,
        fence: WriteFence,
        written: Iterable[PageRange],
        sent: Iterable[UnitDigest],
        now: float,
    ) -> CommitAnswer:
        """Judges the hand-off. All writes must have been recorded before; the first commit
        counts."""
        entry = self._entry(fence)
        if entry.state in TERMINAL:
            return CommitAnswer(entry.verdict, ())
        if entry.state not in OPEN or now >= entry.lease_end:
            return CommitAnswer(entry.verdict, self._apply(entry, WriterStopped()))
        entry.verdict = check_commit(entry.reservation, entry.received, written, sent)
        verified = isinstance(entry.verdict, Verified)
        event = CommitVerified() if verified else CommitRefused()
        return CommitAnswer(entry.verdict, self._apply(entry, event))

    def abort(self, request_id: str, attempt: int, now: float) -> AbortAnswer:
        """Gives up an attempt and all before it, known or not, and refuses their later messages."""
        self._tombstones.add(request_id, attempt, now)
        mine = self._of_request.get(request_id, ())
        aborted = [e for e in mine if e.reservation.attempt <= attempt]
        effects = [effect for entry in aborted for effect in self._apply(entry, Aborted())]
        return AbortAnswer(any(e.state not in TERMINAL for e in aborted), tuple(effects))

    def give_up(self, fence: WriteFence) -> tuple[Effect, ...]:
        """Gives up one reservation: its writer asks for it, or decode cannot load its part of it. A
        committed one stays.

        Raises WrongEpoch or LeaseLost for a reservation that is not known here.
        """
        return self._apply(self._entry(fence), Aborted())

    def writer_stopped(self, fence: WriteFence) -> tuple[Effect, ...]:
        """The writer will not write again: it acknowledged a stop, or gave up by itself."""
        return self._apply(self._entry(fence), WriterStopped())

    def is_quarantined(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt or one before it waits for its writer."""
        return any(
            entry.state is ReservationState.EXPIRING and entry.reservation.attempt <= attempt
            for entry in self._of_request.get(request_id, ())
        )

    def writer_died(self, writer: WriterId) -> tuple[Effect, ...]:
        """The writer's process of this epoch has ended."""
        return self._apply_to_all([e for e in self._live.values() if e.writer == writer])

    def writer_seen(self, writer: WriterId) -> tuple[Effect, ...]:
        """The writer runs in this epoch, so its processes of other epochs have ended."""
        mine = [e for e in self._live.values() if e.writer.worker_id == writer.worker_id]
        return self._apply_to_all([e for e in mine if e.writer.epoch != writer.epoch])

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Puts reservations whose lease has ended into quarantine; frees no slot that may be
        written."""
        self._tombstones.expire(now)
        over = [e for e in self._live.values() if e.state in OPEN and now >= e.lease_end]
        return tuple(
            effect for entry in over for effect in self._apply(entry, ReservationLeaseEnded())
        )

    def reserved(self, request_id: str, attempt: int) -> Reservation | None:
        """The promise of an open reservation, to answer a repeated Reserve as the first."""
        for entry in self._of_request.get(request_id, ()):
            if entry.reservation.attempt == attempt and entry.state in OPEN:
                return entry.reservation
        return None

    def state_of(self, reservation_id: str) -> ReservationState | None:
        entry = self._live.get(reservation_id) or self._closed.get(reservation_id)
        return entry.state if entry else None

    def writers(self) -> tuple[WriterId, ...]:
        """The writers of all reservations that have not ended."""
        order = {entry.writer: None for entry in self._live.values()}
        return tuple(order)

    def statistics(self) -> ReceiverStatistics:
        waiting = [e for e in self._live.values() if e.state is ReservationState.EXPIRING]
        return ReceiverStatistics(
            len(self._live) - len(waiting),
            len(waiting),
            sum(len(entry.reservation.wanted) for entry in waiting),
            self._num_refused,
            self._num_skipped_units,
        )

    def _apply_to_all(self, entries: list[_OpenReservation]) -> tuple[Effect, ...]:
        return tuple(effect for entry in entries for effect in self._apply(entry, WriterDied()))

    def _apply(self, entry: _OpenReservation, event: ReservationEvent) -> tuple[Effect, ...]:
        """Changes a state: the only place that does, and the source of the entry's effects."""
        before, entry.state = entry.state, next_state(entry.state, event)
        if entry.state is before:
            return ()
        if entry.state in TERMINAL:
            self._close(entry)
        if entry.state is ReservationState.COMMITTED:
            return (StartDecoding(entry.request_id, entry.reservation),)
        if entry.state is ReservationState.EXPIRING:
            return (StopWriter(entry.request_id, entry.reservation, entry.writer),)
        if entry.state in TERMINAL:
            return (FreeSlots(entry.request_id, entry.reservation),)
        return ()

    def _close(self, entry: _OpenReservation) -> None:
        reservation_id = entry.reservation.reservation_id
        self._closed[reservation_id] = self._live.pop(reservation_id)
        entry.received, entry.generations = {}, {}
        while len(self._closed) > self._limits.max_closed:
            self._forget(self._closed.popitem(last=False)[1])

    def _forget(self, entry: _OpenReservation) -> None:
        left = [other for other in self._of_request[entry.request_id] if other is not entry]
        self._of_request[entry.request_id] = left
        if not left:
            del self._of_request[entry.request_id]

    def _progress(self, entry: _OpenReservation, event: ReservationEvent, now: float) -> None:
        self._apply(entry, event)
        entry.lease_end = now + entry.reservation.lease_seconds

    def _open_entry(self, fence: WriteFence, now: float) -> _OpenReservation:
        entry = self._entry(fence)
        if entry.state not in OPEN or now >= entry.lease_end:
            raise self._refusal(LeaseLost(f"reservation {fence.reservation_id} is {entry.state}"))
        return entry

    def _entry(self, fence: WriteFence) -> _OpenReservation:
        if fence.epoch != self.epoch:
            raise self._refusal(
                WrongEpoch(f"this is epoch {self.epoch}, the message is for {fence.epoch}")
            )
        entry = self._live.get(fence.reservation_id) or self._closed.get(fence.reservation_id)
        if entry is None or entry.reservation.attempt != fence.attempt:
            raise self._refusal(
                LeaseLost(f"no reservation {fence.reservation_id} for attempt {fence.attempt}")
            )
        return entry

    def _refusal(self, error: Stale) -> Stale:
        self._num_refused += 1
        return error
