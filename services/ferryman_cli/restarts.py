"""Whether a process that died is started again, and how soon. Pure: `now` comes in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Given up is what died `max_deaths` times within `within_seconds`, or failed to become ready
    `max_failed_starts` times in a row. The pause doubles with every death in that time."""

    max_deaths: int = 5
    within_seconds: float = 30.0
    max_failed_starts: int = 3
    first_seconds: float = 0.1
    max_seconds: float = 5.0


class Restarts:
    """The deaths of one process."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._deaths: deque[float] = deque()
        self._failed_starts = 0

    def was_ready(self) -> None:
        """The last start went well."""
        self._failed_starts = 0

    def failed_to_start(self) -> None:
        """The last start did not come to its end."""
        self._failed_starts += 1

    def died(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when there shall be none."""
        patience, deaths = self._patience, self._deaths
        deaths.append(now)
        while deaths[0] < now - patience.within_seconds:
            deaths.popleft()
        is_hopeless = (
            len(deaths) >= patience.max_deaths or self._failed_starts >= patience.max_failed_starts
        )
        if is_hopeless:
            return None
        pause: float = patience.first_seconds * 2 ** (len(deaths) - 1)
        return min(patience.max_seconds, pause)
