"""The sanitizer finds each planted race, and nothing where plain reachability finds nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.sanitizer import (
    FREED,
    TWO_INITIALISERS,
    UNORDERED,
    Finding,
    Operation,
    check,
)

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle

WORKING = SlotHandle(Kind.RECURRENT, 2, 1)
SNAPSHOT = SlotHandle(Kind.RECURRENT, 5, 1)
PAGE = SlotHandle(Kind.FULL, 7, 3)
FORWARD = Operation("forward", "forward 1", (WORKING, PAGE), (WORKING, PAGE), records=("step 1",))


def only(findings: Sequence[Finding]) -> Finding:
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


def test_a_snapshot_on_the_schedulers_side_is_a_race() -> None:
    """Defect 1."""
    snapshot = Operation("scheduler", "snapshot", (WORKING,), initialises=(SNAPSHOT,))
    found = only(check([FORWARD, snapshot]))
    assert (found.problem, found.handle) == (UNORDERED, WORKING)
    assert str(found) == (
        "recurrent slot 2 generation 1: unordered: 'forward 1' on forward and 'snapshot' on "
        "scheduler; missing edge: an event that forward records after 'forward 1' and scheduler "
        "waits for before 'snapshot'"
    )


def test_a_clear_after_a_load_is_a_second_initialiser() -> None:
    """Defect 4."""
    load = Operation("copies", "load", initialises=(WORKING,), records=("loaded",))
    clear = Operation("forward", "clear", initialises=(WORKING,), waits=("loaded",))
    found = only(check([load, clear]))
    assert (found.problem, found.first, found.second) == (TWO_INITIALISERS, load, clear)


def test_a_copy_after_its_source_was_reused_is_found_in_either_order() -> None:
    free = Operation("scheduler", "free", frees=(SNAPSHOT,), records=("freed",))
    copy = Operation("forward", "copy", (SNAPSHOT,), initialises=(WORKING,))
    reused = Operation("forward", "snapshot", initialises=(SNAPSHOT._replace(generation=2),))
    late = Operation("forward", "copy", (SNAPSHOT,), initialises=(WORKING,), waits=("freed",))
    assert only(check([free, late])).problem == FREED
    assert only(check([copy, free])).problem == UNORDERED
    problems = [finding.problem for finding in check([free, reused, copy])]
    assert FREED in problems


def test_a_backup_without_a_fence_is_a_race() -> None:
    """Defect 47: pages were copied to the host while the next forward still wrote them."""
    store = Operation("copies", "store", (PAGE,))
    fenced = Operation("copies", "store", (PAGE,), waits=("step 1",))
    assert only(check([FORWARD, store])).second is store
    assert check([FORWARD, fenced]) == ()


def test_a_forward_that_overwrites_what_is_still_being_sent_is_a_race() -> None:
    """Defect 35, from the other side."""
    send = Operation("scheduler", "send", (PAGE,), waits=("step 1",))
    again = Operation("forward", "forward 2", (PAGE,), (PAGE,))
    found = only(check([FORWARD, send, again]))
    assert (found.first.name, found.second.name) == ("send", "forward 2")


def test_order_passes_through_a_third_stream() -> None:
    relay = Operation("scheduler", "commit", waits=("step 1",), records=("committed",))
    store = Operation("copies", "store", (PAGE,), waits=("committed",))
    assert check([FORWARD, relay, store]) == ()


def test_reads_of_one_slot_need_no_order() -> None:
    assert check([Operation(stream, "read", (PAGE,)) for stream in "abc"]) == ()


STREAMS = ("forward", "scheduler", "copies")
SLOT = st.integers(0, 2).map(lambda slot: (SlotHandle(Kind.FULL, slot, 1),))
ACCESS = st.tuples(
    st.sampled_from(STREAMS), SLOT, st.booleans(), st.sets(st.integers(0, 9), max_size=2)
)


def operation(
    index: int, stream: str, slot: tuple[SlotHandle, ...], is_write: bool, waits: set[int]
) -> Operation:
    reads, writes = ((), slot) if is_write else (slot, ())
    events = tuple(str(event) for event in sorted(waits) if event < index)
    return Operation(stream, f"op {index}", reads, writes, waits=events, records=(str(index),))


@settings(max_examples=200, deadline=None)
@given(st.lists(ACCESS, max_size=10))
def test_clocks_find_a_race_exactly_when_reachability_does(
    drawn: list[tuple[str, tuple[SlotHandle, ...], bool, set[int]]],
) -> None:
    operations = [operation(index, *access) for index, access in enumerate(drawn)]
    reported = {(f.first.name, f.second.name) for f in check(operations)}
    races = set(races_by_reachability(operations))
    assert reported <= races
    assert bool(reported) == bool(races)


def races_by_reachability(operations: Sequence[Operation]) -> list[tuple[str, str]]:
    """All conflicting pairs that no path of stream order and events connects."""
    count = len(operations)
    reaches = [[False] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        same = operations[a].stream == operations[b].stream
        reaches[a][b] = same or str(a) in operations[b].waits
    for via, a, b in itertools.product(range(count), repeat=3):
        reaches[a][b] |= reaches[a][via] and reaches[via][b]
    return [
        (operations[a].name, operations[b].name)
        for a, b in itertools.combinations(range(count), 2)
        if conflict(operations[a], operations[b]) and not reaches[a][b]
    ]


def conflict(a: Operation, b: Operation) -> bool:
    return bool(set(a.writes) & set(b.reads + b.writes) or set(b.writes) & set(a.reads + a.writes))


@pytest.mark.parametrize("problem", [UNORDERED, FREED, TWO_INITIALISERS])
def test_every_finding_names_both_operations_and_what_to_do(problem: str) -> None:
    found = Finding(problem, PAGE, FORWARD, Operation("copies", "store"), "do this")
    for part in ("full slot 7 generation 3", problem, "'forward 1'", "'store'", "do this"):
        assert part in str(found)
