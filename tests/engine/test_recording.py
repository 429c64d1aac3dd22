"""The recorder around a real stream: right schedules are clean, and each planted fault is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.sanitizer import (
    FREED,
    TWO_INITIALISERS,
    UNORDERED,
    Operation,
    Recorder,
    check,
)
from tests.doubles.stamps import fake_manifest, fake_tokens
from tests.doubles.step_recorder import FORWARD, RecordingStream, RecordingTransfer, step_event
from tests.engine.plans import Guest, decode, full_pages, load, prefill, with_snapshots

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle
from ferryman.engine.memory.transfer import digest_of
from ferryman.engine.ops import without_ops
from ferryman.engine.stream import ForwardStream
from ferryman.schedule.batch import PrefillStep, SlotCopy, SlotOps, SlotSnapshot, StepPlan

PAGE = 4
ANNA = Guest("anna", [3, 1, 4, 1, 5, 9], row=0, working_slot=2, pages=full_pages(7, 3, 5, 6))
FIRST = with_snapshots(prefill(0, [(ANNA, 0, 6)], SlotOps(clears=(2,))), (4, 5))


class RecordingHouse:
    """A recorded engine, and the generation that each slot has now."""

    def __init__(self) -> None:
        sizes = {Kind.FULL: 8, Kind.RECURRENT: 6}
        self.engine = FakeEngine(fake_manifest(PAGE), sizes, max_rows=2, max_len=64)
        self.generations: Counter[tuple[Kind, int]] = Counter()
        self.recorder = Recorder()
        self.stream = ForwardStream(self.engine)
        self.recorded = RecordingStream(self.stream, self.recorder, self.handle_of, page_size=PAGE)
        self.transfer = RecordingTransfer(self.engine.transfer, self.recorder, self.handle_of)

    def handle_of(self, kind: Kind, slot: int) -> SlotHandle:
        return SlotHandle(kind, slot, self.generations[kind, slot])

    def run(self, plan: StepPlan) -> int:
        token = self.recorded.submit(plan).result(60).sampled[0].token_id
        self.recorded.committed(plan.step_id)
        return token

    def reuse(self, kind: Kind, slot: int) -> None:
        self.recorded.freed([self.handle_of(kind, slot)])
        self.generations[kind, slot] += 1


@pytest.fixture
def house() -> Iterator[RecordingHouse]:
    made = RecordingHouse()
    yield made
    made.stream.close()


def test_plan_run_commit_is_clean(house: RecordingHouse) -> None:
    tokens = [house.run(FIRST), house.run(decode(1, [(ANNA, 6)]))]
    house.transfer.store_unit(Kind.FULL, 7, memoryview(bytearray(64)))
    house.reuse(Kind.RECURRENT, 5)
    tokens.append(house.run(decode(2, [(ANNA, 7)], SlotOps(snapshots=(SlotSnapshot(2, 5, 8),)))))
    assert house.recorder.findings() == ()
    assert tokens == fake_tokens(ANNA.tokens, 3, house.engine.vocab_size)


def test_storing_a_page_of_a_step_that_was_not_committed_is_named(house: RecordingHouse) -> None:
    future = house.recorded.submit(FIRST)
    # The value happens to be there already; the edge is not.
    future.result(60)
    house.transfer.store_unit(Kind.FULL, 7, memoryview(bytearray(64)))
    (found,) = house.recorder.findings()
    assert (found.problem, found.second.name) == (UNORDERED, "store")
    assert "'forward of anna of step 0' on forward" in str(found)


def test_a_transfer_on_another_stream_needs_the_steps_event(house: RecordingHouse) -> None:
    house.run(FIRST)
    copies = RecordingTransfer(
        house.engine.transfer, house.recorder, house.handle_of, stream="copies"
    )
    copies.after(step_event(0)).digest(Kind.FULL, 7)
    assert house.recorder.findings() == ()
    house.run(decode(1, [(ANNA, 6)]))
    copies.read(Kind.FULL, 3)
    assert [f.second.name for f in house.recorder.findings()] == ["read"]


def test_a_copy_from_a_slot_that_was_given_away_is_named(house: RecordingHouse) -> None:
    house.run(FIRST)
    meant = house.handle_of(Kind.RECURRENT, 5)
    house.reuse(Kind.RECURRENT, 5)
    house.generations[Kind.RECURRENT, 5] = meant.generation
    fork = Guest("fork", ANNA.tokens, row=0, working_slot=4, pages=ANNA.pages)
    house.run(prefill(1, [(fork, 4, 6)], SlotOps(copies=(SlotCopy(5, 4),))))
    assert {(f.problem, f.second.name) for f in house.recorder.findings()} == {
        (FREED, "copy of step 1")
    }


def test_freeing_a_slot_of_a_step_in_flight_is_named(house: RecordingHouse) -> None:
    house.recorded.submit(FIRST).result(60)
    house.reuse(Kind.FULL, 7)
    (found,) = house.recorder.findings()
    assert (found.problem, found.first.stream, found.second.name) == (UNORDERED, FORWARD, "free")


def test_a_replay_has_no_slot_operations_to_record(house: RecordingHouse) -> None:
    house.run(FIRST)
    recorded = house.recorded.operations(FIRST)
    again = house.recorded.operations(without_ops(FIRST))
    assert [bool(operation.initialises) for operation in recorded] == [True, True]
    assert [bool(operation.initialises) for operation in again] == [False]


BERT = Guest("bert", ANNA.tokens, row=1, working_slot=4, pages=full_pages(7, 1))
UNIT = bytes(64)
LOAD = load(BERT, Kind.FULL, 1, 0, UNIT, digest_of(UNIT))


def resumed(ops: SlotOps) -> PrefillStep:
    """A second prompt in step 1, which reads its first page from the tree's slot 7."""
    return prefill(1, [(BERT, 4, 6)], ops)


def check_all(operations: Iterable[Operation]) -> set[tuple[str, str, str]]:
    return {(f.problem, f.first.name, f.second.name) for f in check(operations)}


def test_a_load_into_a_slot_that_came_back_after_its_last_reader_is_clean(
    house: RecordingHouse,
) -> None:
    house.run(FIRST)
    house.reuse(Kind.FULL, 1)
    house.recorded.planned(resumed(SlotOps(loads=(LOAD,), clears=(4,))))
    assert house.recorder.findings() == ()


def test_a_load_that_its_step_does_not_wait_for_is_named(house: RecordingHouse) -> None:
    found = house.recorded.operations(resumed(SlotOps(loads=(LOAD,))))
    assert check_all(found) == set()
    waits = [step for step in found if "loads 1" in step.waits]
    assert [step.name for step in waits] == ["forward of bert of step 1"]
    planted = [replace(step, waits=("plan 1",)) if step in waits else step for step in found]
    assert check_all(planted) == {
        (UNORDERED, "load for bert of step 1", "forward of bert of step 1")
    }


def test_a_load_into_a_slot_that_a_step_in_flight_still_reads_is_named(
    house: RecordingHouse,
) -> None:
    house.recorded.planned(FIRST)
    into_seven = load(BERT, Kind.FULL, 7, 0, UNIT, digest_of(UNIT))
    house.generations[Kind.FULL, 7] += 1  # given away as if nobody held it
    house.recorded.planned(resumed(SlotOps(loads=(into_seven,))))
    found = house.recorder.findings()
    assert {(f.problem, f.first.name, f.second.name) for f in found} == {
        (UNORDERED, "forward of anna of step 0", "load for bert of step 1")
    }
    assert "scheduler" not in found[0].remedy
    assert "forward records after" in found[0].remedy
    assert "copies waits for before" in found[0].remedy


def test_a_clear_after_a_load_is_named(house: RecordingHouse) -> None:
    """Defect 4. Within one step it is refused, so the clear is the next step's."""
    into_working = load(BERT, Kind.RECURRENT, 4, 0, UNIT, digest_of(UNIT))
    house.recorded.planned(replace(resumed(SlotOps(loads=(into_working,))), step_id=0))
    house.recorded.planned(resumed(SlotOps(clears=(4,))))
    assert [(f.problem, f.first.name, f.second.name) for f in house.recorder.findings()] == [
        (TWO_INITIALISERS, "load for bert of step 0", "clear of step 1")
    ]


def test_sending_a_page_before_its_load_is_committed_is_named(house: RecordingHouse) -> None:
    """Defect 35."""
    house.recorded.planned(replace(resumed(SlotOps(loads=(LOAD,), clears=(4,))), step_id=0))
    house.transfer.read(Kind.FULL, 1)
    assert {(f.problem, f.second.name) for f in house.recorder.findings()} == {(UNORDERED, "read")}
    again = RecordingHouse()
    again.recorded.planned(replace(resumed(SlotOps(loads=(LOAD,), clears=(4,))), step_id=0))
    again.recorded.committed(0)
    again.transfer.read(Kind.FULL, 1)
    again.stream.close()
    assert again.recorder.findings() == ()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["step", "commit", "store", "snapshot"]), max_size=20))
def test_any_schedule_of_two_steps_in_flight_that_commits_before_it_touches_is_clean(
    wishes: list[str],
) -> None:
    house, position, flying = RecordingHouse(), 6, [0]
    house.recorded.submit(FIRST)
    for wish in wishes:
        if len(flying) == 2 or (wish != "step" and flying):
            house.recorded.committed(flying.pop(0))
        if wish == "store" and not flying:
            house.transfer.store_unit(Kind.FULL, 7, memoryview(bytearray(64)))
        if wish == "snapshot" and not flying:
            house.reuse(Kind.RECURRENT, 5)
        if wish in ("step", "snapshot") and position < 16 and len(flying) < 2:
            frozen = wish == "snapshot" and not flying
            ops = SlotOps(snapshots=(SlotSnapshot(2, 5, position + 1),)) if frozen else SlotOps()
            step_id = position - 5
            house.recorded.submit(decode(step_id, [(ANNA, position)], ops))
            flying.append(step_id)
            position += 1
    house.stream.close()
    assert [str(finding) for finding in house.recorder.findings()] == []
    assert house.stream.steps_done == position - 5
