"""Leases of readers and reservations of writers, each under a name that its owner chose.

A reservation:  writing ── commit ──> visible
                   ├─ release (the writer has stopped), or it is gone ──> freed
                   └─ time is over ──> quarantined ─┬─ commit: too late, but the writer has stopped
                                                    └─ release, or the writer is gone ──> freed

A writer maps the arena and cannot be recalled, so a timeout alone never frees its slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ferryman.cache.keys import PageKey
from ferryman.cache.slots import Holder, SlotHandle
from ferryman.errors import LeaseLost, QueueFull
from ferryman.tiers.values import UnitName, WorkerLife


@dataclass(slots=True)
class ReadLease:
    """Slots kept for a reader until `end`."""

    worker: WorkerLife
    holder: Holder
    slots: Sequence[SlotHandle]
    end: float


@dataclass(slots=True)
class HostReservation:
    """Slots that `worker` may write to. `anchor` keeps the `base` pages below them alive, and the
    units of their resume set that are resident already. Units of a chain that `is_dropped` are not
    inserted."""

    worker: WorkerLife
    holder: Holder
    keys: Sequence[PageKey]
    base: int
    slots: Mapping[UnitName, SlotHandle]
    anchor: ReadLease
    end: float
    is_quarantined: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class StorageLease:
    """Units of extents kept for a reader until `end`."""

    units: tuple[SlotHandle, ...]
    end: float


L = TypeVar("L", ReadLease, HostReservation, StorageLease)


class LeaseTable(Generic[L]):
    """Leases by name, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, L] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[L]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def check_new(self, name: str) -> None:
        """Raises LeaseLost when the name is taken, QueueFull when there are too many."""
        if name in self._by_name:
            raise LeaseLost(f"lease {name} exists already")
        if len(self._by_name) >= self._limit:
            raise QueueFull(f"{self._limit} leases are open")

    def add(self, name: str, lease: L) -> None:
        self._by_name[name] = lease

    def get(self, name: str) -> L | None:
        return self._by_name.get(name)

    def pop(self, name: str) -> L | None:
        return self._by_name.pop(name, None)

    def renew(self, name: str, now: float, end: float) -> bool:
        """Prolongs a lease; False if there is none, or if its time is over."""
        lease = self._by_name.get(name)
        if lease is None or now >= lease.end:
            return False
        lease.end = end
        return True

    def over(self, now: float) -> list[str]:
        """Names of leases whose time is over."""
        return [name for name, lease in self._by_name.items() if now >= lease.end]

    def items(self) -> Iterable[tuple[str, L]]:
        return self._by_name.items()


class ReleasedNames:
    """Names released before they were used. A late request under such a name is refused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> None:
        self._names[name] = None
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def check(self, name: str) -> None:
        if name in self._names:
            raise LeaseLost(f"lease {name} was released before it was asked for")
