"""Prompt lookup against a rescan of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman.schedule.drafting import LONGEST, LOOKBACK, NgramIndex, PromptLookup
from ferryman.schedule.request import Request, SamplingParams


def index_of(prompt: Sequence[int]) -> NgramIndex:
    return NgramIndex(np.array(prompt, dtype="<u4"))


def rescanned(text: Sequence[int], most: int) -> list[int]:
    """The longest n-gram first, its newest place; what stands behind, and then itself."""
    for length in range(min(LONGEST, len(text)), 0, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if list(text[place - length : place]) == list(text[-length:]):
                longer = list(text)
                for at in range(place, place + most):
                    longer.append(longer[at])
                return longer[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    runs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), max_size=10),
    most=st.integers(1, 6),
)
def test_an_index_that_grows_finds_what_a_rescan_finds(
    prompt: list[int], runs: list[list[int]], most: int
) -> None:
    index, drawn = index_of(prompt), list[int]()
    for run in [[], *runs]:
        drawn += run
        assert list(index.propose(drawn, most)) == rescanned([*prompt, *drawn], most)


def test_a_period_is_proposed_as_often_as_asked() -> None:
    assert list(index_of([7, 1, 2, 3, 1, 2, 3]).propose([], 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_the_longer_match_wins_over_the_newer_one() -> None:
    text = [1, 2, 3, 4, 9, 3, 5, 8, 1, 2, 3]
    assert list(index_of(text).propose([], 2)) == [4, 9]
    assert list(index_of([6, *text[4:8], 3]).propose([], 2)) == [5, 8]


def test_nothing_is_proposed_for_what_never_stood_before() -> None:
    assert list(index_of([1, 2, 3]).propose([4], 5)) == []
    assert list(index_of([1, 1]).propose([], 0)) == []


def test_of_a_long_prompt_only_the_end_is_indexed() -> None:
    rare = [5, 6, 7]
    for num_between, expected in ((LOOKBACK, []), (LOOKBACK - 10, [8, 1])):
        prompt = np.array([*rare, 8, *([1] * num_between), *rare], dtype="<u4")
        asked = Request("r0", prompt, (), SamplingParams(max_tokens=9))
        assert list(PromptLookup(3).begin(asked).propose([], 2)) == expected
