"""Any order of events against a model that knows who may still write where.

The model is one-sided: a writer that was given an offer can write without asking, until it says it
stopped, commits, or dies. Nothing but that may free its slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
)

from ferryman.cache.manifest import Kind
from ferryman.errors import LeaseLost, Stale
from ferryman.handoff.commit_check import LeaseOver, Verdict, Verified
from ferryman.handoff.effects import (
    Effect,
    FreeSlots,
    ReceiverLimits,
    StartDecoding,
    StopWriter,
    WriteFence,
    WriterId,
)
from ferryman.handoff.receiver import ReservationTable
from ferryman.handoff.reservation import TERMINAL, ReservationState
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, UnitName, WantedUnit

EPOCH = 3
LEASE = 5.0
UNITS = (
    WantedUnit(Kind.FULL, 0, 1),
    WantedUnit(Kind.FULL, 1, 4),
    WantedUnit(Kind.WINDOW, 1, 2),
    WantedUnit(Kind.RECURRENT, 9, 1),
)
RANGES = (
    PageRange(Kind.FULL, 0, 2),
    PageRange(Kind.WINDOW, 1, 2),
    PageRange(Kind.RECURRENT, 9, 10),
)
RIGHT = tuple(UnitDigest(unit.kind, unit.index, b"right") for unit in UNITS)


@dataclass
class Modelled:
    request_id: str
    reservation: Reservation
    writer: WriterId
    lease_end: float
    may_write: bool = True
    is_given_up: bool = False
    content: dict[UnitName, bytes] = field(default_factory=dict)
    ends: list[Effect] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def fence(self) -> WriteFence:
        return WriteFence(EPOCH, self.reservation.reservation_id, self.reservation.attempt)


class ReservationMachine(RuleBasedStateMachine):
    offered: Bundle[str] = Bundle("offered")

    def __init__(self) -> None:
        super().__init__()
        self.table = ReservationTable(EPOCH, ReceiverLimits(max_open=100))
        self.known: dict[str, Modelled] = {}
        self.terminal: dict[str, ReservationState] = {}
        self.epochs = {f"prefill-{name}": 1 for name in "ab"}
        self.now = 0.0

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            one = self.known[effect.reservation.reservation_id]
            if isinstance(effect, FreeSlots):
                assert not one.may_write, "freed while a living writer may write"
            if isinstance(effect, StopWriter):
                assert effect.writer == one.writer
                assert not one.ends
                one.is_given_up = True
            else:
                one.ends.append(effect)

    @rule(
        target=offered,
        request=st.sampled_from("xyz"),
        attempt=st.integers(1, 3),
        worker_id=st.sampled_from(["prefill-a", "prefill-b"]),
    )
    def offer(self, request: str, attempt: int, worker_id: str) -> str | MultipleResults[str]:
        name = f"res-{len(self.known)}"
        reservation = Reservation(name, EPOCH, attempt, UNITS, LEASE)
        writer = WriterId(worker_id, self.epochs[worker_id])
        one = Modelled(request, reservation, writer, self.now + LEASE)
        try:
            self.take(self.table.offer(request, reservation, one.writer, self.now))
        except Stale:
            return multiple()
        self.known[name] = one
        return name

    @rule(name=offered, unit=st.sampled_from(UNITS), digest=st.sampled_from([b"right", b"wrong"]))
    def write(self, name: str, unit: WantedUnit, digest: bytes) -> None:
        self._write(self.known[name], unit, digest)

    @rule(name=offered, wrong=st.none() | st.sampled_from(UNITS))
    def write_everything(self, name: str, wrong: WantedUnit | None) -> None:
        """Right, but for one unit or for none."""
        for unit in UNITS:
            self._write(self.known[name], unit, b"wrong" if unit is wrong else b"right")

    def _write(self, one: Modelled, unit: WantedUnit, digest: bytes) -> None:
        try:
            assert self.table.try_write(one.fence, unit, self.now)
            self.table.record(one.fence, UnitDigest(unit.kind, unit.index, digest), self.now)
        except LeaseLost:
            return
        assert not one.ends, "a write was taken into slots that belong to somebody else"
        assert self.now < one.lease_end, "a write was taken behind the lease"
        one.content[unit.name], one.lease_end = digest, self.now + LEASE

    @rule(name=offered)
    def renew(self, name: str) -> None:
        one = self.known[name]
        try:
            self.table.renew(one.fence, self.now)
        except LeaseLost:
            return
        assert not one.ends
        assert self.now < one.lease_end, "a lease that was over was renewed"
        one.lease_end = self.now + LEASE

    @rule(name=offered)
    def commit(self, name: str) -> None:
        one = self.known[name]
        had_ended = bool(one.ends)
        was_open = not had_ended and not one.is_given_up and self.now < one.lease_end
        one.may_write = False
        answer = self.table.commit(one.fence, RANGES, RIGHT, self.now)
        one.verdicts.append(answer.verdict)
        self.take(answer.effects)
        is_verified = isinstance(answer.verdict, Verified)
        if was_open:
            is_right = one.content == {unit.name: unit.digest for unit in RIGHT}
            assert is_verified == is_right, "verified means every unit, and nothing else does"
        elif not had_ended:
            assert answer.verdict == LeaseOver(), "also before anybody has looked at the lease"
        started = any(isinstance(effect, StartDecoding) for effect in one.ends)
        assert started == is_verified

    @rule(name=offered)
    def abort_by_the_writer(self, name: str) -> None:
        """Its word that it is done follows with the next rule, or late, or never."""
        one = self.known[name]
        was_over, num_ends = bool(one.ends), len(one.ends)
        effects = self.table.give_up(one.fence)
        self.take(effects)
        assert len(one.ends) == num_ends, "giving up frees nothing by itself"
        if was_over:
            assert effects == (), "what was committed, failed or freed stays so"

    @rule(name=offered)
    def stop_the_writer(self, name: str) -> None:
        one = self.known[name]
        one.may_write = False
        self.take(self.table.writer_stopped(one.fence))

    @rule(worker_id=st.sampled_from(["prefill-a", "prefill-b"]))
    def restart_a_writer(self, worker_id: str) -> None:
        self.epochs[worker_id] += 1
        for one in self.known.values():
            if one.writer.worker_id == worker_id:
                one.may_write = False
        self.take(self.table.writer_seen(WriterId(worker_id, self.epochs[worker_id])))

    @rule(request=st.sampled_from("xyz"), attempt=st.integers(1, 3))
    def abort(self, request: str, attempt: int) -> None:
        answer = self.table.abort(request, attempt, self.now)
        self.take(answer.effects)
        mine = [
            one
            for one in self.known.values()
            if one.request_id == request and one.reservation.attempt <= attempt and not one.ends
        ]
        assert answer.may_still_write == bool(mine)

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE, 70.0]))
    def let_time_pass(self, seconds: float) -> None:
        """Leases end here; what follows may come before anybody has looked."""
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.take(self.table.expire(self.now))

    def wait(self, seconds: float) -> None:
        self.let_time_pass(seconds)
        self.sweep()

    @invariant()
    def terminal_states_absorb_and_slots_end_once(self) -> None:
        for name, state in self.terminal.items():
            assert self.table.state_of(name) is state
        for name in self.known:
            state_now = self.table.state_of(name)
            assert state_now is not None
            if state_now in TERMINAL:
                self.terminal[name] = state_now
        for name, one in self.known.items():
            assert len(one.ends) == (name in self.terminal)
            assert len({type(verdict) for verdict in one.verdicts}) <= 1

    def teardown(self) -> None:
        """Once leases are over and writers are gone, everything is terminal."""
        self.wait(1e6)
        for worker_id in self.epochs:
            self.restart_a_writer(worker_id)
        self.terminal_states_absorb_and_slots_end_once()
        assert self.terminal.keys() == self.known.keys()
        assert self.table.statistics().num_quarantined_slots == 0


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=200, stateful_step_count=40)
