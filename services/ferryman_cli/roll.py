"""`ferryman roll`: has every worker and host-cache end and come back, one at a time.

The launcher has to start them again: `ferryman up`, Compose or Kubernetes. A decode
worker's requests go on at another one with their state, so the role of each needs a second worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from ferryman.errors import DeadlineExceeded, NotFound, Unavailable
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.heartbeat import BOTH, DECODE, HOSTCACHE, PREFILL, Heartbeat
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman_cli.drain import (
    LISTEN_SECONDS,
    DrainChoice,
    DrainOrder,
    OrderAccess,
    check_drain,
    drain_order,
    hearing_beats,
    load_text,
    tell,
    until_ended,
)
from ferryman_cli.lifecycle_reader import next_beat

# Host-caches last: a worker that came back has attached to the one that stays.
ORDER = (DECODE, BOTH, PREFILL, HOSTCACHE)
AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RollChoice:
    """`takes_last`: also workers without another one of their role, though requests then wait.
    `patience` is how many seconds one may take to come back."""

    takes_last: bool
    patience: float


def rolled(heard: Collection[Heartbeat], choice: RollChoice) -> list[Heartbeat]:
    """The processes to restart, in order. Raises NotFound without any, and InvalidRequest where
    one is the last of its role."""
    found = [beat for role in ORDER for beat in heard if beat.role == role]
    if not found:
        raise NotFound("no worker was heard")
    for beat in found:
        check_next(beat, heard, choice)
    return found


def check_next(beat: Heartbeat, heard: Collection[Heartbeat], choice: RollChoice) -> None:
    """Whether the next one may go now. Raises InvalidRequest for the last of its role, Unavailable
    for one that drains already. Without a host-cache units are only missed."""
    if beat.role != HOSTCACHE:
        check_drain(DrainChoice(beat.worker_id, choice.takes_last), heard)


class RollReport:
    """Tells of a rolling restart on stdout: a line for each process that goes or is back."""

    def __init__(self, num_processes: int, *, as_json: bool) -> None:
        self._num_processes, self._as_json = num_processes, as_json
        self._number = 0

    def goes(self, beat: Heartbeat) -> None:
        self._number += 1
        count = f"{self._number} of {self._num_processes}"
        text = f"{count}: {beat.worker_id} drains: {load_text(beat)}"
        self._say("draining", beat.worker_id, text)

    def came(self, beat: Heartbeat, before: str) -> None:
        self._say("replaced", before, f"{before} is back as {beat.worker_id}", by=beat.worker_id)

    def _say(self, state: str, worker_id: str, text: str, **more: str) -> None:
        tell({"worker_id": worker_id, "state": state, **more}, text, as_json=self._as_json)


def run_roll(access: OrderAccess, choice: RollChoice, *, as_json: bool) -> int:
    """Restarts all, one after the other. Raises Unavailable where one does not come back: the
    others are left as they are."""
    asyncio.run(_roll(access, choice, as_json))
    return 0


async def _roll(access: OrderAccess, choice: RollChoice, as_json: bool) -> None:
    async with hearing_beats(access) as (bus, messages):
        heard = await _heard(messages)
        report = RollReport(len(chosen := rolled(heard.values(), choice)), as_json=as_json)
        for beat in chosen:
            # As of now: others may have gone meanwhile, by other hands.
            now = await _heard(messages)
            if beat.worker_id not in now:
                continue
            check_next(beat, now.values(), choice)
            report.goes(now[beat.worker_id])
            order = drain_order(access, beat.worker_id)
            await _restart(bus, messages, order, now, beat, choice, report)


async def _heard(messages: Messages) -> dict[str, Heartbeat]:
    """The processes that are there, by id: each says so once a second."""
    heard: dict[str, Heartbeat] = {}
    try:
        async with asyncio.timeout(LISTEN_SECONDS):
            while True:
                beat = await next_beat(messages)
                heard[beat.worker_id] = beat
    except TimeoutError:
        return heard


async def _restart(
    bus: NatsBus,
    messages: Messages,
    order: DrainOrder,
    heard: Collection[str],
    beat: Heartbeat,
    choice: RollChoice,
    report: RollReport,
) -> None:
    try:
        async with asyncio.timeout(choice.patience):
            await _order(bus, order)
            await until_ended(bus, messages, order, beat.worker_id, _say_nothing)
            while True:
                new = await next_beat(messages)
                if new.role == beat.role and new.is_ready and new.worker_id not in heard:
                    return report.came(new, beat.worker_id)
    except TimeoutError:
        raise Unavailable(
            f"{beat.worker_id} shall end, and no {beat.role} came in its place in"
            f" {choice.patience:.0f} s: the others are left as they are"
        ) from None


async def _order(bus: NatsBus, order: DrainOrder) -> None:
    """Until the order was heard: the broker may be away for a while, or its answer late. Giving it
    twice changes nothing."""
    while True:
        try:
            return await order.give(bus)
        except DeadlineExceeded:
            continue
        except Unavailable:
            if bus.is_connected:
                return  # the process has ended: an order before was heard
            await asyncio.sleep(AGAIN_SECONDS)


def _say_nothing(_beat: Heartbeat) -> None:
    """The roll tells when it is over."""
