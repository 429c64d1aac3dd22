"""Reads and follows the lifecycle log over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from ferryman.errors import InvalidRequest, NotFound, PermissionDenied, Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry, is_over
from ferryman.ids import check_correlation_id, is_request_id
from ferryman.runtime.lifecycle import credible_event
from ferryman.wire.nats.broker_hops import BrokerHop, hop_from_trace
from ferryman.wire.nats.bus import BusMessage, Messages, RecordedMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import (
    HEARTBEAT_SECONDS,
    Beat,
    Heartbeat,
    StartBeat,
    beat_from_bytes,
)
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.endpoints import BrokerPlace

CLIENT_NAME = "ferryman-cli"
CONNECT_SECONDS = 3.0
MAX_EVENTS = 8192
MAX_SEARCHED = 1 << 18  # more than the log keeps
LAST_WORDS_SECONDS = 2.0
LISTEN_SECONDS = 3.0 * HEARTBEAT_SECONDS
PAUSE_SECONDS = 0.1


@asynccontextmanager
async def connected_bus(place: BrokerPlace) -> AsyncIterator[NatsBus]:
    """A bus with its broker connected. Raises Unavailable when no broker answers."""
    authorities = authorities_in(place.ca)
    options = NatsOptions(place.url, client_name=CLIENT_NAME, authorities=authorities)
    async with connected_with(options) as bus:
        yield bus


def authorities_in(path: str) -> Callable[[], bytes] | None:
    """A reader of a file of authorities; None without one. Raises ConfigError."""
    if not path:
        return None
    # gRPC takes a moment to import, which commands without TLS should not wait for.
    from ferryman.security.tls import read_authorities

    text = read_authorities(path)
    return lambda: text


@asynccontextmanager
async def connected_with(options: NatsOptions) -> AsyncIterator[NatsBus]:
    """The same, with a login or without a log. Raises PermissionDenied for a login that the broker
    refuses."""
    async with nats_bus(options) as bus:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await bus.connected()
                await bus.flush()  # the log exists from now on
        except TimeoutError:
            at = urlsplit(options.servers[0]).netloc.rpartition("@")[2]
            if bus.statistics().num_forbidden:
                raise PermissionDenied(f"the broker at {at} refuses this login") from None
            raise Unavailable(f"no broker answers at {at}") from None
        yield bus


async def next_beat(messages: Messages) -> Heartbeat:
    """The next heartbeat that can be read; a worker that starts has none yet."""
    while True:
        if isinstance(beat := await next_beat_or_start(messages), Heartbeat):
            return beat


async def next_beat_or_start(messages: Messages) -> Beat:
    """The next heartbeat or start beat that can be read."""
    async for message in messages:
        try:
            return beat_from_bytes(message.payload)
        except InvalidRequest:
            continue  # of another version
    raise AssertionError("a subscription has no end of its own")


async def heard_beats(
    bus: NatsBus,
    subjects: Subjects,
    seconds: float,
    *,
    expected: int = 0,
    patience_seconds: float = 0.0,
) -> tuple[dict[str, Heartbeat], list[StartBeat]]:
    """The latest beat of each process, and of each that starts: of `seconds`, and of
    `patience_seconds` while fewer than `expected` are heard."""
    beats: dict[str, Heartbeat] = {}
    starts: dict[str, StartBeat] = {}
    now = asyncio.get_running_loop().time
    began = now()
    async with bus.subscribed(subjects.all_beats) as messages:
        try:
            async with asyncio.timeout(patience_seconds if expected else seconds) as limit:
                while True:
                    beat = await next_beat_or_start(messages)
                    if isinstance(beat, Heartbeat):
                        beats[beat.worker_id] = beat
                    else:
                        starts[beat.worker_id] = beat
                    enough = len(beats) >= expected
                    limit.reschedule(began + (seconds if enough else patience_seconds))
        except TimeoutError:
            return beats, list(starts.values())


async def read_events(place: BrokerPlace, request_id: str) -> list[LifecycleEntry]:
    """All events of a call in the log, by a request's id or by its caller's name for it; waits a
    moment for the last events to arrive.

    A call that outlived its router was sent again as another request. The events of both are
    returned, one request after the other.
    """
    subjects = Subjects(place.cluster)
    check_correlation_id(request_id)
    async with connected_bus(place) as bus:
        *gone, last = await _request_ids(bus, subjects, request_id)
        before = [event for earlier in gone for event in await _life_of(bus, subjects, earlier)]
        deadline = asyncio.get_running_loop().time() + LAST_WORDS_SECONDS
        while True:
            events = await _life_of(bus, subjects, last)
            if is_over(events) or asyncio.get_running_loop().time() > deadline:
                return [*before, *events]
            await asyncio.sleep(PAUSE_SECONDS)


async def read_log_and_beats(place: BrokerPlace) -> tuple[list[LifecycleEntry], list[Heartbeat]]:
    """The whole log, and the latest heartbeat of each process that is heard in a moment."""
    subjects = Subjects(place.cluster)
    async with connected_bus(place) as bus:
        recorded = await bus.history(subjects.all_life, max_events=MAX_SEARCHED)
        entries = [credible_event(entry.subject, entry.payload, subjects) for entry in recorded]
        beats, _ = await heard_beats(bus, subjects, LISTEN_SECONDS)
    return [event for event in entries if event is not None], list(beats.values())


async def read_hops(place: BrokerPlace, request_ids: Iterable[str]) -> list[BrokerHop]:
    """The stays of these requests' events in brokers, in order of arrival; none where the broker
    was not asked to trace them."""
    subjects = Subjects(place.cluster)
    async with connected_bus(place) as bus:
        patterns = map(subjects.all_hops_of, request_ids)
        logs = [await bus.history(pattern, max_events=MAX_EVENTS) for pattern in patterns]
    hops = (hop for log in logs for hop in _hops(log, subjects))
    return sorted(hops, key=lambda hop: hop.unix_seconds)


def _hops(recorded: Iterable[RecordedMessage], subjects: Subjects) -> Iterator[BrokerHop]:
    """Only of events of the worker and the request in the subject: others may be forged."""
    for message in recorded:
        with suppress(ValueError):  # of a broker of another version
            hop = hop_from_trace(message.payload)
            of_worker = message.subject.removeprefix(f"{subjects.root}.hops.")
            if hop.subject.rpartition(".")[0] == f"{subjects.root}.life.{of_worker}":
                yield hop


async def follow_events(
    place: BrokerPlace, request_id: str
) -> AsyncGenerator[tuple[BusMessage, LifecycleEntry], None]:
    """Yields events as they happen, of one request or (with an empty id) of all, without end."""
    subjects = Subjects(place.cluster)
    pattern = subjects.all_life_of(request_id) if request_id else subjects.all_life
    async with connected_bus(place) as bus, bus.subscribed(pattern) as messages:
        async for message in messages:
            event = credible_event(message.subject, message.payload, subjects)
            if event is not None:
                yield message, event


def ids_of_call(begun: Iterable[LifecycleEntry], name: str) -> tuple[str, ...]:
    """The ids under which a call was received, first to last. The call is the one with this id, or
    the latest one that its caller named so. Pure.

    Callers may use a name twice. Only a request that was sent before belongs to the call before it.
    """
    begun = list(begun)
    named = next((_name_of(event) for event in begun if event.request_id == name), name)
    calls: list[list[str]] = []
    for event in begun:
        if _name_of(event) == named:
            if not (calls and event.facts.get("sent_before")):
                calls.append([])
            calls[-1].append(event.request_id)
    return tuple(next((ids for ids in calls if name in ids), calls[-1] if calls else ()))


def _name_of(begun: LifecycleEntry) -> object:
    return begun.facts.get("correlation_id", begun.request_id)


async def _request_ids(bus: NatsBus, subjects: Subjects, name: str) -> tuple[str, ...]:
    begun = _events(await bus.history(subjects.all_received, max_events=MAX_SEARCHED), subjects)
    if ids := ids_of_call(begun, name):
        return ids
    if is_request_id(name) and await bus.history(subjects.all_life_of(name), max_events=1):
        return (name,)  # its first event was lost
    raise NotFound(f"the lifecycle log has nothing of {name}")


async def _life_of(bus: NatsBus, subjects: Subjects, request_id: str) -> list[LifecycleEntry]:
    recorded = await bus.history(subjects.all_life_of(request_id), max_events=MAX_EVENTS)
    return _events(recorded, subjects)


def _events(recorded: tuple[RecordedMessage, ...], subjects: Subjects) -> list[LifecycleEntry]:
    events = (credible_event(message.subject, message.payload, subjects) for message in recorded)
    return [event for event in events if event is not None]
