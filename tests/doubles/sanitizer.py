"""The slot sanitizer: checks that an edge, not luck, orders every two uses of a slot.

Operations are recorded as (stream, reads, writes over slot handles, events waited for and
recorded). Operations of one stream run in order. An event orders the operation that waits for it
after the one that recorded it. Vector clocks tell which pairs are ordered (Lamport 1978, Mattern
1989):

    a → b   exactly when   clock(b)[stream of a] ≥ clock(a)[stream of a]

It reports unordered pairs of which one writes, uses of a freed generation, and slots with two
initialisers. Each finding names both operations and the missing edge.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle

Clock = Mapping[str, int]
Handles = tuple[SlotHandle, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on slots by one stream. To initialise or free a slot is to write it."""

    stream: str
    name: str
    reads: Handles = ()
    writes: Handles = ()
    initialises: Handles = ()
    frees: Handles = ()
    waits: tuple[str, ...] = ()
    records: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name!r} on {self.stream}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Two operations on one slot that contradict each other."""

    problem: str
    handle: SlotHandle
    first: Operation
    second: Operation
    remedy: str

    def __str__(self) -> str:
        slot = f"{self.handle.kind} slot {self.handle.slot} generation {self.handle.generation}"
        return f"{slot}: {self.problem}: {self.first} and {self.second}; {self.remedy}"


UNORDERED = "unordered"
FREED = "used after it was freed"
TWO_INITIALISERS = "two initialisers"


class Recorder:
    """Collects operations from any thread, in the order of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[Operation] = []

    def add(self, *operations: Operation) -> None:
        with self._lock:
            self._operations.extend(operations)

    @property
    def operations(self) -> tuple[Operation, ...]:
        with self._lock:
            return tuple(self._operations)

    def findings(self) -> tuple[Finding, ...]:
        return check(self.operations)


def check(operations: Iterable[Operation]) -> tuple[Finding, ...]:
    """All findings about these operations, in their order."""
    clocks, slots, lives = _Clocks(), _Slots(), _Lives()
    found: list[Finding] = []
    for operation in operations:
        clock = clocks.advance(operation)
        found.extend(lives.check(operation))
        found.extend(slots.check(operation, clock))
    return tuple(found)


class _Clocks:
    """Vector clocks: for each stream and event, the operations known to have happened."""

    def __init__(self) -> None:
        self._of_stream: dict[str, dict[str, int]] = {}
        self._of_event: dict[str, Clock] = {}

    def advance(self, operation: Operation) -> Clock:
        """The operation's own clock: all operations before it, and itself."""
        clock = self._of_stream.setdefault(operation.stream, {})
        for event in operation.waits:
            for stream, count in self._of_event.get(event, {}).items():
                clock[stream] = max(clock.get(stream, 0), count)
        clock[operation.stream] = clock.get(operation.stream, 0) + 1
        seen = dict(clock)
        for event in operation.records:
            self._of_event[event] = seen
        return seen


@dataclass(frozen=True, slots=True)
class _Access:
    """One use of a slot's bytes."""

    operation: Operation
    handle: SlotHandle
    count: int

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.operation.stream, 0) >= self.count


@dataclass(slots=True)
class _History:
    """The last write of a slot and the reads since; these follow all earlier accesses."""

    writes: list[_Access] = field(default_factory=list)
    reads: list[_Access] = field(default_factory=list)


class _Slots:
    """Finds unordered pairs: uses of the same bytes, of any generation."""

    def __init__(self) -> None:
        self._histories: dict[tuple[Kind, int], _History] = {}

    def check(self, operation: Operation, clock: Clock) -> Iterator[Finding]:
        count = clock[operation.stream]
        for handle in dict.fromkeys(operation.reads):
            history = self._history(handle)
            yield from _unordered(history.writes, operation, handle, clock)
            history.reads.append(_Access(operation, handle, count))
        for handle in _written(operation):
            history = self._history(handle)
            earlier = [a for a in history.reads if a.operation is not operation]
            yield from _unordered(history.writes + earlier, operation, handle, clock)
            history.writes, history.reads = [_Access(operation, handle, count)], []

    def _history(self, handle: SlotHandle) -> _History:
        return self._histories.setdefault((handle.kind, handle.slot), _History())


def _written(operation: Operation) -> Handles:
    return tuple(dict.fromkeys(operation.writes + operation.initialises + operation.frees))


def _unordered(
    earlier: Iterable[_Access], operation: Operation, handle: SlotHandle, clock: Clock
) -> Iterator[Finding]:
    for access in earlier:
        if not access.is_before(clock):
            first = access.operation
            remedy = (
                f"missing edge: an event that {first.stream} records after {first.name!r} and "
                f"{operation.stream} waits for before {operation.name!r}"
            )
            yield Finding(UNORDERED, handle, first, operation, remedy)


class _Lives:
    """Tracks each generation of a slot: its initialiser and its end."""

    def __init__(self) -> None:
        self._freed: dict[SlotHandle, Operation] = {}
        self._initialised: dict[SlotHandle, Operation] = {}

    def check(self, operation: Operation) -> Iterator[Finding]:
        for handle in dict.fromkeys(operation.reads + _written(operation)):
            if handle in self._freed:
                remedy = "the lease must outlast the use"
                yield Finding(FREED, handle, self._freed[handle], operation, remedy)
        for handle in operation.initialises:
            if handle in self._initialised:
                remedy = "a generation is cleared, copied, loaded or received, once"
                first = self._initialised[handle]
                yield Finding(TWO_INITIALISERS, handle, first, operation, remedy)
            self._initialised[handle] = operation
        self._freed.update(dict.fromkeys(operation.frees, operation))
