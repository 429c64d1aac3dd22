"""Rules for retries: which failed calls are repeated, and after which pause. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import (
    Exhausted,
    FerrymanError,
    NoWorker,
    Stale,
    Stopping,
    Suspect,
    Unavailable,
)

Chance = Callable[[], float]

# A restarted router keeps an unfinished stream for less than a second.
MAX_OUTAGE_PAUSE_SECONDS = 0.5
MAX_DOUBLINGS = 16


class ConnectionBroken(Unavailable):
    """The connection ended before the answer did, and the server gave no reason."""


class NotResumable(Stale):
    """An answer ended after `num_tokens` tokens that the caller has, and cannot be resumed.

    The delivered tokens are correct; the tokens after them are unknown.
    """

    def __init__(self, num_tokens: int, why: str) -> None:
        super().__init__(f"{num_tokens} tokens were delivered and cannot be resumed: {why}")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of retries: `max_failures` refusals in a row without progress (0 never retries), and
    `outage_seconds` of an outage: broken connections, a router that is ending or has no workers.

    The first pause is short: a router keeps a broken stream only for a moment.
    """

    max_failures: int = 6
    first_seconds: float = 0.05
    max_seconds: float = 2.0
    outage_seconds: float = 30.0

    def pause(
        self, error: FerrymanError, num_failures: int, failing_seconds: float, chance: Chance
    ) -> float | None:
        """Seconds to wait after the `num_failures`-th failure in a row, the first of which was
        `failing_seconds` ago; None: give up."""
        if not self.max_failures or not isinstance(error, Unavailable | Exhausted):
            return None
        if isinstance(error, Suspect):  # each retry could end two more workers
            return None
        if is_outage(error):
            is_over, longest = failing_seconds > self.outage_seconds, MAX_OUTAGE_PAUSE_SECONDS
        else:
            is_over, longest = num_failures > self.max_failures, self.max_seconds
        if is_over:
            return None
        ceiling: float = self.first_seconds * 2 ** min(num_failures - 1, MAX_DOUBLINGS)
        pause = min(longest, ceiling) * (0.5 + chance() / 2)
        return max(pause, error.retry_after_seconds) if isinstance(error, Exhausted) else pause


def is_outage(error: FerrymanError) -> bool:
    """Whether no process is there now that could answer, in contrast to one that refuses."""
    return isinstance(error, ConnectionBroken | Stopping | NoWorker)
