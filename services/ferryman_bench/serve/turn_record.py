"""The record of each turn, and statistics over records; no clock and no client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

PERCENTS = (50, 90, 99)
RESAMPLES = 2_000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn, with times in seconds from the start of the run.

    `arrivals` are those of pieces of text. Counts are None where the server does not tell;
    `is_right` is None where no right answer is known. `error` is empty for an answer.
    """

    session: int
    turn: int
    sent: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    is_right: bool | None = None
    error: str = ""

    @property
    def first_seconds(self) -> float:
        """The time from sending to the first piece; to the end if there was none."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; pieces where the server does not count."""
        return self.completion_tokens or len(self.arrivals)

    @property
    def seconds_per_token(self) -> float:
        """The mean gap between tokens after the first."""
        if not self.arrivals:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """A good answer has its first token and its mean gap within these seconds."""

    first_seconds: float
    gap_seconds: float

    def has(self, record: TurnRecord) -> bool:
        is_quick = record.first_seconds <= self.first_seconds
        return not record.error and is_quick and record.seconds_per_token <= self.gap_seconds


def samples(records: Sequence[TurnRecord]) -> dict[str, list[float]]:
    """Milliseconds by what they measure, over all answers."""
    answered = [record for record in records if not record.error]
    later = [record for record in answered if record.turn > 0]
    groups = {
        "first token": [record.first_seconds for record in answered],
        "first token, later turns": [record.first_seconds for record in later],
        "between tokens": [gap for record in answered for gap in record.gaps],
        "end to end": [record.ended - record.sent for record in answered],
    }
    return {name: [1e3 * value for value in group] for name, group in groups.items() if group}


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """Sums over a run. Shares are from 0 to 1, or None where nothing is known."""

    requests: int
    errors: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    good_share: float
    good_per_second: float
    cached_share: float | None
    right_share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def totals(records: Sequence[TurnRecord], limits: LatencyLimits) -> LoadTotals:
    """The totals of all that was sent; the run lasts from the first sending to the last end."""
    answered = [record for record in records if not record.error]
    begin = min((record.sent for record in records), default=0.0)
    seconds = max((record.ended for record in records), default=0.0) - begin
    good = sum(limits.has(record) for record in records)
    per_second = 1 / seconds if seconds > 0 else 0.0
    return LoadTotals(
        len(records),
        len(records) - len(answered),
        seconds,
        sum(record.num_tokens for record in answered) * per_second,
        len(answered) * per_second,
        good / max(1, len(records)),
        good * per_second,
        _cached_share(answered),
        _right_share(answered),
    )


def _cached_share(records: Sequence[TurnRecord]) -> float | None:
    counted = [record for record in records if record.cached_tokens is not None]
    prompt = sum(record.prompt_tokens or 0 for record in counted)
    return sum(record.cached_tokens or 0 for record in counted) / prompt if prompt else None


def _right_share(records: Sequence[TurnRecord]) -> float | None:
    checked = [record.is_right for record in records if record.is_right is not None]
    return sum(checked) / len(checked) if checked else None


def percentiles_of(values: Sequence[float]) -> Mapping[int, float]:
    """PERCENTS of some values, at least one."""
    return dict(zip(PERCENTS, np.percentile(values, PERCENTS).tolist(), strict=True))


def ratio_interval(
    old: Sequence[float], new: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """The ratio of medians, new by old, and the ends of its bootstrap interval of 95 %.

    Each run is drawn again from its own values (B. Efron, Bootstrap Methods, 1979).
    """
    rng = np.random.default_rng(seed)
    before, after = np.array(old), np.array(new)
    olds = np.median(rng.choice(before, (RESAMPLES, len(before))), axis=1)
    news = np.median(rng.choice(after, (RESAMPLES, len(after))), axis=1)
    low, high = np.percentile(news / np.maximum(olds, 1e-9), _INTERVAL).tolist()
    middle = float(np.median(after) / max(1e-9, float(np.median(before))))
    return middle, low, high


def poisson_arrivals(random: Random, rate: float, count: int) -> list[float]:
    """`count` times in seconds at which sessions begin, `rate` a second on average."""
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += random.expovariate(rate)
    return times
