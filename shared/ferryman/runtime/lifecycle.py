"""Lifecycle events, as they leave a process and as they come out of the log: small JSON that a
person can read, never content.

Publishing never waits. An event for which the bus has no room is dropped. The next event of that
request is preceded by `gap {from, to}`, so that a reader knows which events are missing.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ferryman.errors import InvalidRequest, QueueFull
from ferryman.handoff.lifecycle import GAP, LifecycleEntry
from ferryman.ids import NO_REQUEST
from ferryman.wire.nats.subjects import Subjects

MAX_EVENT_BYTES = 1024
VERSION = 1

Fact = bool | int | float | str | list[int] | list[float] | list[str] | dict[str, int]


LifecycleWatch = Callable[[str, str, int, str, str, Mapping[str, object]], None]
"""Takes role, request id, attempt, name, traceparent and facts of each event of a process before it
is published, and of each note, which is not published. It must not wait."""


def unwatched(*_: object) -> None:
    """Nobody watches."""


EventHeaders = Callable[[LifecycleEntry], Mapping[str, str]]
"""Makes the headers of an event's message."""


def no_headers(event: LifecycleEntry) -> Mapping[str, str]:
    """An event has none, unless the broker is asked to trace it."""
    return {}


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sender of events: one life of one worker."""

    role: str
    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counts for the gauges."""

    num_published: int
    num_dropped: int


@dataclass(slots=True)
class _RequestEvents:
    """The state of one request's events at this publisher. `lost_from` 0: no event is lost."""

    arrived: float
    seq: int = 0
    lost_from: int = 0
    attempt: int = 0
    traceparent: str = ""


class LifecyclePublisher:
    """Publishes the events of one process. `send` takes a subject, a payload and headers, and
    raises QueueFull at once when there is no room.

    It keeps sequence numbers for the `max_requests` requests with the latest events, and always for
    NO_REQUEST.
    """

    def __init__(
        self,
        send: Callable[[str, bytes, Mapping[str, str]], None],
        subjects: Subjects,
        publisher: Publisher,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_requests: int = 8192,
        watch: LifecycleWatch = unwatched,
        headers: EventHeaders = no_headers,
    ) -> None:
        self._watch, self._headers = watch, headers
        self._send = send
        self._subjects = subjects
        self._publisher = publisher
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_requests = max_requests
        self._requests: OrderedDict[str, _RequestEvents] = OrderedDict()
        self._with_gaps: OrderedDict[str, None] = OrderedDict()
        self._num_published = 0
        self._num_dropped = 0

    def as_role(self, role: str) -> LifecyclePublisher:
        """Another publisher of this process, with a role and numbers of its own."""
        return LifecyclePublisher(
            self._send,
            self._subjects,
            replace(self._publisher, role=role),
            clock=self._clock,
            wall_clock=self._wall_clock,
            max_requests=self._max_requests,
            watch=self._watch,
            headers=self._headers,
        )

    def publish(
        self, request_id: str, attempt: int, name: str, *, traceparent: str = "", **facts: Fact
    ) -> None:
        """Publishes that `name` happened to an attempt; `traceparent` stays until it is
        replaced."""
        events = self._events_of(request_id)
        events.attempt, events.traceparent = attempt, traceparent or events.traceparent
        self._watch(self._publisher.role, request_id, attempt, name, events.traceparent, facts)
        if events.lost_from:
            self._try_gap(request_id, events)
        if events.lost_from or not self._try_send(request_id, events, name, facts):
            self._drop(request_id, events)
        elif self._with_gaps:
            self.flush_gaps(max_gaps=1)

    def note(self, request_id: str, name: str, *, traceparent: str, **facts: Fact) -> None:
        """Tells the watch alone, before the first event of a request: an event has no room for
        all that spans say."""
        self._watch(self._publisher.role, request_id, 0, name, traceparent, facts)

    def flush_gaps(self, *, max_gaps: int = 64) -> None:
        """Publishes the gaps of requests with lost events, until the bus has no more room."""
        for request_id in list(self._with_gaps)[:max_gaps]:
            if not self._try_gap(request_id, self._requests[request_id]):
                return

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(self._num_published, self._num_dropped)

    def _events_of(self, request_id: str) -> _RequestEvents:
        if request_id not in self._requests:
            self._requests[request_id] = _RequestEvents(self._clock())
        self._requests.move_to_end(request_id)
        while len(self._requests) > self._max_requests:
            oldest = next(name for name in self._requests if name != NO_REQUEST)
            del self._requests[oldest]
            self._with_gaps.pop(oldest, None)
        return self._requests[request_id]

    def _try_gap(self, request_id: str, events: _RequestEvents) -> bool:
        is_sent = self._try_send(
            request_id, events, GAP, {"from": events.lost_from, "to": events.seq}
        )
        if is_sent:
            events.lost_from = 0
            del self._with_gaps[request_id]
        return is_sent

    def _drop(self, request_id: str, events: _RequestEvents) -> None:
        events.seq += 1
        events.lost_from = events.lost_from or events.seq
        self._with_gaps[request_id] = None
        self._num_dropped += 1

    def _try_send(
        self, request_id: str, events: _RequestEvents, name: str, facts: Mapping[str, object]
    ) -> bool:
        publisher = self._publisher
        event = LifecycleEntry(
            role=publisher.role,
            worker_id=publisher.worker_id,
            epoch=publisher.epoch,
            request_id=request_id,
            attempt=events.attempt,
            seq=events.seq + 1,
            name=name,
            facts=facts,
            unix_ms=int(self._wall_clock() * 1e3),
            elapsed_ms=round((self._clock() - events.arrived) * 1e3, 3),
            traceparent=events.traceparent,
        )
        subject = self._subjects.life(publisher.role, publisher.worker_id, request_id, name)
        try:
            self._send(subject, encode_event(event), self._headers(event))
        except QueueFull:
            return False
        events.seq += 1
        self._num_published += 1
        return True


def encode_event(event: LifecycleEntry) -> bytes:
    """The event as JSON of at most 1 KiB; the largest facts are replaced by their sizes."""
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


def decode_event(payload: bytes) -> LifecycleEntry:
    """Inverse of `encode_event`; raises ValueError when the payload is not an event."""
    try:
        raw = json.loads(payload)
    except RecursionError:
        raise ValueError("a lifecycle event is nested too deeply") from None
    if not isinstance(raw, dict) or raw.get("v") != VERSION:
        raise ValueError(f"no lifecycle event of version {VERSION}")
    try:
        event = LifecycleEntry(
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
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a lifecycle event lacks or spoils a field: {error}") from None
    return _with_whole_gap(event)


def credible_event(subject: str, payload: bytes, subjects: Subjects) -> LifecycleEntry | None:
    """The event; None for what is no event, or was published on a subject that is not its own.

    The broker lets a role publish on subjects of that role alone, and reads no payload. So an event
    counts if its payload names the role, the worker, the request and the event of its subject: then
    a process with that role's login published it. The log does not show which one.
    """
    try:
        event = decode_event(payload)
        expected = subjects.life(event.role, event.worker_id, event.request_id, event.name)
    except (ValueError, InvalidRequest):
        return None
    return event if subject == expected else None


def _encode(event: LifecycleEntry, facts: Mapping[str, object]) -> bytes:
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
    """Replaces a list or table by its length; drops any other fact and counts it."""
    value = facts.pop(name)
    if isinstance(value, list | tuple | dict):
        return {**facts, f"num_{name}": len(value)}
    omitted = facts.pop("omitted", 0)
    assert isinstance(omitted, int)
    return {**facts, "omitted": omitted + 1}


def _with_whole_gap(event: LifecycleEntry) -> LifecycleEntry:
    if event.name != GAP:
        return event
    bounds = {name: event.facts.get(name) for name in ("from", "to")}
    if not all(isinstance(bound, int) for bound in bounds.values()):
        raise ValueError("a gap says from where to where")
    return replace(event, facts=bounds)
