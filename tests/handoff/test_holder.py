"""Prefill keeps its slots until no writer reads them, and releases them once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ferryman.errors import QueueFull
from ferryman.handoff.holder import (
    TRANSITIONS,
    Hold,
    HoldEffect,
    HoldState,
    HoldTable,
    ReleaseHold,
    StopSending,
)

NAMES = ["res-1", "res-2", "res-3", "res-4"]


def hold(name: str = "res-1", request_id: str = "req-1") -> Hold:
    return Hold(request_id, 1, name, 9, 5.0)


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(HoldState)


def test_decodes_answer_releases_what_no_send_reads() -> None:
    table = HoldTable()
    table.hold(hold(), 0.0)
    assert table.try_send("res-1", 1.0)
    assert table.send_ended("res-1") == ()
    assert table.answered("res-1", 9) == (ReleaseHold(hold()),)
    assert table.answered("res-1", 9) == ()
    assert not table.try_send("res-1", 1.0)


def test_a_send_under_way_outlives_the_lease() -> None:
    table = HoldTable()
    table.hold(hold(), 0.0)
    assert table.try_send("res-1", 1.0)
    assert table.try_send("res-1", 1.0)
    assert table.expire(5.0) == (StopSending(hold()),)
    assert table.expire(1e9) == ()
    assert table.send_ended("res-1") == ()
    assert table.send_ended("res-1") == (ReleaseHold(hold()),)


def test_progress_renews_and_silence_releases() -> None:
    table = HoldTable()
    table.hold(hold(), 0.0)
    table.renew("res-1", 4.0)
    assert table.expire(8.9) == ()
    assert table.expire(9.0) == (ReleaseHold(hold()),)
    assert table.expire(1e9) == (), "it is over"


def test_an_answer_of_another_life_of_decode_counts_for_nothing() -> None:
    table = HoldTable()
    table.hold(hold(), 0.0)
    assert table.answered("res-1", 8) == ()
    assert len(table) == 1


def test_one_answer_of_four_receivers_releases_one_hold_of_four() -> None:
    table = HoldTable()
    for name in NAMES:
        table.hold(hold(name), 0.0)
    assert table.answered("res-2", 9) == (ReleaseHold(hold("res-2")),)
    assert len(table) == 3
    assert len(table.cancel("req-1", 1)) == 3


def test_the_number_of_holds_is_bounded() -> None:
    table = HoldTable(max_holds=1)
    table.hold(hold(), 0.0)
    with pytest.raises(QueueFull):
        table.hold(hold("res-2"), 0.0)


class HoldMachine(RuleBasedStateMachine):
    """Any order of answers, sends, cancels and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = HoldTable()
        self.sends: dict[str, int] = {}
        self.lease_ends: dict[str, float] = {}
        self.released: set[str] = set()
        self.now = 0.0

    def take(self, effects: tuple[HoldEffect, ...]) -> None:
        for effect in effects:
            name = effect.hold.reservation_id
            assert name not in self.released, "nothing comes of a hold that was released"
            if isinstance(effect, ReleaseHold):
                assert self.sends[name] == 0, "released while a send reads"
                self.released.add(name)

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        if name not in self.sends:
            self.sends[name], self.lease_ends[name] = 0, self.now + 5.0
            self.table.hold(hold(name, f"req-{name[-1]}"), self.now)

    @rule(name=st.sampled_from(NAMES))
    def send(self, name: str) -> None:
        if self.table.try_send(name, self.now):
            assert name not in self.released
            assert self.now < self.lease_ends[name], "a send began behind the lease"
            self.sends[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def renew(self, name: str) -> None:
        self.table.renew(name, self.now)
        if name in self.lease_ends:
            self.lease_ends[name] = self.now + 5.0

    @rule(name=st.sampled_from(NAMES))
    def end_a_send(self, name: str) -> None:
        if self.sends.get(name):
            self.sends[name] -= 1
            self.take(self.table.send_ended(name))

    @rule(name=st.sampled_from(NAMES), epoch=st.sampled_from([8, 9]))
    def answer(self, name: str, epoch: int) -> None:
        self.take(self.table.answered(name, epoch))

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: str) -> None:
        self.take(self.table.cancel(f"req-{name[-1]}", 1))

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def let_time_pass(self, seconds: float) -> None:
        """Leases end here; what follows may come before anybody has looked."""
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.take(self.table.expire(self.now))
        over = {name for name, end in self.lease_ends.items() if self.now >= end}
        reading = {name for name, num_sends in self.sends.items() if num_sends}
        assert over <= self.released | reading, "a lease that is over releases what is not read"

    @invariant()
    def what_is_not_released_is_held(self) -> None:
        assert len(self.table) == len(self.sends.keys() - self.released)

    def teardown(self) -> None:
        self.let_time_pass(1e6)
        self.sweep()
        for name in list(self.sends):
            while self.sends[name]:
                self.end_a_send(name)
        assert self.released == self.sends.keys()


TestHolds = HoldMachine.TestCase
TestHolds.settings = settings(max_examples=80, stateful_step_count=30)
