"""Steps that verify drafts, on stamps: what they read and write; how each wrong one is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.doubles.fake_engine import FakeEngine, WrongStamp
from tests.doubles.sanitizer import FREED, UNORDERED
from tests.doubles.stamps import fake_manifest, fake_tokens
from tests.engine.plans import Guest, decode, full_pages, prefill, verify
from tests.engine.test_recording import RecordingHouse

from ferryman.cache.manifest import Kind
from ferryman.engine.ops import SlotConflict, check_slots
from ferryman.schedule.batch import SlotOps, SlotSnapshot, StepOutcome
from ferryman.schedule.drafting import ON_DEVICE

PAGE = 4
ANNA = Guest("anna", [3, 1, 4, 1, 5, 9], row=0, working_slot=2, pages=full_pages(7, 3, 5, 6))
RIGHT = fake_tokens(ANNA.tokens, 9, 1000)
CLEAR = SlotOps(clears=(2,))


def engine() -> FakeEngine:
    fake = FakeEngine(
        fake_manifest(PAGE), {Kind.FULL: 8, Kind.RECURRENT: 8}, max_rows=2, max_len=40
    )
    fake.run(prefill(0, [(ANNA, 0, 6)], CLEAR))
    return fake


def tokens(outcome: StepOutcome) -> list[int]:
    return [sampled.token_id for sampled in outcome.sampled]


def test_a_token_is_drawn_behind_every_draft() -> None:
    found = engine().run(verify(1, ANNA, 6, RIGHT[1:4], scratch=(3, 4, 5)))
    assert tokens(found) == RIGHT[1:5]
    assert found.drafts == tuple(RIGHT[1:4])


def test_behind_a_wrong_draft_other_things_are_drawn_and_leave_no_trace() -> None:
    fake, wrong = engine(), (RIGHT[2] + 1) % 1000
    found = fake.run(verify(1, ANNA, 6, [RIGHT[1], wrong, 5], scratch=(3, 4, 5)))
    assert tokens(found)[:2] == RIGHT[1:3]
    assert tokens(found)[2] != RIGHT[3]
    moved = replace(ANNA, working_slot=3)  # the state behind the draft that was right
    assert tokens(fake.run(decode(2, [(moved, 8)]))) == [RIGHT[3]]


@pytest.mark.parametrize("slot", [2, 4])
def test_to_go_on_from_another_runs_state_is_noticed(slot: int) -> None:
    fake = engine()
    fake.run(verify(1, ANNA, 6, [RIGHT[1], 5], scratch=(3, 4)))
    with pytest.raises(WrongStamp, match=f"recurrent slot {slot} holds the state"):
        fake.run(decode(2, [(replace(ANNA, working_slot=slot), 8)]))


def test_a_draft_that_reads_another_ones_state_is_noticed() -> None:
    step = verify(1, ANNA, 6, RIGHT[1:3], scratch=(3, 4))
    with pytest.raises(
        WrongStamp, match=r"recurrent slot 2 .* of position 7, not .* of position 8"
    ):
        engine().run(replace(step, read_slots=np.array([2, 2, 2])))


def test_a_state_is_saved_as_the_step_before_left_it() -> None:
    fake = engine()
    fake.run(verify(1, ANNA, 6, RIGHT[1:2], scratch=(3,)))
    moved = replace(ANNA, working_slot=3)
    fake.run(verify(2, moved, 8, RIGHT[3:4], (2,), SlotOps(saves=(SlotSnapshot(3, 5, 8),))))
    assert fake.slabs.stamps(Kind.RECURRENT)[5, 1] == 8
    with pytest.raises(WrongStamp, match="of a state at 10"):
        fake.run(
            decode(
                3, [(replace(ANNA, working_slot=2), 10)], SlotOps(saves=(SlotSnapshot(2, 5, 8),))
            )
        )


def test_a_draft_that_nobody_names_is_noticed() -> None:
    with pytest.raises(WrongStamp, match="named on the device"):
        engine().run(verify(1, ANNA, 6, [ON_DEVICE], scratch=(3,)))


def test_two_drafts_that_write_one_slot_are_refused() -> None:
    with pytest.raises(SlotConflict, match="part 1 and by the forward of part 2"):
        check_slots(verify(1, ANNA, 6, RIGHT[1:3], scratch=(3, 3)))


def test_a_save_into_a_slot_of_scratch_is_refused() -> None:
    ops = SlotOps(saves=(SlotSnapshot(2, 3, 6),))
    with pytest.raises(SlotConflict, match="part 1 and by the snapshot of slot 2"):
        check_slots(verify(1, ANNA, 6, RIGHT[1:3], (3, 4), ops))


# The sanitizer: the slots that each operation reads and writes.


def test_the_recorder_hears_of_every_state_of_a_run() -> None:
    house = RecordingHouse()
    step = verify(1, ANNA, 6, RIGHT[1:3], (3, 4), SlotOps(saves=(SlotSnapshot(2, 5, 6),)))
    heard = [
        (
            operation.name,
            [h.slot for h in operation.reads if h.kind is Kind.RECURRENT],
            [h.slot for h in operation.writes if h.kind is Kind.RECURRENT],
        )
        for operation in house.recorded.operations(step)
    ]
    house.stream.close()
    forward = "forward of anna of step 1"
    assert heard == [
        ("save of step 1", [2], [5]),
        (forward, [2], [2]),
        (forward, [2], [3]),
        (forward, [3], [4]),
    ]


def test_a_run_whose_states_change_places_when_it_commits_is_clean() -> None:
    house = RecordingHouse()
    house.run(prefill(0, [(ANNA, 0, 6)], CLEAR))
    house.run(verify(1, ANNA, 6, [RIGHT[1], 5], scratch=(3, 4)))
    moved = replace(ANNA, working_slot=3)
    house.run(verify(2, moved, 8, RIGHT[3:4], (2,), SlotOps(saves=(SlotSnapshot(3, 5, 8),))))
    house.transfer.store_unit(Kind.RECURRENT, 5, memoryview(bytearray(64)))
    house.stream.close()
    assert house.recorder.findings() == ()


def test_a_scratch_slot_given_away_while_its_run_is_on_its_way_is_named() -> None:
    house = RecordingHouse()
    house.run(prefill(0, [(ANNA, 0, 6)], CLEAR))
    house.recorded.submit(verify(1, ANNA, 6, [RIGHT[1], 5], scratch=(3, 4))).result(60)
    house.transfer.store_unit(Kind.RECURRENT, 3, memoryview(bytearray(64)))
    house.recorded.freed([house.handle_of(Kind.RECURRENT, 4)])
    house.recorded.committed(1)
    house.recorded.planned(verify(2, ANNA, 7, [5], scratch=(4,)))
    house.stream.close()
    found = {(f.problem, f.handle.slot, f.second.name) for f in house.recorder.findings()}
    assert (UNORDERED, 3, "store") in found
    assert (UNORDERED, 4, "free") in found
    assert (FREED, 4, "forward of anna of step 2") in found
