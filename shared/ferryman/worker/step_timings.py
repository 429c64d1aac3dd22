"""The speed of this worker, measured by its own steps. Plans and routers use it."""

from __future__ import annotations

from ferryman.cache.resume import FIRST_GUESS, ResumeCosts
from ferryman.schedule.batch import NOTHING_LOADED, LoadReport

# The weight of the past after each step: about the last ten steps count.
KEPT = 0.9


class StepTimings:
    """Decaying sums: prefill seconds over tokens, decode seconds over steps, loads over bytes.

    A step of one token takes about as long as one of fifty, so averages are per token, not per
    step; and for the same reason per byte, not per load.
    """

    def __init__(self) -> None:
        self._tokens = self._prefill_seconds = 0.0
        self._steps = self._decode_seconds = 0.0
        self._load_bytes = self._load_seconds = 0.0
        self._all_loads = NOTHING_LOADED

    @property
    def seconds_per_token(self) -> float:
        """0 until a prompt was computed."""
        return self._prefill_seconds / self._tokens if self._tokens else 0.0

    @property
    def step_seconds(self) -> float:
        """0 until a step has decoded."""
        return self._decode_seconds / self._steps if self._steps else 0.0

    @property
    def load_seconds_per_byte(self) -> float:
        """The time from the host tier to the device, verified; 0 until something was loaded."""
        return self._load_seconds / self._load_bytes if self._load_bytes else 0.0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._tokens = KEPT * self._tokens + num_tokens
        self._prefill_seconds = KEPT * self._prefill_seconds + seconds

    def decoded(self, seconds: float) -> None:
        self._steps = KEPT * self._steps + 1
        self._decode_seconds = KEPT * self._decode_seconds + seconds

    def loaded(self, report: LoadReport) -> None:
        """Counts a step's loads: only verified bytes show the speed."""
        if report.num_bytes:
            so_far = self._all_loads
            self._all_loads = LoadReport(
                so_far.num_bytes + report.num_bytes, so_far.seconds + report.seconds
            )
            self._load_bytes = KEPT * self._load_bytes + report.num_bytes
            self._load_seconds = KEPT * self._load_seconds + report.seconds

    def statistics(self) -> LoadReport:
        """The loads from the host arena to the device since the start, verified."""
        return self._all_loads

    def costs(self) -> ResumeCosts:
        """The costs that a plan compares loading with; guesses until there is a measurement."""
        per_token = self.seconds_per_token or FIRST_GUESS.prefill_seconds_per_token
        per_byte = self.load_seconds_per_byte or FIRST_GUESS.load_seconds_per_byte
        return ResumeCosts(per_token, per_byte)
