"""Who reads from storage: units under names their readers chose, each for a limited time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ferryman.cache.slots import SlotHandle
from ferryman.errors import LeaseLost, QueueFull


@dataclass(slots=True)
class _Lease:
    units: tuple[SlotHandle, ...]
    end: float


class StorageLeases:
    """At most `limit` leases of `seconds` each; a unit may be in several."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._by_name: dict[str, _Lease] = {}
        self._counts: Counter[SlotHandle] = Counter()

    def __len__(self) -> int:
        return len(self._by_name)

    def is_free(self, unit: SlotHandle) -> bool:
        return unit not in self._counts

    def check_new(self, name: str) -> None:
        """Raises LeaseLost when the name is taken, QueueFull when there are too many."""
        if name in self._by_name:
            raise LeaseLost(f"storage lease {name} exists already")
        if len(self._by_name) >= self._limit:
            raise QueueFull(f"{self._limit} storage leases are open")

    def add(self, name: str, units: Iterable[SlotHandle], now: float) -> None:
        lease = _Lease(tuple(units), now + self._seconds)
        self._by_name[name] = lease
        self.keep(lease.units)

    def keep(self, units: Iterable[SlotHandle]) -> None:
        """Without a name and without an end: what a group being written stands on."""
        self._counts.update(units)

    def let_go(self, units: Iterable[SlotHandle]) -> None:
        for unit in units:
            self._counts[unit] -= 1
            if not self._counts[unit]:
                del self._counts[unit]

    def renew(self, names: Iterable[str], now: float) -> tuple[str, ...]:
        """Says which of them are gone."""
        lost = []
        for name in names:
            lease = self._by_name.get(name)
            if lease is None or now >= lease.end:
                lost.append(name)
            else:
                lease.end = now + self._seconds
        return tuple(lost)

    def release(self, name: str) -> None:
        if lease := self._by_name.pop(name, None):
            self.let_go(lease.units)

    def expire(self, now: float) -> None:
        for name in [name for name, lease in self._by_name.items() if now >= lease.end]:
            self.release(name)
