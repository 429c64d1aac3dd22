"""`trace`, `events` and `top` against a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tests.cli.recorded import recorded_request
from tests.servers import nats_server

from ferryman.cache.manifest import Kind
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import encode_event
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import (
    Heartbeat,
    ServedState,
    StartBeat,
    StartPhase,
    beat_to_bytes,
)
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.app import run
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import follow_events, ids_of_call
from ferryman_cli.reports.waterfall import event_line
from ferryman_cli.top import GONE_SECONDS, Seen, SeenWorkers, fleet_table

SUBJECTS = Subjects("local")
STATE = ServedState("f", 16, "d", (Kind.FULL,))
BEAT = Heartbeat(
    "decode", "decode-0000000c", 1, "h:1", True, STATE, 4096, free_slots={Kind.FULL: 77}
)


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with nats_server() as url:
        yield url


def publish(bus: NatsBus, events: list[LifecycleEntry]) -> None:
    for event in events:
        subject = SUBJECTS.life(event.role, event.worker_id, event.request_id, event.name)
        bus.publish(subject, encode_event(event))


def logged(url: str, events: list[LifecycleEntry]) -> None:
    """Puts events into the lifecycle log and waits until they are there."""

    pattern = SUBJECTS.all_life_of(events[0].request_id)

    async def log() -> None:
        async with nats_bus(NatsOptions(url)) as bus:
            publish(bus, events)
            await bus.connected()
            await bus.flush()
            while len(await bus.history(pattern, max_events=99)) < len(events):
                await bus.flush()

    asyncio.run(log())


def test_a_legal_request_is_drawn_and_passes(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(nats_url, recorded_request("good"))
    assert run(["trace", "good", "--check", "--nats", nats_url]) == 0
    said = capsys.readouterr().out
    assert "good: 3 tokens in 100 ms" in said
    assert "legal: 11 events" in said


def twice_sent() -> list[LifecycleEntry]:
    """A call that outlived its router: the first life has no end."""
    cut = [one for one in recorded_request("twice") if one.name in ("received", "routed", "queued")]
    again = [
        replace(one, epoch=8, unix_ms=one.unix_ms + 5000) for one in recorded_request("req-again")
    ]
    again[0] = replace(again[0], facts={"correlation_id": "twice", "sent_before": 1})
    return [*cut, *again]


def test_both_lives_of_a_call_that_outlived_its_router_are_drawn(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events = twice_sent()
    logged(nats_url, events[:3])
    logged(nats_url, events[3:])
    for name in ("twice", "req-again"):
        assert run(["trace", name, "--check", "--nats", nats_url]) == 0
        said = capsys.readouterr().out
        assert "twice: not over yet" in said
        assert "twice: no end; the call was sent again" in said
        assert "req-again: 3 tokens in 100 ms" in said
        assert "   5000.0" in said, "on the same scale of time"
        assert "legal: 14 events of 2 requests" in said
    assert run(["trace", "twice", "--check", "--json", "--nats", nats_url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["request_ids"] == ["twice", "req-again"]
    assert told["is_over"]
    assert [each["at_ms"] for each in told["events"] if each["name"] == "received"] == [0, 5000]


def begun(request_id: str, name: str, sent_before: int = 0) -> LifecycleEntry:
    facts = {"correlation_id": name, "sent_before": sent_before}
    return LifecycleEntry("router", "router-1", 1, request_id, 1, 1, "received", facts)


def test_a_call_is_what_was_sent_again_and_not_what_was_named_the_same() -> None:
    log = [
        begun("name", "name"),
        begun("r1", "other"),
        begun("r2", "name", 1),
        begun("r3", "name", 2),
        begun("r4", "name"),
        begun("r5", "name", 1),
    ]
    assert ids_of_call(log, "name") == ("name", "r2", "r3"), "an id before a name"
    assert ids_of_call(log, "r3") == ("name", "r2", "r3")
    assert ids_of_call(log, "r4") == ("r4", "r5")
    assert ids_of_call(log[1:], "name") == ("r4", "r5"), "the latest of a name"
    assert ids_of_call(log, "other") == ("r1",)
    assert ids_of_call(log, "nobody") == ()


def test_an_illegal_request_fails_the_check(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(nats_url, [one for one in recorded_request("bad") if one.name != "queued"])
    assert run(["trace", "bad", "--check", "--json", "--nats", nats_url]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {found["rule"] for found in told["violations"]} >= {"illegal_order", "missing_seq"}
    assert run(["trace", "bad", "--nats", nats_url]) == 0


def test_an_unknown_request_is_not_found(nats_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "nobody", "--nats", nats_url]) == 1
    assert capsys.readouterr().err == "error: the lifecycle log has nothing of nobody\n"


async def test_events_are_followed_as_they_happen(nats_url: str) -> None:
    wanted, other = recorded_request("live"), recorded_request("other")
    async with aclosing(follow_events(BrokerPlace(nats_url), "live")) as events:
        first = asyncio.ensure_future(anext(events))
        async with nats_bus(NatsOptions(nats_url)) as bus:
            while not first.done():  # until the subscription has reached the broker
                publish(bus, [other[0], wanted[0]])
                await asyncio.wait([first], timeout=0.05)
        message, event = await first
    assert message.subject.endswith(".live.received")
    assert event == wanted[0]
    assert "live#1 received" in event_line(event, "", 80).plain


async def test_the_fleet_is_shown_by_its_beats(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with nats_bus(NatsOptions(nats_url)) as bus:
        shown = asyncio.ensure_future(asyncio.to_thread(run, ["top", "--json", "--nats", nats_url]))
        while not shown.done():
            bus.offer(SUBJECTS.beat(BEAT.role, BEAT.worker_id), beat_to_bytes(BEAT))
            await asyncio.wait([shown], timeout=0.1)
    assert await shown == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    assert worker["worker_id"] == BEAT.worker_id
    assert worker["free_slots"] == {"full": 77}


def test_the_silent_are_struck_off() -> None:
    seen = SeenWorkers()
    seen.on_beat(BEAT, 0.0)
    assert [one.beat for one in seen.workers(GONE_SECONDS - 1)] == [BEAT]
    assert seen.workers(GONE_SECONDS + 1) == []


async def test_a_worker_that_starts_is_shown_with_what_it_does(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = StartBeat("decode", BEAT.worker_id, 7, StartPhase.LOADING, 3, 4, 12.3)
    async with nats_bus(NatsOptions(nats_url)) as bus:
        shown = asyncio.ensure_future(asyncio.to_thread(run, ["top", "--json", "--nats", nats_url]))
        while not shown.done():
            bus.offer(SUBJECTS.beat(start.role, start.worker_id), beat_to_bytes(start))
            await asyncio.wait([shown], timeout=0.1)
    assert await shown == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    assert (worker["phase"], worker["done"], worker["total"]) == ("loading weights", 3, 4)
    text = StringIO()
    Console(width=300, file=text).print(fleet_table([Seen(start, 0.0)], 0.0, 300))
    assert "starts for 12 s: loading weights, 75% done" in text.getvalue()


def test_top_shows_a_worker_in_quarantine() -> None:
    beat, text = replace(BEAT, is_quarantined=True), StringIO()
    Console(width=300, file=text).print(fleet_table([Seen(beat, 0.0)], 0.0, 300))
    assert "quarantined" in text.getvalue()
