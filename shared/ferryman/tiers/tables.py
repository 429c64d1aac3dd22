"""Who may read and who may write: leases and reservations, each under a name its owner chose.

A reservation:  writing ── commit ──> visible
                   ├─ release (the writer's word), or the writer is gone ──> freed
                   └─ time is over ──> quarantined ─┬─ commit: too late, but the writer's word
                                                    └─ release, or the writer is gone ──> freed

A writer maps the arena and cannot be recalled, so time alone never frees what it may write to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
class Reservation:
    """Slots that `worker` may write to; `anchor` keeps the `base` pages below them alive, and what
    of their resume set is here already."""

    worker: WorkerLife
    holder: Holder
    keys: Sequence[PageKey]
    base: int
    slots: Mapping[UnitName, SlotHandle]
    anchor: ReadLease
    end: float
    is_quarantined: bool = False


L = TypeVar("L", ReadLease, Reservation)


class LeaseTable(Generic[L]):
    """Leases by name, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, L] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[L]:
        return iter(self._by_name.values())

    def check_new(self, name: str) -> None:
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

    def over(self, now: float) -> list[str]:
        """Names of leases whose time is over."""
        return [name for name, lease in self._by_name.items() if now >= lease.end]

    def of(self, worker: WorkerLife) -> list[str]:
        return [name for name, lease in self._by_name.items() if lease.worker == worker]


class ReleasedNames:
    """Names released before anything was heard of them: what comes late under them is refused."""

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
