"""When a call that failed is made again, and how long to wait before. Pure: chance comes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import Exhausted, FerrymanError, Unavailable

Chance = Callable[[], float]


class ConnectionBroken(Unavailable):
    """The connection ended before the answer did, and the server did not say why."""


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `max_failures` in a row without anything new in between; 0 never retries.

    The first pause is short: a router keeps a stream only for a moment for one who may come back.
    """

    max_failures: int = 6
    first_seconds: float = 0.05
    max_seconds: float = 2.0

    def pause(self, error: FerrymanError, num_failures: int, chance: Chance) -> float | None:
        """Seconds to wait after the `num_failures`-th failure in a row; None: give up."""
        if num_failures > self.max_failures or not isinstance(error, Unavailable | Exhausted):
            return None
        ceiling: float = self.first_seconds * 2 ** (num_failures - 1)
        pause = min(self.max_seconds, ceiling) * (0.5 + chance() / 2)
        return max(pause, error.retry_after_seconds) if isinstance(error, Exhausted) else pause
