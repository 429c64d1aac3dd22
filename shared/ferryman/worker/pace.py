"""How fast this worker is, as measured by its own steps: what plans and routers reckon with."""

from __future__ import annotations

from ferryman.cache.resume import Costs
from ferryman.engine.assembly import FIRST_GUESS

# The weight of the newest step: the last ten or so count.
NEWEST = 0.1


class Pace:
    """Moving averages of prefill seconds per token and seconds per decode step."""

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.step_seconds = 0.0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self.seconds_per_token = _moved(self.seconds_per_token, seconds / num_tokens)

    def decoded(self, seconds: float) -> None:
        self.step_seconds = _moved(self.step_seconds, seconds)

    def costs(self) -> Costs:
        """What a plan weighs loading against; guesses until there is a measurement."""
        per_token = self.seconds_per_token or FIRST_GUESS.prefill_seconds_per_token
        return Costs(per_token, FIRST_GUESS.load_seconds_per_byte)


def _moved(average: float, newest: float) -> float:
    return newest if average == 0.0 else average + NEWEST * (newest - average)
