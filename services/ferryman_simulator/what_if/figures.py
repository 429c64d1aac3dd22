"""The figures that are compared, and whether a simulation may be trusted. Pure.

A simulation begins with empty caches, and the cluster of a log has served before. So the earlier
half of the requests warms the caches, and the later half is judged. A request has more costs than
the simulated ones (doors, a busy machine): they are one constant, fitted on the earlier half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ferryman_simulator.result import RequestOutcome, quantiles
from ferryman_simulator.trace import TracedRequest

# The least number of judged requests: of fewer, one conversation more or less decides.
MIN_JUDGED = 20
# Shares of the prompt tokens.
MAX_REUSED_OFF = 0.05
MAX_TIER_OFF = 0.1
# First tokens may differ by this factor, or by so little that nobody waits for it.
MAX_TIMES_OFF = 1.5
MAX_SECONDS_OFF = 0.02
# A gain below these is none: the tenth of a conversation, or noise.
LEAST_REUSED = 0.005
LEAST_TIME_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    """The shares of prompt tokens that came from each tier, and seconds to the first token."""

    shares: Mapping[str, float]
    p50: float
    p90: float

    @property
    def reused(self) -> float:
        return sum(self.shares.values())

    def gains_over(self, before: Figures) -> bool:
        """True if more is reused, or as much and first tokens come earlier."""
        more = self.reused - before.reused
        faster = self.p50 < before.p50 * (1 - LEAST_TIME_SHARE)
        faster |= self.p90 < before.p90 * (1 - LEAST_TIME_SHARE)
        return more >= LEAST_REUSED or (faster and more > -LEAST_REUSED)

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts the better figures to the front: by reuse in steps of a gain, then by time."""
        return -round(self.reused / LEAST_REUSED), self.p50 + self.p90


@dataclass(frozen=True, slots=True)
class JudgedLog:
    """The requests of a log that are compared, and those before them. `measured` is by id."""

    earlier: Sequence[TracedRequest]
    judged: Sequence[TracedRequest]
    measured: Mapping[str, RequestOutcome]

    @classmethod
    def of(
        cls, requests: Sequence[TracedRequest], measured: Mapping[str, RequestOutcome]
    ) -> JudgedLog:
        """The halves of requests in the order of their arrival."""
        half = len(requests) // 2
        return cls(requests[:half], requests[half:], measured)

    def measured_figures(self) -> Figures:
        return _figures(self.judged, self.measured, 0.0)

    def figures(self, simulated: Mapping[str, RequestOutcome], extra_seconds: float) -> Figures:
        """The judged requests in a simulation; each first token comes `extra_seconds` later."""
        return _figures(self.judged, simulated, extra_seconds)

    def extra_seconds(self, simulated: Mapping[str, RequestOutcome]) -> float:
        """The median of what earlier requests took longer, or less, than simulated."""
        both = [
            self.measured[name].first_seconds - simulated[name].first_seconds
            for name in (request.request_id for request in self.earlier)
            if name in self.measured and name in simulated
        ]
        return median(both) if both else 0.0


def _figures(
    requests: Sequence[TracedRequest], outcomes: Mapping[str, RequestOutcome], extra: float
) -> Figures:
    served = [(r.prompt_len, outcomes[r.request_id]) for r in requests if r.request_id in outcomes]
    tokens = max(1, sum(prompt_len for prompt_len, _ in served))
    tiers: dict[str, int] = {}
    for _, outcome in served:
        for tier, count in outcome.cached.by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + count
    times = quantiles([max(0.0, outcome.first_seconds + extra) for _, outcome in served])
    shares = {tier: count / tokens for tier, count in tiers.items()}
    return Figures(shares, times["p50"], times["p90"])


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cluster as it is: measured and simulated. `causes` are what the log shows and a
    simulation lacks."""

    measured: Figures
    simulated: Figures
    num_judged: int
    extra_seconds: float
    causes: tuple[str, ...] = ()

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons not to trust what is simulated; none if the two agree within the bounds."""
        return (*_few(self.num_judged), *_shares_off(self), *_times_off(self))

    @property
    def is_trusted(self) -> bool:
        return not self.doubts


def _few(count: int) -> Iterator[str]:
    if count < MIN_JUDGED:
        yield f"too few requests are left to compare: {count}; it takes {MIN_JUDGED}"


def _shares_off(calibration: Calibration) -> Iterator[str]:
    measured, simulated = calibration.measured, calibration.simulated
    if abs(measured.reused - simulated.reused) > MAX_REUSED_OFF:
        yield (
            f"reused: {measured.reused:.1%} measured, {simulated.reused:.1%} simulated; "
            f"{MAX_REUSED_OFF:.0%} of the tokens is the bound"
        )
    for tier in sorted({*measured.shares, *simulated.shares}):
        mine, theirs = measured.shares.get(tier, 0.0), simulated.shares.get(tier, 0.0)
        if abs(mine - theirs) > MAX_TIER_OFF:
            yield (
                f"from {tier}: {mine:.1%} measured, {theirs:.1%} simulated; "
                f"{MAX_TIER_OFF:.0%} is the bound"
            )


def _times_off(calibration: Calibration) -> Iterator[str]:
    for name in ("p50", "p90"):
        mine, theirs = getattr(calibration.measured, name), getattr(calibration.simulated, name)
        is_near = abs(mine - theirs) <= MAX_SECONDS_OFF
        if not is_near and max(mine, theirs) > MAX_TIMES_OFF * min(mine, theirs):
            yield (
                f"first token {name}: {mine * 1000:,.0f} ms measured, {theirs * 1000:,.0f} ms "
                f"simulated; a factor of {MAX_TIMES_OFF:g} is the bound"
            )
