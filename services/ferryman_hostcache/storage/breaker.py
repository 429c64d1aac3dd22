"""When to stop asking a disk that fails, and for how long. Pure."""

from __future__ import annotations


class Breaker:
    """After `limit` failures in a row it is open for `rest_seconds`; then one more opens it."""

    def __init__(self, limit: int, rest_seconds: float) -> None:
        self.limit, self.rest_seconds = limit, rest_seconds
        self._in_a_row = 0
        self._until = float("-inf")

    def is_open(self, now: float) -> bool:
        return now < self._until

    def worked(self) -> None:
        self._in_a_row = 0

    def failed(self, now: float) -> bool:
        """Whether this failure opens it."""
        self._in_a_row += 1
        if self._in_a_row < self.limit or self.is_open(now):
            return False
        self._until = now + self.rest_seconds
        return True
