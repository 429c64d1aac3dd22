"""Calls to the router: their deadlines, what a failure means, and the patience with failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from ferryman.client.retries import Chance, ConnectionBroken, Retries
from ferryman.errors import DeadlineExceeded, FerrymanError, InvalidRequest
from ferryman.wire.status import REASON, typed

MAX_SECONDS = 24 * 3600.0
_BROKEN = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")


class Deadline:
    """A moment by which a caller wants its answer."""

    def __init__(self, seconds: float) -> None:
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a deadline is above 0 to {MAX_SECONDS:g} s", "deadline_seconds")
        self._end = asyncio.get_running_loop().time() + seconds

    def seconds_left(self) -> float:
        """Raises DeadlineExceeded when there are none."""
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed")
        return left


class Failures:
    """Counts the failures in a row of one call, and waits between them."""

    def __init__(self, retries: Retries, chance: Chance, deadline: Deadline) -> None:
        self._retries, self._chance, self._deadline = retries, chance, deadline
        self._num_failures = 0

    def forget(self) -> None:
        """There was progress."""
        self._num_failures = 0

    async def wait(self, error: FerrymanError) -> None:
        """Waits until the call may be made again; raises `error` when it may not."""
        self._num_failures += 1
        pause = self._retries.pause(error, self._num_failures, self._chance)
        if pause is None or pause >= self._deadline.seconds_left():
            raise error
        await asyncio.sleep(pause)


@contextmanager
def told_apart() -> Iterator[None]:
    """gRPC's errors leave as FerrymanErrors; what no server explained, as ConnectionBroken."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        is_explained = any(key == REASON for key, _ in error.trailing_metadata() or ())
        if is_explained or error.code().name not in _BROKEN:
            raise typed(error) from error
        raise ConnectionBroken(error.details() or "the connection broke") from error
