"""One reservation at a time: fencing, leases, verdicts, quarantine."""

from __future__ import annotations

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import LeaseLost, QueueFull, Stale, WrongEpoch
from ferryman.handoff.commit_check import Corrupt, Gaps, LeaseOver, Verified
from ferryman.handoff.effects import (
    FreeSlots,
    ReceiverLimits,
    StartDecoding,
    StopWriter,
    WriteFence,
)
from ferryman.handoff.effects import WriterId as Life
from ferryman.handoff.receiver import ReservationTable
from ferryman.handoff.reservation import (
    TERMINAL,
    TRANSITIONS,
    Aborted,
    ReservationLeaseEnded,
    ReservationState,
    next_state,
)
from ferryman.handoff.values import PageRange, Reservation, UnitDigest, WantedUnit

EPOCH = 77
PREFILL = Life("prefill-00000001", 5)
UNITS = (
    WantedUnit(Kind.FULL, 2, 11),
    WantedUnit(Kind.FULL, 3, 12),
    WantedUnit(Kind.RECURRENT, 60, 4),
)
RANGES = (PageRange(Kind.FULL, 2, 4), PageRange(Kind.RECURRENT, 60, 61))


def reservation(name: str = "res-1", attempt: int = 1) -> Reservation:
    return Reservation(name, EPOCH, attempt, UNITS, 5.0)


def fence(name: str = "res-1", attempt: int = 1, epoch: int = EPOCH) -> WriteFence:
    return WriteFence(epoch, name, attempt)


def digests(*, wrong: int | None = None) -> tuple[UnitDigest, ...]:
    return tuple(
        UnitDigest(unit.kind, unit.index, b"bad" if place == wrong else b"%d" % unit.index)
        for place, unit in enumerate(UNITS)
    )


@pytest.fixture
def table() -> ReservationTable:
    table = ReservationTable(EPOCH, ReceiverLimits())
    assert table.offer("req-1", reservation(), PREFILL, 0.0) == ()
    return table


def write_everything(table: ReservationTable, now: float = 1.0) -> None:
    for unit, digest in zip(UNITS, digests(), strict=True):
        assert table.try_write(fence(), unit, now)
        table.record(fence(), digest, now)


def test_every_state_has_a_row_and_three_are_terminal() -> None:
    assert set(TRANSITIONS) == set(ReservationState)
    terminal = {ReservationState.COMMITTED, ReservationState.FAILED, ReservationState.FREED}
    assert terminal == TERMINAL


def test_neither_a_clock_nor_a_cancel_ends_a_quarantine() -> None:
    for event in (ReservationLeaseEnded(), Aborted()):
        assert next_state(ReservationState.EXPIRING, event) is ReservationState.EXPIRING


def test_a_verified_commit_starts_decoding_once_and_is_answered_alike_again(
    table: ReservationTable,
) -> None:
    write_everything(table)
    first = table.commit(fence(), RANGES, digests(), 2.0)
    assert first.verdict == Verified()
    assert first.effects == (StartDecoding("req-1", reservation()),)
    again = table.commit(fence(), (), (), 99.0)
    assert (again.verdict, again.effects) == (Verified(), ())


def test_units_that_did_not_arrive_are_gaps_and_free_the_slots(table: ReservationTable) -> None:
    assert table.try_write(fence(), UNITS[0], 1.0)
    table.record(fence(), digests()[0], 1.0)
    answer = table.commit(fence(), RANGES, digests(), 2.0)
    missing = (PageRange(Kind.FULL, 3, 4), PageRange(Kind.RECURRENT, 60, 61))
    assert answer.verdict == Gaps(missing)
    assert answer.effects == (FreeSlots("req-1", reservation()),)
    assert table.commit(fence(), RANGES, digests(), 2.0).verdict == Gaps(missing)


def test_a_unit_without_a_digest_is_a_gap(table: ReservationTable) -> None:
    write_everything(table)
    answer = table.commit(fence(), RANGES, digests()[:2], 2.0)
    assert answer.verdict == Gaps((PageRange(Kind.RECURRENT, 60, 61),))


def test_a_unit_the_writer_does_not_claim_is_a_gap(table: ReservationTable) -> None:
    write_everything(table)
    answer = table.commit(fence(), RANGES[:1], digests(), 2.0)
    assert answer.verdict == Gaps((PageRange(Kind.RECURRENT, 60, 61),))


def test_other_bytes_than_were_sent_are_corrupt_and_never_decoded(table: ReservationTable) -> None:
    write_everything(table)
    answer = table.commit(fence(), RANGES, digests(wrong=1), 2.0)
    assert answer.verdict == Corrupt((PageRange(Kind.FULL, 3, 4),))
    assert answer.effects == (FreeSlots("req-1", reservation()),)


@pytest.mark.parametrize("wrong", range(len(UNITS)), ids=[f"{u.kind} {u.index}" for u in UNITS])
@pytest.mark.parametrize("spoilt", ["on the way", "in what the writer says"])
def test_every_wanted_unit_is_compared(table: ReservationTable, wrong: int, spoilt: str) -> None:
    """Also the last one, the recurrent state: any one that differs spoils the hand-off."""
    arrived, said = digests(), digests(wrong=wrong)
    if spoilt == "on the way":
        arrived, said = said, arrived
    for unit, digest in zip(UNITS, arrived, strict=True):
        assert table.try_write(fence(), unit, 1.0)
        table.record(fence(), digest, 1.0)
    answer = table.commit(fence(), RANGES, said, 2.0)
    unit = UNITS[wrong]
    assert answer.verdict == Corrupt((PageRange(unit.kind, unit.index, unit.index + 1),))
    assert answer.effects == (FreeSlots("req-1", reservation()),)


def test_a_unit_written_again_needs_its_digest_again(table: ReservationTable) -> None:
    write_everything(table)
    assert table.try_write(fence(), UNITS[0], 1.5)
    answer = table.commit(fence(), RANGES, digests(), 2.0)
    assert answer.verdict == Gaps((PageRange(Kind.FULL, 2, 3),))


def test_what_is_offered_beyond_the_need_is_skipped_and_counted(table: ReservationTable) -> None:
    assert not table.try_write(fence(), WantedUnit(Kind.FULL, 0, 1), 1.0)
    write_everything(table)
    extra = UnitDigest(Kind.FULL, 0, b"0")
    offered = (PageRange(Kind.FULL, 0, 4), PageRange(Kind.RECURRENT, 60, 61))
    answer = table.commit(fence(), offered, (*digests(), extra), 2.0)
    assert answer.verdict == Verified(num_skipped=1)
    assert table.statistics().num_skipped_units == 1


@pytest.mark.parametrize(
    ("stale", "error"),
    [
        pytest.param(fence(epoch=EPOCH - 1), WrongEpoch, id="an earlier life of decode"),
        pytest.param(fence(attempt=2), LeaseLost, id="another attempt"),
        pytest.param(fence(name="res-0"), LeaseLost, id="an unknown reservation"),
    ],
)
def test_a_stale_address_is_refused_and_counted(
    table: ReservationTable, stale: WriteFence, error: type[Stale]
) -> None:
    with pytest.raises(error):
        table.try_write(stale, UNITS[0], 1.0)
    with pytest.raises(error):
        table.commit(stale, RANGES, digests(), 1.0)
    assert table.statistics().num_refused == 2


def test_a_write_for_an_earlier_tenant_of_the_slot_is_refused(table: ReservationTable) -> None:
    with pytest.raises(Stale, match="generation 11 of its slot, not 10"):
        table.try_write(fence(), WantedUnit(Kind.FULL, 2, 10), 1.0)


def test_writes_renew_the_lease_and_silence_ends_it(table: ReservationTable) -> None:
    assert table.expire(4.9) == ()
    table.renew(fence(), 4.0)
    assert table.expire(8.9) == ()
    assert table.expire(9.0) == (StopWriter("req-1", reservation(), PREFILL),)
    assert table.expire(1e9) == (), "time alone frees nothing"
    assert table.statistics().num_quarantined_slots == 3
    assert table.writer_stopped(fence()) == (FreeSlots("req-1", reservation()),)
    assert table.writer_stopped(fence()) == ()


def test_a_write_after_the_lease_is_refused_before_anyone_looked(table: ReservationTable) -> None:
    with pytest.raises(LeaseLost):
        table.try_write(fence(), UNITS[0], 5.0)


def test_a_commit_after_the_lease_is_told_so_and_ends_the_quarantine(
    table: ReservationTable,
) -> None:
    write_everything(table)
    table.expire(100.0)
    answer = table.commit(fence(), RANGES, digests(), 101.0)
    assert answer.verdict == LeaseOver()
    assert answer.effects == (FreeSlots("req-1", reservation()),)


def test_a_commit_after_the_lease_is_told_so_before_anyone_looked(table: ReservationTable) -> None:
    write_everything(table)
    answer = table.commit(fence(), RANGES, digests(), 6.0)
    assert answer.verdict == LeaseOver()
    assert answer.effects == (FreeSlots("req-1", reservation()),)


def test_an_abort_says_whether_writes_may_be_under_way(table: ReservationTable) -> None:
    answer = table.abort("req-1", 1, 1.0)
    assert answer.may_still_write
    assert answer.effects == (StopWriter("req-1", reservation(), PREFILL),)
    table.writer_stopped(fence())
    assert not table.abort("req-1", 1, 2.0).may_still_write


def test_an_abort_before_the_reservation_leaves_a_tombstone_for_a_minute() -> None:
    table = ReservationTable(EPOCH, ReceiverLimits())
    table.abort("req-1", 1, 0.0)
    with pytest.raises(Stale, match="cancelled"):
        table.offer("req-1", reservation(), PREFILL, 59.0)
    table.check_new("req-1", 2, 59.0)
    table.expire(60.0)
    table.check_new("req-1", 1, 60.0)


def test_a_repeated_reserve_finds_what_was_promised(table: ReservationTable) -> None:
    assert table.reserved("req-1", 1) == reservation()
    assert table.reserved("req-1", 2) is None
    table.abort("req-1", 1, 1.0)
    assert table.reserved("req-1", 1) is None


def test_cancelling_an_attempt_cancels_all_before_it(table: ReservationTable) -> None:
    assert table.abort("req-1", 3, 1.0).may_still_write
    table.abort("req-1", 2, 2.0)
    for attempt in (1, 2, 3):
        with pytest.raises(Stale, match="cancelled"):
            table.check_new("req-1", attempt, 3.0)
    table.check_new("req-1", 4, 3.0)


def test_a_new_attempt_gives_up_the_one_before_it(table: ReservationTable) -> None:
    effects = table.offer("req-1", reservation("res-2", 2), PREFILL, 1.0)
    assert effects == (StopWriter("req-1", reservation(), PREFILL),)
    with pytest.raises(Stale, match="reserved for attempt 2"):
        table.offer("req-1", reservation("res-3", 1), PREFILL, 1.0)


def test_the_death_of_the_writer_frees_in_every_open_state(table: ReservationTable) -> None:
    table.offer("req-2", reservation("res-2"), PREFILL, 1.0)
    table.abort("req-2", 1, 1.0)
    freed = table.writer_seen(Life(PREFILL.worker_id, PREFILL.epoch + 1))
    assert [type(effect) for effect in freed] == [FreeSlots, FreeSlots]
    assert table.writers() == ()
    assert table.writer_died(PREFILL) == ()


def test_another_life_of_another_worker_frees_nothing(table: ReservationTable) -> None:
    assert table.writer_seen(PREFILL) == ()
    assert table.writer_died(Life("prefill-00000002", 5)) == ()
    assert table.writers() == (PREFILL,)


def test_sizes_are_bounded() -> None:
    limits = ReceiverLimits(max_open=2, max_closed=1, max_tombstones=1)
    table = ReservationTable(EPOCH, limits)
    for name in ("a", "b"):
        table.offer(name, reservation(f"res-{name}"), PREFILL, 0.0)
    with pytest.raises(QueueFull):
        table.offer("c", reservation("res-c"), PREFILL, 0.0)
    table.writer_died(PREFILL)
    assert table.state_of("res-a") is None, "the older of two closed ones is forgotten"
    assert table.state_of("res-b") is ReservationState.FREED
    table.abort("x", 1, 0.0)
    table.abort("y", 1, 0.0)
    table.check_new("x", 1, 0.0)
    with pytest.raises(Stale):
        table.check_new("y", 1, 0.0)
