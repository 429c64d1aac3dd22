"""`ferryman roll`: has every worker, host-cache and router end and come back, one at a time.

The launcher has to start them again: `ferryman up`, Compose or Kubernetes. A decode
worker's requests go on at another one with their state, so the role of each needs a second worker;
clients of a router that ends ask another one, so the only router of a cluster is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ferryman.errors import (
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.heartbeat import BOTH, DECODE, HOSTCACHE, PREFILL, ROUTER, Heartbeat
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman_cli.drain import (
    FIRST_BEAT_SECONDS,
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

# Host-caches after workers: one that came back has attached to the one that stays. Routers last:
# each starts while the workers stay.
ORDER = (DECODE, BOTH, PREFILL, HOSTCACHE, ROUTER)
AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RollChoice:
    """`takes_last`: also the only router, and workers without another one of their role, though
    requests then wait. `patience` is how many seconds one may take to come back."""

    takes_last: bool
    patience: float


@dataclass(frozen=True, slots=True)
class RollPlan:
    """The processes to restart, in order, and those that are left alone."""

    goes: tuple[Heartbeat, ...]
    stays: tuple[Heartbeat, ...]


def roll_plan(heard: Collection[Heartbeat], choice: RollChoice) -> RollPlan:
    """Raises NotFound when no beat came, and InvalidRequest if a worker is the last of its role.
    The only router stays: a cluster with one has all else restarted."""
    ordered = [beat for role in ORDER for beat in heard if beat.role == role]
    if not ordered:
        raise NotFound("no worker was heard")
    routers = [beat for beat in ordered if beat.role == ROUTER]
    stays = tuple(routers) if len(routers) == 1 and not choice.takes_last else ()
    goes = tuple(beat for beat in ordered if beat not in stays)
    for beat in goes:
        check_next(beat, heard, choice)
    return RollPlan(goes, stays)


def check_next(beat: Heartbeat, heard: Collection[Heartbeat], choice: RollChoice) -> None:
    """Whether the next one may go now. Raises InvalidRequest for the last of its role, Unavailable
    for one that drains already. Without a host-cache units are only missed."""
    if beat.role != HOSTCACHE:
        check_drain(DrainChoice(beat.worker_id, choice.takes_last), heard)


class RecentBeats:
    """The heartbeats of a cluster as they are read, and each process's latest."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._latest: dict[str, tuple[Heartbeat, float]] = {}

    async def next(self) -> Heartbeat:
        """Waits for the next one of any process."""
        beat = await next_beat(self._messages)
        self._latest[beat.worker_id] = (beat, asyncio.get_running_loop().time())
        return beat

    async def listened(self) -> Mapping[str, Heartbeat]:
        """The processes that are there, by id: each sends a beat once a second."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_BEAT_SECONDS) as limit:
                await self.next()
                limit.reschedule(clock() + LISTEN_SECONDS)
                while True:
                    await self.next()
        return {beat.worker_id: beat for beat, at in self._latest.values() if at >= begin}

    @property
    def known(self) -> frozenset[str]:
        """The ids of all that ever sent a beat."""
        return frozenset(self._latest)

    def recent(self) -> Mapping[str, Heartbeat]:
        """The processes that sent a beat in the last moments of reading."""
        begin = asyncio.get_running_loop().time() - LISTEN_SECONDS
        return {beat.worker_id: beat for beat, at in self._latest.values() if at >= begin}


class RollReport:
    """Reports a rolling restart on stdout: a line for each process that goes or is back."""

    def __init__(self, num_processes: int, *, as_json: bool) -> None:
        self._num_processes, self._as_json = num_processes, as_json
        self._number = 0

    def goes(self, beat: Heartbeat) -> None:
        self._number += 1
        count = f"{self._number} of {self._num_processes}"
        text = f"{count}: {beat.worker_id} drains: {load_text(beat)}"
        self._say("draining", beat.worker_id, text)

    def stays(self, beat: Heartbeat) -> None:
        text = f"{beat.worker_id} stays: it is the only {beat.role} (--even-last restarts it, too)"
        self._say("left", beat.worker_id, text)

    def waits(self, beat: Heartbeat, why: FerrymanError) -> None:
        self._say("waiting", beat.worker_id, f"{beat.worker_id} has to wait: {why}", why=str(why))

    def came(self, beat: Heartbeat, before: str) -> None:
        self._say("replaced", before, f"{before} is back as {beat.worker_id}", by=beat.worker_id)

    def _say(self, state: str, worker_id: str, text: str, **more: str) -> None:
        tell({"worker_id": worker_id, "state": state, **more}, text, as_json=self._as_json)


def run_roll(access: OrderAccess, choice: RollChoice, *, as_json: bool) -> int:
    """Restarts all, one after the other. Raises Unavailable if one does not come back: the others
    are left as they are."""
    asyncio.run(_roll(access, choice, as_json))
    return 0


async def _roll(access: OrderAccess, choice: RollChoice, as_json: bool) -> None:
    async with hearing_beats(access) as (bus, messages):
        beats = RecentBeats(messages)
        plan = roll_plan((await beats.listened()).values(), choice)
        report = RollReport(len(plan.goes), as_json=as_json)
        for beat in plan.stays:
            report.stays(beat)
        for beat in plan.goes:
            now = await may_go(beats, beat, choice, report)
            if now is None:
                continue
            report.goes(now)
            order = drain_order(access, beat.worker_id)
            await _restart(bus, beats, order, beat, choice, report)


async def may_go(
    beats: RecentBeats, beat: Heartbeat, choice: RollChoice, report: RollReport
) -> Heartbeat | None:
    """Its latest heartbeat, once the others can do without it; None if it has gone meanwhile, by
    another's order.

    Others may be out of sight for a while, as after an outage of the broker or on a busy machine.
    Raises `check_next`'s errors if that outlasts the choice's patience.
    """
    clock = asyncio.get_running_loop().time
    until, has_waited = clock() + choice.patience, False
    now = beats.recent()
    if beat.worker_id not in now:
        now = await beats.listened()
    while beat.worker_id in now:
        try:
            check_next(beat, now.values(), choice)
        except (InvalidRequest, Unavailable) as error:
            if clock() >= until:
                raise
            if not has_waited:
                report.waits(beat, error)
            has_waited = True
        else:
            return now[beat.worker_id]
        now = await beats.listened()
    return None


async def _restart(
    bus: NatsBus,
    beats: RecentBeats,
    order: DrainOrder,
    beat: Heartbeat,
    choice: RollChoice,
    report: RollReport,
) -> None:
    known_ids = beats.known
    try:
        async with asyncio.timeout(choice.patience):
            await _order(bus, order)
            await until_ended(bus, beats.next, order, beat.worker_id, _say_nothing)
            while True:
                new = await beats.next()
                if new.role == beat.role and new.is_ready and new.worker_id not in known_ids:
                    return report.came(new, beat.worker_id)
    except TimeoutError:
        raise Unavailable(
            f"{beat.worker_id} shall end, and no {beat.role} came in its place in"
            f" {choice.patience:.0f} s: the others are left as they are"
        ) from None


async def _order(bus: NatsBus, order: DrainOrder) -> None:
    """Gives the order until it was received: the broker may be away for a while, or its answer
    late. Giving it twice changes nothing."""
    while True:
        try:
            return await order.give(bus)
        except DeadlineExceeded:
            continue
        except Unavailable:
            if bus.is_connected:
                return  # the process has ended: an earlier order was received
            await asyncio.sleep(AGAIN_SECONDS)


def _say_nothing(_beat: Heartbeat) -> None:
    """Prints nothing: the roll reports when it is over."""
