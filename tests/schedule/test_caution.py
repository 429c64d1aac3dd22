"""Caution against a text that never repeats, and one that always does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ferryman.schedule.drafting import LONGEST_REST, AdaptiveDrafting


class Eager:
    """As many drafts as it may."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        return [7] * most


def proposed(rights: Sequence[int], most: int = 8) -> list[int]:
    """The number of drafts of each step, if at most `rights` of them are right in each."""
    cautious, drawn, found = AdaptiveDrafting(Eager()), [1], []
    for right in rights:
        drafts = cautious.propose(drawn, most)
        found.append(len(drafts))
        drawn += [7] * (1 + min(right, len(drafts)))
    return found


def test_what_is_always_right_always_has_full_length() -> None:
    assert proposed([8] * 5) == [8] * 5


def test_what_is_never_right_is_asked_ever_less_often() -> None:
    counts = proposed([0] * 200)
    asked = [step for step, count in enumerate(counts) if count]
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps[:6] == [2, 4, 8, 16, 32, 32]
    assert max(gaps) == LONGEST_REST
    assert [counts[step] for step in asked] == [8] + [1] * (len(asked) - 1)


def test_what_becomes_right_is_back_at_full_length_in_a_few_steps() -> None:
    counts = proposed([0, 0, *[8] * 6])
    assert counts == [8, 0, 1, 3, 7, 8, 8, 8]


def test_half_right_is_asked_for_twice_that_and_one() -> None:
    assert proposed([2] * 4) == [8, 5, 5, 5]


def test_who_has_nothing_to_say_learns_nothing() -> None:
    class Silent:
        def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
            return [] if len(drawn) < 6 else [7] * most

    cautious, drawn = AdaptiveDrafting(Silent()), [1]
    for _ in range(5):
        assert list(cautious.propose(drawn, 4)) == []
        drawn.append(2)
    assert len(cautious.propose(drawn, 4)) == 4
