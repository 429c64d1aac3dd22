"""Which (request, attempt) was cancelled lately, so that what arrives late is refused."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """A bounded memory of cancelled attempts; the oldest goes first."""

    def __init__(self, max_tombstones: int, lifetime_seconds: float) -> None:
        self._max_tombstones = max_tombstones
        self._lifetime_seconds = lifetime_seconds
        self._ends: OrderedDict[tuple[str, int], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, request_id: str, attempt: int, now: float) -> None:
        self._ends.pop((request_id, attempt), None)
        self._ends[request_id, attempt] = now + self._lifetime_seconds
        while len(self._ends) > self._max_tombstones:
            self._ends.popitem(last=False)

    def holds(self, request_id: str, attempt: int, now: float) -> bool:
        return now < self._ends.get((request_id, attempt), now)

    def expire(self, now: float) -> None:
        while self._ends and next(iter(self._ends.values())) <= now:
            self._ends.popitem(last=False)
