"""A search for changes that gain something, alone and the best few together.

Pure: a trial is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ferryman.errors import ConfigError
from ferryman_simulator.what_if.figures import LEAST_REUSED, LEAST_TIME_SHARE, Figures
from ferryman_simulator.what_if.tunable import Ladder, SettingChange

MAX_TOGETHER = 3
Changes = tuple[SettingChange, ...]
Try = Callable[[Changes], Figures]
"""The figures with these changes. Raises ConfigError for what no cluster could be started with."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Changes that were tried together, and the figures with them."""

    changes: Changes
    figures: Figures


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Trials that gain something, single changes before several together, the best of each first;
    those that gain nothing; changes that no cluster can have, with the reason; and changes for
    which no time was left."""

    gains: tuple[Trial, ...]
    without_gain: tuple[Trial, ...]
    impossible: tuple[tuple[Changes, str], ...]
    untried: tuple[Changes, ...]


class Search:
    """One search from the figures `base` of the cluster as it is. `has_time` is asked before each
    trial."""

    def __init__(self, base: Figures, attempt: Try, has_time: Callable[[], bool]) -> None:
        self._base, self._attempt, self._has_time = base, attempt, has_time
        self._trials: list[Trial] = []
        self._impossible: list[tuple[Changes, str]] = []
        self._untried: list[Changes] = []

    def run(self, ladders: Iterable[Ladder]) -> SearchResult:
        """Tries the end of each ladder, then whether less is enough where it gains, then the best
        changes of several settings together."""
        ends = [(ladder, self._try(ladder.changes[-1:])) for ladder in ladders]
        gaining = [(ladder, end) for ladder, end in ends if end is not None and self._gains(end)]
        gaining.sort(key=lambda pair: pair[1].figures.rank)
        best = [self._least(ladder, end) for ladder, end in gaining]
        self._join(best)
        return self.result()

    def try_together(self, changes: Changes) -> None:
        """One trial of all these, and one of each alone where there are several."""
        for single in changes if len(changes) > 1 else ():
            self._try((single,))
        self._try(changes)

    def result(self) -> SearchResult:
        ordered = sorted(self._trials, key=lambda t: (len(t.changes), t.figures.rank))
        gains = tuple(trial for trial in ordered if self._gains(trial))
        rest = tuple(trial for trial in ordered if not self._gains(trial))
        return SearchResult(gains, rest, tuple(self._impossible), tuple(self._untried))

    def _least(self, ladder: Ladder, end: Trial) -> Trial:
        """The least value that gains nearly what the end of its ladder gains, in its place."""
        for change in ladder.changes[:-1]:
            trial = self._try((change,))
            if trial is not None and _is_nearly(trial.figures, end.figures):
                self._trials.remove(end)
                return trial
        return end

    def _join(self, best: Sequence[Trial]) -> None:
        """Adds the next best change as long as each one adds something; of the others nothing is
        kept."""
        if len(best) > 1:
            self._add(best[0], best[1], best[2:])

    def _add(self, before: Trial, single: Trial, others: Sequence[Trial]) -> None:
        trial = self._try((*before.changes, *single.changes))
        if trial is not None and not trial.figures.gains_over(before.figures):
            self._trials.remove(trial)
        elif trial is not None:
            before = trial
        if others and len(before.changes) < MAX_TOGETHER:
            self._add(before, others[0], others[1:])

    def _gains(self, trial: Trial) -> bool:
        return trial.figures.gains_over(self._base)

    def _try(self, changes: Changes) -> Trial | None:
        if not self._has_time():
            self._untried.append(changes)
            return None
        try:
            trial = Trial(changes, self._attempt(changes))
        except ConfigError as error:
            self._impossible.append((changes, str(error)))
            return None
        self._trials.append(trial)
        return trial


def _is_nearly(smaller: Figures, top: Figures) -> bool:
    """True if nothing is missing that is worth a larger value."""
    has_reuse = smaller.reused > top.reused - LEAST_REUSED
    return has_reuse and smaller.p50 <= top.p50 * (1 + LEAST_TIME_SHARE)
