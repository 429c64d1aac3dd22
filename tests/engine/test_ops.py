"""One initialiser a slot, one writer a destination, and each step's operations once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.plans import Guest, decode, full_pages, load, prefill, with_snapshots

from ferryman.cache.manifest import Kind
from ferryman.engine.ops import OnceOnly, SlotConflict, check_slots
from ferryman.schedule.batch import SlotCopy, SlotOps, SlotSnapshot

ANNA = Guest("anna", [1, 2, 3, 4], row=0, working_slot=2, pages=full_pages(0, 1))
DIGEST = bytes(16)
SLOTS = st.integers(0, 5)


def conflict_of(ops: SlotOps) -> SlotConflict:
    with pytest.raises(SlotConflict) as caught:
        check_slots(decode(3, [(ANNA, 4)], ops))
    return caught.value


def test_a_slot_with_two_initialisers_is_an_error_naming_both() -> None:
    """Defect 4: a loaded state was overwritten by a clear."""
    loaded = load(ANNA, Kind.RECURRENT, 5, 0, b"", DIGEST)
    found = conflict_of(SlotOps(loads=(loaded,), clears=(5,)))
    assert found.operations == ("the load of page 0 for anna", "the clear")
    assert "step 3: recurrent slot 5" in str(found)
    assert conflict_of(SlotOps(copies=(SlotCopy(1, 5),), clears=(5,))).slot == 5


def test_equal_slot_numbers_of_two_kinds_are_two_slots() -> None:
    loads = tuple(load(ANNA, kind, 5, 0, b"", DIGEST) for kind in (Kind.FULL, Kind.RECURRENT))
    check_slots(decode(3, [(ANNA, 4)], SlotOps(loads=loads)))


def test_a_snapshot_may_not_land_on_a_slot_in_use() -> None:
    found = conflict_of(SlotOps(snapshots=(SlotSnapshot(2, 2, 5),)))
    assert found.operations[0] == "the forward of part 0"
    assert conflict_of(SlotOps(clears=(4,), snapshots=(SlotSnapshot(2, 4, 5),))).slot == 4


def test_two_snapshots_of_a_scan_need_two_slots() -> None:
    step = with_snapshots(prefill(0, [(ANNA, 0, 4)]), (2, 5), (4, 5))
    with pytest.raises(SlotConflict, match="at 2 and by the snapshot of slot 2 at 4"):
        check_slots(step)


def test_a_copy_may_not_read_what_another_copy_writes() -> None:
    assert conflict_of(SlotOps(copies=(SlotCopy(0, 1), SlotCopy(1, 3)))).slot == 1


def test_two_requests_may_not_share_a_working_slot() -> None:
    with pytest.raises(SlotConflict, match="part 0 and by the forward of part 1"):
        check_slots(decode(0, [(ANNA, 4), (ANNA, 4)]))


@given(st.lists(SLOTS), st.lists(SLOTS), st.lists(SLOTS))
def test_a_step_is_accepted_exactly_when_all_destinations_differ(
    loaded: list[int], copied: list[int], cleared: list[int]
) -> None:
    ops = SlotOps(
        loads=tuple(load(ANNA, Kind.RECURRENT, slot, 0, b"", DIGEST) for slot in loaded),
        copies=tuple(SlotCopy(9, slot) for slot in copied),
        clears=tuple(cleared),
    )
    destinations = loaded + copied + cleared
    step = decode(0, [(ANNA, 4)], ops)
    if len(set(destinations)) == len(destinations):
        check_slots(step)
    else:
        with pytest.raises(SlotConflict):
            check_slots(step)


def test_operations_are_handed_out_once() -> None:
    once = OnceOnly()
    step = with_snapshots(prefill(4, [(ANNA, 0, 4)], SlotOps(clears=(2,))), (4, 5))
    assert once.consume(step) == step
    replay = once.consume(step)
    assert replay.ops == SlotOps()
    assert isinstance(replay, type(step))
    assert replay.chunks[0].snapshots == ()
    assert replay.chunks[0].draws == step.chunks[0].draws
    assert once.num_consumed == 2


def test_a_refused_step_has_not_consumed_its_operations() -> None:
    once = OnceOnly()
    with pytest.raises(SlotConflict):
        once.consume(decode(0, [(ANNA, 4)], SlotOps(clears=(1, 1))))
    assert once.consume(decode(0, [(ANNA, 4)], SlotOps(clears=(1,)))).ops.clears == (1,)
