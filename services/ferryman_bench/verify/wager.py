"""A bet on "the warm answer is the odd one more often than chance has it".

The capital of a bet that is fair, or worse, for a sound engine is a test martingale: that it ever
reaches `c` has a probability of 1/c at most (J. Ville, Étude critique de la notion de collectif,
1939). So one may look at it after each probe, and stop when one likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# The bet begins as if three of four odd answers had been warm ones.
_WINS_AT_START, _PROBES_AT_START = 3.0, 4.0
_SUREST = 0.99


@dataclass(frozen=True, slots=True)
class Wager:
    """The bet on one way of reuse. `chance` is a sound engine's, one in the number of answers.

    `wins` of `counted` probes had the warm answer odd; `log_capital` is natural.
    """

    chance: float
    wins: int = 0
    counted: int = 0
    log_capital: float = 0.0

    def after(self, is_win: bool) -> Wager:
        """The bet after one more probe.

        The stake follows from the probes before it alone. For a chance of at most `chance` the
        expected factor is at most 1, as the stake is never below `chance`.
        """
        guess = (self.wins + _WINS_AT_START) / (self.counted + _PROBES_AT_START)
        stake = min(_SUREST, max(self.chance, guess))
        factor = stake / self.chance if is_win else (1 - stake) / (1 - self.chance)
        return replace(
            self,
            wins=self.wins + is_win,
            counted=self.counted + 1,
            log_capital=self.log_capital + math.log(factor),
        )

    def has_won(self, rate: float, num_ways: int) -> bool:
        """Whether the way is accused.

        Over all of `num_ways` ways at most a share `rate` of runs accuses a sound engine.
        """
        return self.log_capital >= math.log(num_ways / rate)


@dataclass(frozen=True, slots=True)
class RoundingFloor:
    """The difference, in nats, that is taken for rounding: twice the largest that cold answers had,
    between two limits."""

    least: float
    most: float
    largest: float = 0.0

    def after(self, nats: float) -> RoundingFloor:
        if not math.isfinite(nats):
            return self
        return replace(self, largest=max(self.largest, nats))

    @property
    def nats(self) -> float:
        return min(self.most, max(self.least, 2 * self.largest))
