"""Decides when a process that died is started again, and whether it is hopeless. Pure.

It gives up no process. A hopeless process is tried less and less often; the supervisor decides
whether the cluster can do without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """A process is hopeless after `max_deaths` deaths within `within_seconds`, or after it failed
    to become ready `max_failed_starts` times in a row, until it has been ready for
    `within_seconds`.

    The pause doubles with every death in that time, up to `max_seconds`; for a hopeless process it
    goes on doubling, up to `most_seconds`. A start has failed if it makes no progress for
    `standstill_seconds`.
    """

    max_deaths: int = 5
    within_seconds: float = 30.0
    max_failed_starts: int = 3
    first_seconds: float = 0.1
    max_seconds: float = 5.0
    most_seconds: float = 60.0
    standstill_seconds: float = 120.0


class Restarts:
    """The deaths of one process."""

    def __init__(self, patience: RestartLimits | None = None) -> None:
        self._patience = patience or RestartLimits()
        self._deaths: deque[float] = deque()
        self._failed_starts = 0
        self._hopeless_deaths = 0
        self._ready_since: float | None = None

    @property
    def is_hopeless(self) -> bool:
        return self._hopeless_deaths > 0

    def was_ready(self, now: float) -> None:
        """The last start succeeded."""
        self._failed_starts = 0
        self._ready_since = now

    def failed_to_start(self) -> None:
        """The last start failed."""
        self._failed_starts += 1

    def refused_to_start(self) -> None:
        """The process reported that its settings are wrong: trying again soon would not help."""
        self._failed_starts = max(self._failed_starts + 1, self._patience.max_failed_starts)

    def died(self, now: float) -> float:
        """Seconds to wait before the next start."""
        patience, deaths = self._patience, self._deaths
        since, self._ready_since = self._ready_since, None
        if since is not None and now - since >= patience.within_seconds:
            self._hopeless_deaths = 0  # it lived long enough: the fault is over
        deaths.append(now)
        while deaths[0] < now - patience.within_seconds:
            deaths.popleft()
        has_died_often = len(deaths) >= patience.max_deaths
        if self.is_hopeless or has_died_often or self._failed_starts >= patience.max_failed_starts:
            self._hopeless_deaths += 1
            return min(patience.most_seconds, _doubled(patience.max_seconds, self._hopeless_deaths))
        return min(patience.max_seconds, _doubled(patience.first_seconds, len(deaths)))


def _doubled(seconds: float, times: int) -> float:
    return seconds * float(2 ** min(times - 1, 16))
