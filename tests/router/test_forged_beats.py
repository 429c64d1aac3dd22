"""Beats and cache events in the name of another worker: a router believes none, and counts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.doubles.memory_bus import MemoryBus

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.runtime.background import Background
from ferryman.wire.codec.caches import CacheEvent, cache_event_to_bytes
from ferryman.wire.grpc.rpc import channel, listening
from ferryman.wire.nats.heartbeat import DECODE, PREFILL, Heartbeat, ServedState, beat_to_bytes
from ferryman.wire.nats.sender_proof import (
    LIFE_HEADER,
    CheckSender,
    believe_all,
    check_sender,
    proof_for,
)
from ferryman.wire.nats.subjects import Subjects
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.routing.fleet import Effect, Fleet, WorkerJoined, WorkerName
from ferryman_router.routing.fleet_listener import FleetListener, Liveness, SenderChecks

LOCAL = Subjects("local")
STATE = ServedState("f", 4, "d", (Kind.FULL,))
SECRET, OTHER_SECRET = make_life_secret(), make_life_secret()
KEY = PageKey(bytes(16))


def beat_of(secret: str, epoch: int = 7) -> Heartbeat:
    worker_id = worker_id_of(DECODE, secret)
    return Heartbeat(DECODE, worker_id, epoch, f"{worker_id}:1", True, STATE, 100)


BEAT, OTHER = beat_of(SECRET), beat_of(OTHER_SECRET)
NAME = WorkerName(BEAT.worker_id, BEAT.epoch)


@dataclass
class Heard:
    """A router's fleet as heard through the bus, and the number of forged messages."""

    check: CheckSender
    bus: MemoryBus = field(default_factory=MemoryBus)
    fleet: Fleet = field(default_factory=lambda: Fleet(1e9))
    metrics: RouterMetrics = field(default_factory=RouterMetrics)

    @property
    def num_forged(self) -> float:
        (found,) = self.metrics.forged_messages.collect()
        return found.samples[0].value

    @property
    def num_misplaced(self) -> float:
        (found,) = self.metrics.misplaced_beats.collect()
        return found.samples[0].value

    async def hear(self, say: Callable[[], None]) -> None:
        """Until all that `say` says has been heard and looked into: it hears another worker's first
        beat after it."""
        secret, joined = make_life_secret(), asyncio.Event()
        probes: list[asyncio.Task[None]] = []

        def happened(effect: Effect) -> None:
            if isinstance(effect, WorkerJoined) and effect.beat == beat_of(secret):
                joined.set()

        async with asyncio.timeout(120), Background() as background:

            def start(probe: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                probes.append(background.start(probe))
                return probes[-1]

            liveness = Liveness(
                self.fleet,
                patience=120.0,
                start=start,
                lost=lambda name, cause: None,
                connect=channel,
            )
            listener = FleetListener(
                self.bus,
                LOCAL,
                self.fleet,
                liveness,
                happened=happened,
                senders=SenderChecks(
                    self.check, self.metrics.forged_messages, self.metrics.misplaced_beats
                ),
                background=background,
                clock=lambda: 0.0,
            )
            async with listener.listening():
                say()
                self.beat(beat_of(secret), secret)
                await joined.wait()
                for probe in probes:
                    await probe

    def beat(self, beat: Heartbeat, secret: str, subject: str = "") -> None:
        subject = subject or LOCAL.beat(beat.role, beat.worker_id)
        self.bus.offer(subject, beat_to_bytes(beat), proof_for(subject, secret))

    def cache_change(self, beat: Heartbeat, secret: str, subject: str = "") -> None:
        """The worker holds one page."""
        event = CacheEvent(beat.worker_id, beat.epoch, 1, removed={}, stored={Kind.FULL: (KEY,)})
        subject = subject or LOCAL.cache(beat.worker_id, beat.epoch)
        self.bus.publish(subject, cache_event_to_bytes(event), proof_for(subject, secret))


async def test_a_worker_that_shows_its_secret_is_believed() -> None:
    heard = Heard(check_sender)
    await heard.hear(lambda: heard.beat(BEAT, SECRET))
    await heard.hear(lambda: heard.cache_change(BEAT, SECRET))
    assert heard.fleet.get(NAME) is not None
    assert heard.num_forged == 0


async def test_a_worker_whose_beats_are_none_does_not_end_the_listener() -> None:
    subject, heard = LOCAL.beat(BEAT.role, BEAT.worker_id), Heard(check_sender)

    def say() -> None:
        raw = json.loads(beat_to_bytes(BEAT))
        for name, value in (("epoch", []), ("num_running", "many"), ("max_running", None)):
            payload = json.dumps({**raw, name: value}).encode()
            heard.bus.offer(subject, payload, proof_for(subject, SECRET))
        heard.bus.offer(subject, b"[" * 100_000)

    await heard.hear(say)
    assert heard.fleet.get(NAME) is None


FORGED = {
    "no secret": "",
    "the secret of another life": OTHER_SECRET,
    "the id itself": BEAT.worker_id,
}


@pytest.mark.parametrize("secret", FORGED.values(), ids=FORGED)
async def test_a_beat_in_another_s_name_changes_nothing(secret: str) -> None:
    """It can say neither that the worker drains, nor where it is, nor that it began anew."""
    heard = Heard(check_sender)
    await heard.hear(lambda: heard.beat(BEAT, SECRET))
    lies = (
        replace(BEAT, is_ready=False),
        replace(BEAT, address="attacker:1"),
        replace(BEAT, epoch=8),
    )
    for number, lie in enumerate(lies, start=1):
        await heard.hear(lambda lie=lie: heard.beat(lie, secret))  # type: ignore[misc]
        known = heard.fleet.get(NAME)
        assert known is not None
        assert known.beat == BEAT
        assert heard.num_forged == number


async def test_an_open_cluster_believes_such_a_beat() -> None:
    heard = Heard(believe_all)
    await heard.hear(lambda: heard.beat(BEAT, SECRET))
    await heard.hear(lambda: heard.beat(replace(BEAT, address="attacker:1"), ""))
    known = heard.fleet.get(NAME)
    assert known is not None
    assert known.beat.address == "attacker:1"
    assert heard.num_forged == 0


async def test_a_worker_tells_nothing_of_another_s_cache() -> None:
    heard = Heard(check_sender)
    await heard.hear(lambda: heard.beat(BEAT, SECRET))
    await heard.hear(lambda: heard.cache_change(BEAT, OTHER_SECRET))
    assert heard.num_forged == 1
    await heard.hear(lambda: heard.cache_change(BEAT, OTHER_SECRET, LOCAL.cache("decode-1", 1)))
    assert heard.num_forged == 2


@pytest.mark.parametrize("check", [check_sender, believe_all])
async def test_a_decode_worker_is_no_prefill_worker_by_saying_so(check: CheckSender) -> None:
    """The broker lets it speak on the subjects of its role; the payload names another."""
    heard, liar = Heard(check), replace(BEAT, role=PREFILL)
    subject = LOCAL.beat(DECODE, BEAT.worker_id)
    await heard.hear(lambda: heard.beat(liar, SECRET, subject))
    assert heard.fleet.get(NAME) is None
    assert heard.num_forged == 1


async def test_another_s_name_on_its_own_subject_is_forged() -> None:
    heard = Heard(check_sender)
    subject = LOCAL.beat(DECODE, OTHER.worker_id)
    await heard.hear(lambda: heard.beat(BEAT, OTHER_SECRET, subject))
    assert heard.fleet.get(NAME) is None
    assert heard.num_forged == 1


@asynccontextmanager
async def at_a_door(worker_id: str) -> AsyncIterator[str]:
    """The address of a process with this id."""
    async with listening("127.0.0.1:0", lambda _: None, grace=0, worker_id=worker_id) as server:
        yield f"127.0.0.1:{server.port}"


async def test_a_worker_that_names_another_s_address_does_not_drive_it_out() -> None:
    """It shows its own secret, so it is who it says; but at that address the other one answers."""
    heard = Heard(check_sender)
    async with at_a_door(BEAT.worker_id) as address:
        await heard.hear(lambda: heard.beat(replace(BEAT, address=address), SECRET))
        for _ in range(2):
            liar = replace(OTHER, address=address)
            await heard.hear(lambda liar=liar: heard.beat(liar, OTHER_SECRET))  # type: ignore[misc]
    assert heard.fleet.get(NAME) is not None
    assert heard.fleet.get(WorkerName(OTHER.worker_id, OTHER.epoch)) is None
    assert (heard.num_misplaced, heard.num_forged) == (2, 0)


async def test_a_worker_that_took_an_address_over_is_believed() -> None:
    heard = Heard(check_sender)
    async with at_a_door(OTHER.worker_id) as address:
        await heard.hear(lambda: heard.beat(replace(BEAT, address=address), SECRET))
        await heard.hear(lambda: heard.beat(replace(OTHER, address=address), OTHER_SECRET))
    assert heard.fleet.get(NAME) is None
    assert heard.fleet.get(WorkerName(OTHER.worker_id, OTHER.epoch)) is not None
    assert heard.num_misplaced == 0


def test_no_secret_is_shown_where_nobody_asks() -> None:
    asked = (LOCAL.beat(DECODE, BEAT.worker_id), LOCAL.cache(BEAT.worker_id, 7))
    assert [proof_for(subject, SECRET) for subject in asked] == [{LIFE_HEADER: SECRET}] * 2
    others = (
        LOCAL.life(DECODE, BEAT.worker_id, "r1", "admitted"),
        LOCAL.control(BEAT.worker_id, "drain"),
    )
    assert [proof_for(subject, SECRET) for subject in others] == [{}, {}]
    assert proof_for(asked[0], "") == {}
