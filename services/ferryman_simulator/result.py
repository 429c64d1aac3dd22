"""The result of a simulated run: tokens by tier and by reason, times, and evictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ferryman.cache.resume import ResumePlan
from ferryman.handoff.usage import CachedTokens

COMPUTED = "computed"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class RequestOutcome:
    """One request: its prompt's cached tokens by its first plan, and the seconds to the first
    token."""

    cached: CachedTokens
    first_seconds: float = 0.0


@dataclass(slots=True)
class ResultCounts:
    """Counts while requests run. `reasons` are computed tokens by the reason for computing them."""

    num_requests: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    num_turned_away: int = 0
    num_retracted: int = 0

    @property
    def first_seconds(self) -> list[float]:
        return [outcome.first_seconds for outcome in self.outcomes.values()]

    def planned(self, name: str, plan: ResumePlan, cached: CachedTokens, page_size: int) -> None:
        """Counts one prompt by its first plan."""
        self.outcomes.setdefault(name, RequestOutcome(cached))
        self.prompt_tokens += plan.prompt_len
        self.tiers.update(cached.by_tier)
        self.tiers[COMPUTED] += plan.prompt_len - cached.total
        for reason, first, end in plan.uncached:
            tokens = min(end * page_size, plan.prompt_len) - first * page_size
            self.reasons[str(reason)] += tokens


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `snapshots` are those left at the end, by worker or tier; `evicted` are units by
    tier.

    `ttft_seconds` by quantile, `seconds` is the length of the run on its own clock. `outcomes` are
    those of the requests that fit, by id.
    """

    num_requests: int
    num_refused: int
    prompt_tokens: int
    output_tokens: int
    tokens: Mapping[str, int]
    reasons: Mapping[str, int]
    ttft_seconds: Mapping[str, float]
    snapshots: Mapping[str, int]
    evicted: Mapping[str, Mapping[str, int]]
    num_truncated: int
    num_turned_away: int
    num_retracted: int
    seconds: float
    outcomes: Mapping[str, RequestOutcome]

    @property
    def shares(self) -> dict[str, float]:
        """Shares of all prompt tokens, by tier; `computed` is the rest."""
        whole = max(1, self.prompt_tokens)
        return {tier: count / whole for tier, count in self.tokens.items()}

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were not computed."""
        return 1.0 - self.shares.get(COMPUTED, 1.0) if self.prompt_tokens else 0.0


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """`p50`, `p90`, `p99`, each one of the values; 0.0 without values."""
    ordered = sorted(values)
    return {
        f"p{round(share * 100)}": ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
        for share in QUANTILES
    }
