"""How fast this worker is, as measured by its own steps: what plans and routers reckon with."""

from __future__ import annotations

from ferryman.cache.resume import Costs
from ferryman.engine.assembly import FIRST_GUESS
from ferryman.schedule.batch import NOTHING_LOADED, LoadReport

# What is left of the past after each step: the last ten or so count.
KEPT = 0.9


class Pace:
    """Decaying sums: prefill seconds over tokens, decode seconds over steps, loads over bytes.

    A step of one token costs about what one of fifty does, so tokens are weighed, not steps; and
    for the same reason bytes, not loads.
    """

    def __init__(self) -> None:
        self._tokens = self._prefill_seconds = 0.0
        self._steps = self._decode_seconds = 0.0
        self._load_bytes = self._load_seconds = 0.0
        self.all_loads = NOTHING_LOADED

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
        """From the host tier to the device, verified; 0 until something was loaded."""
        return self._load_seconds / self._load_bytes if self._load_bytes else 0.0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._tokens = KEPT * self._tokens + num_tokens
        self._prefill_seconds = KEPT * self._prefill_seconds + seconds

    def decoded(self, seconds: float) -> None:
        self._steps = KEPT * self._steps + 1
        self._decode_seconds = KEPT * self._decode_seconds + seconds

    def loaded(self, report: LoadReport) -> None:
        """Only a step that brought verified bytes says something of the speed."""
        if report.num_bytes:
            so_far = self.all_loads
            self.all_loads = LoadReport(
                so_far.num_bytes + report.num_bytes, so_far.seconds + report.seconds
            )
            self._load_bytes = KEPT * self._load_bytes + report.num_bytes
            self._load_seconds = KEPT * self._load_seconds + report.seconds

    def costs(self) -> Costs:
        """What a plan weighs loading against; guesses until there is a measurement."""
        per_token = self.seconds_per_token or FIRST_GUESS.prefill_seconds_per_token
        per_byte = self.load_seconds_per_byte or FIRST_GUESS.load_seconds_per_byte
        return Costs(per_token, per_byte)
