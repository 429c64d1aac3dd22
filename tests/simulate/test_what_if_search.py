"""The changes that a search keeps: on figures that are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import ConfigError
from ferryman_simulator.what_if.figures import Figures
from ferryman_simulator.what_if.search import Changes, Search, SearchResult
from ferryman_simulator.what_if.tunable import Ladder, SettingChange

BASE = 0.3
Gains = Mapping[tuple[str, str], float]


def change(name: str, text: str) -> SettingChange:
    return SettingChange(("", name), "1", text)


def ladder(name: str, *texts: str) -> Ladder:
    return Ladder(tuple(change(name, text) for text in texts))


def figures(reused: float) -> Figures:
    """First tokens come as early as tokens are reused."""
    return Figures({"device": reused}, 1 - reused, 2 - reused)


def searched(gains: Gains, *ladders: Ladder, num_trials: int = 100) -> SearchResult:
    """A search where each change adds its gain; one without a gain is impossible."""
    left = iter(range(num_trials))

    def attempt(changes: Changes) -> Figures:
        keys = [(change.name, change.text) for change in changes]
        if missing := [key for key in keys if key not in gains]:
            raise ConfigError(f"no {missing[0]}")
        return figures(min(1.0, BASE + sum(gains[key] for key in keys)))

    search = Search(figures(BASE), attempt, lambda: next(left, None) is not None)
    return search.run(ladders)


def names(changes: Changes) -> list[str]:
    return [f"{change.name}={change.text}" for change in changes]


def test_the_least_value_that_gains_nearly_all_is_named() -> None:
    gains = {("memory", "2"): 0.1, ("memory", "4"): 0.398, ("memory", "16"): 0.4}
    result = searched(gains, ladder("memory", "2", "4", "16"))
    assert [names(trial.changes) for trial in result.gains] == [["memory=4"], ["memory=2"]]


def test_a_setting_whose_largest_value_gains_nothing_is_left_alone() -> None:
    result = searched({("grid", "2048"): 0.0}, ladder("grid", "512", "2048"))
    assert result.gains == ()
    assert [names(trial.changes) for trial in result.without_gain] == [["grid=2048"]]


def test_changes_are_joined_as_long_as_each_adds_something() -> None:
    gains = {("a", "1"): 0.2, ("b", "1"): 0.1, ("c", "1"): 0.05, ("d", "1"): 0.04}
    result = searched(gains, *(ladder(name, "1") for name in "abcd"))
    joined = [names(trial.changes) for trial in result.gains if len(trial.changes) > 1]
    assert joined == [["a=1", "b=1"], ["a=1", "b=1", "c=1"]], "three at most"


def test_what_no_cluster_can_have_is_named_with_the_reason() -> None:
    result = searched({}, ladder("a", "1"))
    assert [(names(changes), why) for changes, why in result.impossible] == [
        (["a=1"], "no ('a', '1')")
    ]


def test_without_time_nothing_is_claimed() -> None:
    result = searched({("a", "1"): 0.2}, ladder("a", "1"), ladder("b", "1"), num_trials=0)
    assert result.gains == result.without_gain == ()
    assert [names(changes) for changes in result.untried] == [["a=1"], ["b=1"]]


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.floats(-0.3, 0.6, allow_nan=False), min_size=1, max_size=6
    ),
    st.integers(0, 12),
)
def test_every_gain_gains_and_the_best_is_first(gains: dict[str, float], num_trials: int) -> None:
    table = {(name, "1"): gain for name, gain in gains.items()}
    result = searched(table, *(ladder(name, "1") for name in gains), num_trials=num_trials)
    for trial in result.gains:
        assert trial.figures.gains_over(figures(BASE))
    for trial in result.without_gain:
        assert not trial.figures.gains_over(figures(BASE))
    singles = [trial.figures.rank for trial in result.gains if len(trial.changes) == 1]
    assert singles == sorted(singles)
    tried = {trial.changes for trial in (*result.gains, *result.without_gain)}
    assert tried.isdisjoint(result.untried)
    if num_trials >= len(gains):
        alone = {change(name, "1") for name in gains}
        assert alone == {changes[0] for changes in tried if len(changes) == 1}
