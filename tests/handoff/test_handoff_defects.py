"""Known ways to get a hand-off wrong (the catalogue's rows 28, 29, 31, 32 and 33).

Memory is a list of stamps: a slot holds its last write, and the owner of the slot asserts that the
stamp is its own. Rows 8 and 9 are in test_values, row 34 in test_usage.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind
from ferryman.errors import LeaseLost, Stale
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
from ferryman.handoff.values import Reservation, WantedUnit

EPOCH = 9
PREFILL = WriterId("prefill-00000001", 4)


def reservation(name: str, generation: int = 1) -> Reservation:
    return Reservation(name, EPOCH, 1, (WantedUnit(Kind.FULL, 0, generation),), 5.0)


def fence(name: str) -> WriteFence:
    return WriteFence(EPOCH, name, 1)


class OneSlot:
    """A decode worker with one slot, given to one reservation after the other."""

    def __init__(self) -> None:
        self.table = ReservationTable(EPOCH, ReceiverLimits())
        self.owner = ""
        self.generation = 0
        self.stamp = ""

    def try_offer(self, name: str, now: float) -> bool:
        if self.owner:
            return False
        self.owner, self.generation, self.stamp = name, self.generation + 1, ""
        self.table.offer(f"req-{name}", reservation(name, self.generation), PREFILL, now)
        return True

    def do(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, FreeSlots):
                assert effect.reservation.reservation_id == self.owner
                self.owner = self.stamp = ""

    def check(self) -> None:
        assert self.stamp in ("", self.owner), f"{self.stamp} wrote into the slot of {self.owner}"


@given(st.lists(st.sampled_from(["offer", "write", "cancel", "lapse", "stop", "restart"])))
def test_row_28_a_delayed_one_sided_write_never_hits_a_foreign_slot(script: list[str]) -> None:
    """A writer keeps writing, unasked, to every slot it was ever given until it was stopped."""
    decode, now = OneSlot(), 0.0
    writing: list[str] = []
    for number, step in enumerate(script):
        now += 1.0
        if step == "offer" and decode.try_offer(f"res-{number}", now):
            writing.append(f"res-{number}")
        elif step == "write" and writing:
            decode.stamp = writing[0]
        elif step == "cancel" and decode.owner:
            decode.do(decode.table.abort(f"req-{decode.owner}", 1, now).effects)
        elif step == "lapse":
            now += 100.0
            decode.do(decode.table.expire(now))
        elif step == "stop" and writing:
            decode.do(decode.table.writer_stopped(fence(writing.pop(0))))
        elif step == "restart":
            writing.clear()
            decode.do(decode.table.writer_died(PREFILL))
        decode.check()


def test_row_29_an_acknowledgement_counts_for_the_reservation_it_names_and_no_other() -> None:
    table = ReservationTable(EPOCH, ReceiverLimits())
    for name in ("res-1", "res-2"):
        table.offer(f"req-{name}", reservation(name), PREFILL, 0.0)
        table.abort(f"req-{name}", 1, 0.0)
    assert table.writer_stopped(fence("res-1")) == (FreeSlots("req-res-1", reservation("res-1")),)
    assert table.writer_stopped(fence("res-1")) == ()
    assert table.state_of("res-2") is ReservationState.EXPIRING
    with pytest.raises(Stale):
        table.writer_stopped(WriteFence(EPOCH - 1, "res-2", 1))
    assert table.state_of("res-2") is ReservationState.EXPIRING


def test_row_31_a_write_for_the_last_tenant_of_a_slot_is_refused() -> None:
    decode = OneSlot()
    assert decode.try_offer("res-1", 0.0)
    decode.do(decode.table.writer_stopped(fence("res-1")))
    assert decode.try_offer("res-2", 1.0)
    with pytest.raises(LeaseLost):
        decode.table.try_write(fence("res-1"), WantedUnit(Kind.FULL, 0, 1), 1.0)
    with pytest.raises(Stale, match="generation 2 of its slot, not 1"):
        decode.table.try_write(fence("res-2"), WantedUnit(Kind.FULL, 0, 1), 1.0)


def test_row_32_nothing_late_recreates_a_reservation() -> None:
    table = ReservationTable(EPOCH, ReceiverLimits(max_closed=0))
    table.offer("req-1", reservation("res-1"), PREFILL, 0.0)
    table.writer_died(PREFILL)
    late: list[Callable[[], object]] = [
        lambda: table.try_write(fence("res-1"), WantedUnit(Kind.FULL, 0, 1), 1.0),
        lambda: table.renew(fence("res-1"), 1.0),
        lambda: table.commit(fence("res-1"), (), (), 1.0),
        lambda: table.writer_stopped(fence("res-1")),
    ]
    for message in late:
        with pytest.raises(LeaseLost):
            message()
    assert table.state_of("res-1") is None


@pytest.mark.parametrize("has_begun", [False, True], ids=["offered", "receiving"])
@pytest.mark.parametrize(
    "end", ["router cancels", "lease lapses", "prefill gives up", "prefill dies"]
)
def test_row_33_every_end_reaches_both_sides_at_every_stage(end: str, has_begun: bool) -> None:
    table = ReservationTable(EPOCH, ReceiverLimits())
    table.offer("req-1", reservation("res-1"), PREFILL, 0.0)
    if has_begun:
        assert table.try_write(fence("res-1"), WantedUnit(Kind.FULL, 0, 1), 0.0)
    ends: dict[str, Callable[[], tuple[Effect, ...]]] = {
        "router cancels": lambda: table.abort("req-1", 1, 1.0).effects,
        "lease lapses": lambda: table.expire(100.0),
        "prefill gives up": lambda: table.writer_stopped(fence("res-1")),
        "prefill dies": lambda: table.writer_died(PREFILL),
    }
    (effect,) = ends[end]()
    assert isinstance(effect, FreeSlots if end.startswith("prefill") else StopWriter)
    with pytest.raises(LeaseLost):
        table.try_write(fence("res-1"), WantedUnit(Kind.FULL, 0, 1), 1.0)
    answer = table.commit(fence("res-1"), (), (), 1.0)
    assert not any(isinstance(effect, StartDecoding) for effect in answer.effects)
    assert table.state_of("res-1") in TERMINAL
