"""Ranges against a naive model: sets of (kind, index)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.handoff.values import (
    PageRange,
    Reservation,
    WantedUnit,
    covers,
    difference,
    intersection,
    merged,
    num_units,
    ranges_of,
    units_of,
)

page_range = st.builds(
    lambda kind, first, length: PageRange(kind, first, first + length),
    st.sampled_from(Kind),
    st.integers(0, 40),
    st.integers(1, 12),
)
ranges = st.lists(page_range, max_size=8)


def as_set(spans: list[PageRange] | tuple[PageRange, ...]) -> set[tuple[Kind, int]]:
    return {(span.kind, index) for span in spans for index in range(span.first, span.end)}


@given(ranges, ranges)
def test_set_operations_go_by_position_and_never_by_list_index(
    left: list[PageRange], right: list[PageRange]
) -> None:
    assert as_set(intersection(left, right)) == as_set(left) & as_set(right)
    assert as_set(difference(left, right)) == as_set(left) - as_set(right)
    assert covers(left, right) == (as_set(right) <= as_set(left))


@given(ranges, ranges)
def test_results_are_in_merged_form(left: list[PageRange], right: list[PageRange]) -> None:
    for result in (intersection(left, right), difference(left, right)):
        assert merged(result) == result


@given(ranges)
def test_merged_is_one_value_for_one_set(spans: list[PageRange]) -> None:
    canonical = merged(spans)
    assert as_set(canonical) == as_set(spans)
    assert merged(reversed(spans)) == canonical
    assert ranges_of(as_set(spans)) == canonical
    assert list(units_of(spans)) == sorted(as_set(spans))
    assert num_units(spans) == len(as_set(spans))
    touching = pairwise(canonical)
    assert all(a.kind != b.kind or a.end < b.first for a, b in touching)


@given(ranges, ranges)
def test_asking_twice_gives_the_same_answer_and_changes_nothing(
    left: list[PageRange], right: list[PageRange]
) -> None:
    before = list(left), list(right)
    assert intersection(left, right) == intersection(left, right)
    assert difference(left, right) == difference(left, right)
    assert (left, right) == before


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_lists_of_different_lengths_pair_equal_pages(
    first: int, length: int, other_first: int, other_length: int
) -> None:
    wanted = [PageRange(Kind.WINDOW, first, first + length)]
    offered = [PageRange(Kind.WINDOW, other_first, other_first + other_length)]
    moved = list(units_of(intersection(wanted, offered)))
    lacking = list(units_of(difference(wanted, offered)))
    assert sorted(moved + lacking) == list(units_of(wanted))
    assert covers(offered, wanted) == (not lacking)


def test_kinds_do_not_stand_in_for_each_other() -> None:
    full, window = PageRange(Kind.FULL, 0, 4), PageRange(Kind.WINDOW, 0, 4)
    assert not covers([full], [window])
    assert intersection([full], [window]) == ()


@pytest.mark.parametrize(("first", "end"), [(-1, 3), (3, 3), (4, 2)])
def test_a_range_that_means_nothing_is_refused(first: int, end: int) -> None:
    with pytest.raises(InvalidRequest, match="no range of full units"):
        PageRange(Kind.FULL, first, end)


def test_a_reservation_states_its_wants_as_ranges() -> None:
    wanted = tuple(WantedUnit(Kind.FULL, index, 7) for index in (3, 2, 5))
    reservation = Reservation("res-1", 9, 1, (*wanted, WantedUnit(Kind.RECURRENT, 90, 2)), 5.0)
    assert reservation.ranges == (
        PageRange(Kind.FULL, 2, 4),
        PageRange(Kind.FULL, 5, 6),
        PageRange(Kind.RECURRENT, 90, 91),
    )
