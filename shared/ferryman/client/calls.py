"""Calls to the router: their deadlines, the meaning of a failure, and the wait before a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from ferryman.client.retries import Chance, ConnectionBroken, Retries, is_outage
from ferryman.errors import DeadlineExceeded, FerrymanError, InvalidRequest
from ferryman.wire.grpc.status import is_unexplained, typed

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
