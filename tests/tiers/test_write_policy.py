"""When units are written behind, by each policy; what the books say meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.tiers.write_policy import (
    NUM_WRITTEN_AHEAD,
    WRITE_POLICIES,
    PendingBackups,
    UnitKey,
    write_policy_named,
)


def unit(number: int, kind: Kind = Kind.FULL) -> UnitKey:
    return kind, number.to_bytes(16, "big")


A, B, C = unit(1), unit(2), unit(3, Kind.RECURRENT)


def backups(name: str) -> PendingBackups:
    return PendingBackups(write_policy_named(name))


def test_write_through_writes_what_is_new_and_only_once() -> None:
    books = backups("write_through")
    assert books.on_added([A, C]) == (A, C)
    assert books.on_added([A, B]) == (B,)
    books.mark_written([A])
    assert books.on_added([A]) == ()
    assert books.on_hit([A]) == ()


def test_selective_write_through_writes_at_the_second_hit() -> None:
    books = backups("write_through_selective")
    assert books.on_added([A, B]) == ()
    assert books.on_hit([A, B]) == ()
    assert books.on_hit([A]) == (A,)
    assert books.on_hit([A]) == ()
    assert books.on_hit([B]) == (B,)


def test_write_back_writes_the_coldest_when_little_is_free() -> None:
    books = backups("write_back")
    assert books.on_added([A, B, C]) == ()
    assert books.on_hit([A]) == ()
    assert books.on_hit([A]) == ()
    assert books.on_pressure(0.5, [B, A]) == ()
    assert books.on_pressure(0.05, [B, A]) == (B, A)
    assert books.on_pressure(0.05, [B, A]) == ()


def test_write_back_looks_only_a_little_ahead() -> None:
    books = backups("write_back")
    coldest = (unit(number) for number in range(1000))
    assert len(books.on_pressure(0.0, coldest)) == NUM_WRITTEN_AHEAD
    assert next(coldest) == unit(NUM_WRITTEN_AHEAD), "and asks for no more than it takes"


@pytest.mark.parametrize("name", ["write_through", "write_through_selective"])
def test_only_write_back_waits_for_pressure(name: str) -> None:
    assert backups(name).on_pressure(0.0, iter([A, B])) == ()


@pytest.mark.parametrize("name", sorted(WRITE_POLICIES))
def test_what_failed_is_written_when_its_time_comes_again(name: str) -> None:
    books = backups(name)

    def due() -> tuple[UnitKey, ...]:
        return (
            *books.on_added([A]),
            *books.on_hit([A]),
            *books.on_hit([A]),
            *books.on_pressure(0.0, [A]),
        )

    assert due() == (A,)
    books.on_failed([A])
    assert not books.is_settled(A)
    assert due() == (A,)
    books.mark_written([A])
    books.forget_all()
    assert due() == (A,)


@pytest.mark.parametrize(
    ("name", "hits", "lost"),
    [
        pytest.param("write_through", 0, 1, id="write-through always means to write"),
        pytest.param("write_through_selective", 1, 0, id="selective never meant to"),
        pytest.param("write_through_selective", 2, 1, id="selective meant to after two hits"),
        pytest.param("write_back", 0, 1, id="write-back came too late"),
    ],
)
def test_what_goes_before_it_was_written_is_counted(name: str, hits: int, lost: int) -> None:
    books = backups(name)
    books.on_added([A])
    for _ in range(hits):
        books.on_hit([A])
    assert books.on_removed([A]) == lost
    assert not books.is_settled(A)


@pytest.mark.parametrize("name", sorted(WRITE_POLICIES))
def test_what_was_written_goes_without_a_loss(name: str) -> None:
    books = backups(name)
    books.on_added([A])
    books.start([A])
    books.mark_written([A])
    assert books.on_removed([A]) == 0


def test_hits_of_an_evicted_unit_do_not_count_when_it_comes_again() -> None:
    books = backups("write_through_selective")
    books.on_hit([A])
    books.on_removed([A])
    assert books.on_hit([A]) == ()


def test_whatever_the_policy_a_path_can_be_written_at_once() -> None:
    books = backups("write_back")
    assert books.start([A, B, A]) == (A, B)
    assert books.is_settled(B)
    assert books.start([A, B, C]) == (C,)


def test_an_unknown_policy_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(ConfigError, match="write_sometimes: known are write_through, "):
        write_policy_named("write_sometimes")


_UNITS = st.lists(st.integers(0, 5).map(unit), max_size=4)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["on_added", "on_hit", "on_pressure", "mark_written", "on_failed", "on_removed"]
        ),
        _UNITS,
    ),
    max_size=30,
)


@pytest.mark.parametrize("name", sorted(WRITE_POLICIES))
@given(steps=_STEPS)
def test_no_unit_is_asked_for_twice_unless_it_failed_or_left(
    name: str, steps: list[tuple[str, list[UnitKey]]]
) -> None:
    books, asked = backups(name), set[UnitKey]()
    for what, units in steps:
        if what == "on_pressure":
            wanted = books.on_pressure(0.0, units)
        elif what in ("on_added", "on_hit"):
            wanted = getattr(books, what)(units)
        else:
            getattr(books, what)(units)
            asked = asked | set(units) if what == "mark_written" else asked - set(units)
            continue
        assert not asked & set(wanted)
        assert len(wanted) == len(set(wanted))
        assert set(wanted) <= set(units)
        asked |= set(wanted)


@given(steps=_STEPS)
def test_row_65_what_is_nowhere_is_offered_whenever_it_comes_in(
    steps: list[tuple[str, list[UnitKey]]],
) -> None:
    """Every way to lose a unit: not written, dropped by the next tier, evicted before or after it
    was written. `behind` has the units that the next tier has or is about to have."""
    books, behind = backups("write_through"), set[UnitKey]()
    for what, units in steps:
        if what in ("on_added", "on_hit"):
            offered = getattr(books, what)(units)
            assert set(offered) == set(units) - behind
            behind |= set(offered)
        elif what != "on_pressure":
            getattr(books, what)(units)
            behind = behind | set(units) if what == "mark_written" else behind - set(units)


def test_row_65_a_new_tier_behind_is_offered_everything_again() -> None:
    books = backups("write_through")
    books.mark_written(books.on_added([A, B]))
    books.on_added([C])
    books.forget_all()
    assert books.on_added([A, B, C]) == (A, B, C)
