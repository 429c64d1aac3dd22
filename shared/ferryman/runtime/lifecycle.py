"""Lifecycle events as they leave a process: small JSON that a person can read, never content.

Publishing never waits. What the bus has no room for is dropped, and the next event that goes out
is preceded by `gap {from, to}`, so that a reader knows what it does not know.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ferryman.errors import QueueFull
from ferryman.handoff.lifecycle import GAP, LifecycleEvent
from ferryman.ids import NO_REQUEST

MAX_EVENT_BYTES = 1024
VERSION = 1

Fact = bool | int | float | str | list[int] | list[float] | list[str] | dict[str, int]


class LifeSubjects(Protocol):
    """Spells where an event goes; `wire.subjects` does."""

    def life(self, role: str, worker_id: str, request_id: str, event: str) -> str: ...


class EventBus(Protocol):
    """Where events go; raises QueueFull, at once, when there is no room."""

    def publish(self, subject: str, payload: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Publisher:
    """Who speaks: one life of one worker."""

    role: str
    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counts for the gauges."""

    num_published: int
    num_dropped: int


@dataclass(slots=True)
class _Thread:
    """What this publisher has said of one request. `lost_from` 0: nothing is lost."""

    arrived: float
    seq: int = 0
    lost_from: int = 0
    attempt: int = 0
    traceparent: str = ""


class LifecyclePublisher:
    """Publishes the events of one process.

    The `max_requests` last spoken of are remembered, with their sequence numbers, and NO_REQUEST
    always.
    """

    def __init__(
        self,
        bus: EventBus,
        subjects: LifeSubjects,
        publisher: Publisher,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_requests: int = 8192,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._publisher = publisher
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_requests = max_requests
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self._silenced: OrderedDict[str, None] = OrderedDict()
        self._num_published = 0
        self._num_dropped = 0

    def publish(
        self, request_id: str, attempt: int, name: str, *, traceparent: str = "", **facts: Fact
    ) -> None:
        """Says that `name` happened to an attempt; `traceparent` holds until another is given."""
        thread = self._thread(request_id)
        thread.attempt, thread.traceparent = attempt, traceparent or thread.traceparent
        if thread.lost_from:
            self._try_gap(request_id, thread)
        if thread.lost_from or not self._try_send(request_id, thread, name, facts):
            self._lose(request_id, thread)
        elif self._silenced:
            self.flush_gaps(max_gaps=1)

    def flush_gaps(self, *, max_gaps: int = 64) -> None:
        """Says of silenced requests that something was lost, as far as there is room."""
        for request_id in list(self._silenced)[:max_gaps]:
            if not self._try_gap(request_id, self._threads[request_id]):
                return

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(self._num_published, self._num_dropped)

    def _thread(self, request_id: str) -> _Thread:
        if request_id not in self._threads:
            self._threads[request_id] = _Thread(self._clock())
        self._threads.move_to_end(request_id)
        while len(self._threads) > self._max_requests:
            oldest = next(name for name in self._threads if name != NO_REQUEST)
            del self._threads[oldest]
            self._silenced.pop(oldest, None)
        return self._threads[request_id]

    def _try_gap(self, request_id: str, thread: _Thread) -> bool:
        said = self._try_send(request_id, thread, GAP, {"from": thread.lost_from, "to": thread.seq})
        if said:
            thread.lost_from = 0
            del self._silenced[request_id]
        return said

    def _lose(self, request_id: str, thread: _Thread) -> None:
        thread.seq += 1
        thread.lost_from = thread.lost_from or thread.seq
        self._silenced[request_id] = None
        self._num_dropped += 1

    def _try_send(
        self, request_id: str, thread: _Thread, name: str, facts: Mapping[str, object]
    ) -> bool:
        who = self._publisher
        event = LifecycleEvent(
            role=who.role,
            worker_id=who.worker_id,
            epoch=who.epoch,
            request_id=request_id,
            attempt=thread.attempt,
            seq=thread.seq + 1,
            name=name,
            facts=facts,
            unix_ms=int(self._wall_clock() * 1e3),
            elapsed_ms=round((self._clock() - thread.arrived) * 1e3, 3),
            traceparent=thread.traceparent,
        )
        subject = self._subjects.life(who.role, who.worker_id, request_id, name)
        try:
            self._bus.publish(subject, encode_event(event))
        except QueueFull:
            return False
        thread.seq += 1
        self._num_published += 1
        return True


def encode_event(event: LifecycleEvent) -> bytes:
    """The event as JSON of at most 1 KiB: the largest facts give way to how large they were."""
    facts = dict(event.facts)
    encoded = _encode(event, facts)
    while len(encoded) > MAX_EVENT_BYTES:
        sizes = {name: len(json.dumps(value)) for name, value in facts.items()}
        largest = max(sorted(sizes), key=lambda name: sizes[name], default="")
        if not largest or largest == "omitted":
            return _encode(event, {"omitted": len(event.facts)})
        facts = _without(facts, largest)
        encoded = _encode(event, facts)
    return encoded


def decode_event(payload: bytes) -> LifecycleEvent:
    """Inverse of `encode_event`; raises ValueError when the payload is no event."""
    raw = json.loads(payload)
    if not isinstance(raw, dict) or raw.get("v") != VERSION:
        raise ValueError(f"no lifecycle event of version {VERSION}")
    try:
        event = LifecycleEvent(
            role=str(raw["role"]),
            worker_id=str(raw["worker_id"]),
            epoch=int(raw["epoch"]),
            request_id=str(raw["request_id"]),
            attempt=int(raw["attempt"]),
            seq=int(raw["seq"]),
            name=str(raw["event"]),
            facts=dict(raw["facts"]),
            unix_ms=int(raw["unix_ms"]),
            elapsed_ms=float(raw["elapsed_ms"]),
            traceparent=str(raw.get("traceparent", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a lifecycle event lacks or spoils a field: {error}") from None
    return _with_whole_gap(event)


def _encode(event: LifecycleEvent, facts: Mapping[str, object]) -> bytes:
    raw: dict[str, object] = {
        "v": VERSION,
        "event": event.name,
        "request_id": event.request_id,
        "attempt": event.attempt,
        "seq": event.seq,
        "role": event.role,
        "worker_id": event.worker_id,
        "epoch": event.epoch,
        "unix_ms": event.unix_ms,
        "elapsed_ms": event.elapsed_ms,
        "facts": dict(facts),
    }
    if event.traceparent:
        raw["traceparent"] = event.traceparent
    return json.dumps(raw, separators=(",", ":")).encode()


def _without(facts: dict[str, object], name: str) -> dict[str, object]:
    """A list or table gives way to its length; what has no length goes, and is counted."""
    value = facts.pop(name)
    if isinstance(value, list | tuple | dict):
        return {**facts, f"num_{name}": len(value)}
    omitted = facts.pop("omitted", 0)
    assert isinstance(omitted, int)
    return {**facts, "omitted": omitted + 1}


def _with_whole_gap(event: LifecycleEvent) -> LifecycleEvent:
    if event.name != GAP:
        return event
    bounds = {name: event.facts.get(name) for name in ("from", "to")}
    if not all(isinstance(bound, int) for bound in bounds.values()):
        raise ValueError("a gap says from where to where")
    return replace(event, facts=bounds)
