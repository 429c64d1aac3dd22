"""Failed calls to a router: what each means, which are repeated, and after which pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from ferryman.errors import (
    DeadlineExceeded,
    Exhausted,
    FerrymanError,
    InvalidRequest,
    NoWorker,
    Stale,
    Stopping,
    Suspect,
    Unavailable,
)
from ferryman.wire.grpc.status import is_unexplained, typed

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


MAX_SECONDS = 24 * 3600.0


class Deadline:
    """The time by which a caller wants its answer."""

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a deadline is above 0 to {MAX_SECONDS:g} s", "deadline_seconds")
        self._end = asyncio.get_running_loop().time() + seconds

    def seconds_left(self) -> float:
        """Seconds until the deadline. Raises DeadlineExceeded when it has passed."""
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed")
        return left


class Failures:
    """Counts the consecutive failures of one call, and waits between them."""

    def __init__(self, retries: Retries, chance: Chance, deadline: Deadline) -> None:
        self._retries, self._chance, self._deadline = retries, chance, deadline
        self._num_failures, self._since = 0, 0.0
        self._was_outage = False

    def reset(self) -> None:
        """Resets the count after progress."""
        self._num_failures = 0

    async def wait(self, error: FerrymanError) -> None:
        """Waits until the call may be made again; raises `error` if it may not."""
        now = asyncio.get_running_loop().time()
        if is_outage(error) != self._was_outage:
            self._was_outage = not self._was_outage
            self.reset()
        if not self._num_failures:
            self._since = now
        self._num_failures += 1
        pause = self._retries.pause(error, self._num_failures, now - self._since, self._chance)
        if pause is None or pause >= self._deadline.seconds_left():
            raise error
        await asyncio.sleep(pause)


@contextmanager
def typed_client_errors() -> Iterator[None]:
    """Turns gRPC errors into FerrymanErrors; one that no server explained is ConnectionBroken."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if is_unexplained(error):
            raise ConnectionBroken(error.details() or "the connection broke") from error
        raise typed(error) from error
