"""Which attempts were cancelled lately, so that what arrives late is refused."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """A bounded memory of cancelled attempts: one of a request stands for all before it.

    At the bound the oldest goes first; leases then still end what it would have refused.
    """

    def __init__(self, max_tombstones: int, lifetime_seconds: float) -> None:
        self._max_tombstones = max_tombstones
        self._lifetime_seconds = lifetime_seconds
        self._graves: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, request_id: str, attempt: int, now: float) -> None:
        earlier, _ = self._graves.pop(request_id, (attempt, now))
        self._graves[request_id] = max(attempt, earlier), now + self._lifetime_seconds
        while len(self._graves) > self._max_tombstones:
            self._graves.popitem(last=False)

    def holds(self, request_id: str, attempt: int, now: float) -> bool:
        cancelled, end = self._graves.get(request_id, (attempt - 1, now))
        return attempt <= cancelled and now < end

    def expire(self, now: float) -> None:
        while self._graves and next(iter(self._graves.values()))[1] <= now:
            self._graves.popitem(last=False)
