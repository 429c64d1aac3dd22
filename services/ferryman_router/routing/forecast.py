"""Predicts when a request would be answered, from what the cluster has done lately. Pure.

    wait     tokens served before it / tokens a second that leave the queue while requests wait
    service  placed to first token, and then seconds per token x the tokens expected of the answer

Both paces are Little's law, W = L / lambda (Little, "A proof for the queuing formula L = lambda W",
1961): the time that is spent in a place, by all that are there, over how many leave it. So they are
seen while requests run, not once these have ended: a machine that others slow down to a third of
its speed looks as slow within two seconds, and as quick again when it is left alone.

Nothing is guessed: while nothing was measured, the seconds are 0 and every request is let in.
Nothing is remembered but what was measured, so a judgement lasts no longer than the load it was
made from: a request that finds the queue empty is always let in.

This is where backpressure comes from: a request whose answer would be too late is refused at
once.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

# The weight of the past after each observation: the last twenty or so count.
KEPT = 0.95
# The factor by which a service may take longer than predicted and still be in time.
CAUTION = 1.5
# The share of a caller's time that may be spent in the queue: the rest is for the answer.
MAX_WAIT_SHARE = 0.5
# The time after which the pace of decoding rows counts for a third of what it did.
PACE_SECONDS = 2.0
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


class DecodePace:
    """Seconds per token of one row, from all rows that decode: the seconds that they spend, over
    the tokens that come. The last PACE_SECONDS count, or the last twenty or so looks if these took
    longer: after a standstill one token does not show how slow the next ones are."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._row_seconds = self._num_tokens = 0.0
        self._counted_until = 0.0

    def begin(self, now: float) -> None:
        """A row has its first token, and decodes."""
        self._count(0, now)
        self.num_rows += 1

    def end(self, now: float) -> None:
        """A row decodes no more."""
        self._count(0, now)
        self.num_rows -= 1

    def drawn(self, num_tokens: int, now: float) -> None:
        """Tokens of some row came, behind its first."""
        self._count(num_tokens, now)

    def seconds_per_token(self, now: float) -> float:
        """0 while nothing was measured; longer and longer while rows decode and no token comes."""
        row_seconds = self._row_seconds + self.num_rows * (now - self._counted_until)
        return row_seconds / self._num_tokens if self._num_tokens else 0.0

    def _count(self, num_tokens: int, now: float) -> None:
        elapsed, self._counted_until = now - self._counted_until, now
        if self.num_rows:
            kept = max(KEPT, math.exp(-elapsed / PACE_SECONDS))
            self._row_seconds = kept * self._row_seconds + self.num_rows * elapsed
            self._num_tokens = kept * self._num_tokens + num_tokens


class DecodingRow:
    """The row of one request, as the forecast sees it: from an attempt's first token until it has
    to `leave`, and again for the next attempt."""

    __slots__ = ("_has_begun", "_pace")

    def __init__(self, pace: DecodePace) -> None:
        self._pace, self._has_begun = pace, False

    def drawn(self, num_tokens: int, now: float) -> None:
        """Tokens came. The time of the first ones is not decode's alone."""
        if self._has_begun:
            self._pace.drawn(num_tokens, now)
        else:
            self._has_begun = True
            self._pace.begin(now)

    def leave(self, now: float) -> None:
        """The attempt is over; a second call changes nothing."""
        if self._has_begun:
            self._has_begun = False
            self._pace.end(now)


class Forecast:
    """The router's experience with its cluster."""

    def __init__(self) -> None:
        self.rate, self.pace = ServiceRate(), DecodePace()
        self._first_seconds = RunningMean()
        self._output_tokens = RunningMean()

    def row(self) -> DecodingRow:
        """The row of a new request."""
        return DecodingRow(self.pace)

    def first_token(self, seconds: float) -> None:
        """A placed request has its first token, so many seconds after it was placed."""
        self._first_seconds.add(seconds)

    def answered(self, num_tokens: int) -> None:
        """An answer is whole. One that was cut does not show how long answers are."""
        self._output_tokens.add(num_tokens)

    def output_tokens(self, max_tokens: int) -> int:
        """The expected tokens: as many as recent answers had, and no more than were asked for."""
        mean = self._output_tokens.value if self._output_tokens else FIRST_GUESS_TOKENS
        return max(1, min(max_tokens, round(mean)))

    def service_seconds(self, need: Need, now: float) -> float:
        """The time from being placed to the last token; 0 while nothing was served."""
        if not self._first_seconds:
            return 0.0
        first = max(self._first_seconds.value, need.prefill_seconds)
        return first + need.output_tokens * self.pace.seconds_per_token(now)

    def seconds_too_late(
        self, need: Need, cost_before: float, seconds_left: float, now: float
    ) -> float:
        """The time by which a request that joins now would miss its deadline, or exceed the share
        of it for waiting; at most 0 when it is in time."""
        wait = self.rate.seconds_for(cost_before, now)
        ends = wait + CAUTION * self.service_seconds(need, now)
        return max(ends - seconds_left, wait - MAX_WAIT_SHARE * seconds_left)

    def is_hopeless(self, need: Need, seconds_left: float, now: float) -> bool:
        """Whether a request could not be answered in time if it were placed now."""
        return CAUTION * self.service_seconds(need, now) > seconds_left

    def is_past_hope(self, need: Need, seconds_left: float, now: float) -> bool:
        """Whether it could not be in time on a machine that is CAUTION times as quick either."""
        return self.service_seconds(need, now) > CAUTION * seconds_left


def retry_seconds(seconds: float) -> float:
    """The wait within bounds that are of use to a caller."""
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))


class LatencyTracker:
    """Times are monotonic seconds; a gap is counted once for every token that ended it."""

    __slots__ = ("_gaps", "_last", "first_seconds")

    def __init__(self, arrived: float) -> None:
        self._last = arrived
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

    def gap_quantile(self, quantile: float) -> float:
        if not self._gaps:
            return 0.0
        ordered = sorted(self._gaps)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
