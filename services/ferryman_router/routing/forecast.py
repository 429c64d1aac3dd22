"""Predicts when a request would be answered, from what the cluster has done lately. Pure.

    wait     tokens served before it / tokens a second that leave the queue while requests wait
    service  placed to first token, and then seconds per token x the tokens expected of the answer

Nothing is guessed: while nothing was measured, the seconds are 0 and every request is let in.
Nothing is remembered but what was measured, so a judgement lasts no longer than the load it was
made from: a request that finds the queue empty is always let in.

This is where backpressure comes from: a request whose answer would be too late is refused at
once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

# The weight of the past after each observation: the last twenty or so count.
KEPT = 0.95
# The factor by which a service may take longer than predicted and still be in time.
CAUTION = 1.5
# The share of a caller's time that may be spent in the queue: the rest is for the answer.
MAX_WAIT_SHARE = 0.5
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
# Tokens of an answer, while none has ended.
FIRST_GUESS_TOKENS = 128


class RunningMean:
    """A decaying mean; 0 while there is none."""

    __slots__ = ("_total", "_weight")

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, total: float, weight: float = 1.0) -> None:
        """`total` over `weight` observations that were made together."""
        self._total = KEPT * self._total + total
        self._weight = KEPT * self._weight + weight

    @property
    def value(self) -> float:
        return self._total / self._weight if self._weight else 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """The cost of serving one request: at least so many seconds of prefill, and tokens to draw."""

    prefill_seconds: float
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The course of one placed request that had a first token: seconds from being placed to it,
    seconds from the first token to the last one there is, and how many those are."""

    first_seconds: float
    decode_seconds: float
    num_tokens: int
    is_whole: bool


class ServiceRate:
    """Seconds per token of cost at which a queue shrinks. Only time in which requests wait counts:
    an idle cluster is not a slow one."""

    def __init__(self) -> None:
        self._seconds_per_token = RunningMean()
        self._waiting_since: float | None = None

    def taken(self, cost: int, now: float) -> None:
        """A request left the queue to be served."""
        if self._waiting_since is not None:
            self._seconds_per_token.add(now - self._waiting_since, cost)
            self._waiting_since = now

    def looked(self, now: float, *, is_waiting: bool) -> None:
        """Notes whether requests wait now, after all that could be placed."""
        if not is_waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def seconds_for(self, cost: float, now: float) -> float:
        """The time until so many tokens have left the queue; longer while nothing leaves it."""
        seconds = cost * self._seconds_per_token.value
        if self._seconds_per_token and self._waiting_since is not None:
            # A cluster that stands still must not look as quick as it last was.
            seconds = max(seconds, now - self._waiting_since)
        return seconds


class Forecast:
    """The router's experience with its cluster."""

    def __init__(self) -> None:
        self.rate = ServiceRate()
        self._first_seconds = RunningMean()
        self._seconds_per_token = RunningMean()
        self._output_tokens = RunningMean()

    def served(self, served: ServedRequest) -> None:
        """Records one request. An answer that was cut does not show how long answers are."""
        self._first_seconds.add(served.first_seconds)
        if served.num_tokens > 1:
            self._seconds_per_token.add(served.decode_seconds, served.num_tokens - 1)
        if served.is_whole:
            self._output_tokens.add(served.num_tokens)

    def output_tokens(self, max_tokens: int) -> int:
        """The expected tokens: as many as recent answers had, and no more than were asked for."""
        mean = self._output_tokens.value if self._output_tokens else FIRST_GUESS_TOKENS
        return max(1, min(max_tokens, round(mean)))

    def service_seconds(self, need: Need) -> float:
        """The time from being placed to the last token; 0 while nothing was served."""
        if not self._first_seconds:
            return 0.0
        first = max(self._first_seconds.value, need.prefill_seconds)
        return first + need.output_tokens * self._seconds_per_token.value

    def seconds_too_late(
        self, need: Need, cost_before: float, seconds_left: float, now: float
    ) -> float:
        """The time by which a request that joins now would miss its deadline, or exceed the share
        of it for waiting; at most 0 when it is in time."""
        wait = self.rate.seconds_for(cost_before, now)
        ends = wait + CAUTION * self.service_seconds(need)
        return max(ends - seconds_left, wait - MAX_WAIT_SHARE * seconds_left)

    def is_hopeless(self, need: Need, seconds_left: float) -> bool:
        """Whether a request could not be answered in time if it were placed now."""
        return CAUTION * self.service_seconds(need) > seconds_left


def retry_seconds(seconds: float) -> float:
    """The wait within bounds that are of use to a caller."""
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))


class LatencyTracker:
    """Times are monotonic seconds; a gap is counted once for every token that ended it."""

    __slots__ = ("_arrived", "_gaps", "_last", "first_seconds")

    def __init__(self, arrived: float) -> None:
        self._arrived = self._last = arrived
        self._gaps = array("f")
        self.first_seconds: float | None = None

    def tokens(self, num_tokens: int, now: float) -> float:
        """Counts tokens that came together; returns the seconds since the ones before."""
        gap, self._last = now - self._last, now
        if self.first_seconds is None:
            self.first_seconds = gap
            return gap
        share = gap / num_tokens
        for _ in range(num_tokens):
            self._gaps.append(share)
        return share

    @property
    def decode_seconds(self) -> float:
        """The time from the first token to the latest one."""
        return self._last - self._arrived - (self.first_seconds or 0.0)

    def gap_quantile(self, quantile: float) -> float:
        if not self._gaps:
            return 0.0
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
