"""`ferryman drain WORKER`: has a worker or a router take nothing new and end, and shows how far it
is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path

from ferryman.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from ferryman.security.credentials import ClusterRole, Login
from ferryman.security.credentials_file import read_credentials
from ferryman.wire.nats.bus import Messages
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import (
    DECODE,
    HEARTBEAT_SECONDS,
    HOSTCACHE,
    PREFILL,
    ROUTER,
    Heartbeat,
)
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.lifecycle_reader import CLIENT_NAME, authorities_in, connected_with, next_beat
from ferryman_launcher.state_folder import credentials_path, running_cluster

# A worker that is there has sent a heartbeat in this time.
LISTEN_SECONDS = 2.0 * HEARTBEAT_SECONDS
# Before the first one comes this process may itself be late, on a busy machine.
FIRST_BEAT_SECONDS = 3 * LISTEN_SECONDS
ORDER_SECONDS = 5.0
# After an outage of the broker a worker may listen again later than we do.
MAX_UNANSWERED = 2
# How long a worker is waited for of which nothing is known: the broker is away, or another one
# listens in its place and says nothing.
UNKNOWN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OrderAccess:
    """The way to the workers of a cluster for a caller who gives orders."""

    options: NatsOptions
    cluster: str


def order_access(
    url: str, name: str, credentials: Path | None, state_dir: Path, ca: str = ""
) -> OrderAccess:
    """The broker as a router may use it. Raises ConfigError for files that do not fit.

    With a URL, the login is the one in it or in `credentials`; else the state folder has it.
    """
    if not url:
        cluster = running_cluster(state_dir)
        url, name, ca = cluster.nats, name or cluster.name, ca or cluster.ca
        # The folder of an older version has none, and then its broker asks for none.
        kept = credentials_path(state_dir, ClusterRole.ROUTER)
        credentials = credentials or (kept if kept.exists() else None)
    login = _router_login(credentials) if credentials else None
    # The log is the running router's: an order must not change its limits.
    options = NatsOptions(url, CLIENT_NAME, login, log=None, authorities=authorities_in(ca))
    return OrderAccess(options, name or "local")


def _router_login(path: Path) -> Login:
    credentials = read_credentials(path)
    if credentials.role is not ClusterRole.ROUTER:
        raise ConfigError(
            f"--credentials {path}: orders need a router's, these are of role {credentials.role}"
        )
    return credentials.nats


@dataclass(frozen=True, slots=True)
class DrainChoice:
    """The worker to drain. `takes_last`: even when no other is left to do its work."""

    worker_id: str
    takes_last: bool


def check_drain(choice: DrainChoice, heard: Collection[Heartbeat]) -> None:
    """Checks that the workers whose beats came can do without it. Raises NotFound or
    InvalidRequest, which later heartbeats may overcome, and Unavailable for one that drains
    already."""
    beat = next((beat for beat in heard if beat.worker_id == choice.worker_id), None)
    if beat is None:
        names = ", ".join(sorted(beat.worker_id for beat in heard)) or "none"
        raise NotFound(f"no worker {choice.worker_id} was heard; there are: {names}")
    if beat.role == HOSTCACHE:
        raise InvalidRequest(
            f"{beat.worker_id} is a {beat.role}: only workers and routers drain", "worker"
        )
    if not beat.is_ready:
        raise Unavailable(f"{beat.worker_id} {_unready_text(beat)}: {load_text(beat)}")
    if not choice.takes_last and (last := _last_of_its_kind(beat, heard)):
        raise InvalidRequest(
            f"{beat.worker_id} is the last ready {last}: requests would wait"
            " for another one, and fail when none comes (--even-last drains it all the same)",
            "worker",
        )


def _last_of_its_kind(leaving: Heartbeat, heard: Collection[Heartbeat]) -> str:
    """The work of the leaving process that no other ready one does, or ""."""
    others = [beat for beat in heard if beat.worker_id != leaving.worker_id and beat.is_ready]
    if leaving.role == ROUTER:
        return "" if any(other.role == ROUTER for other in others) else ROUTER
    others = [beat for beat in others if beat.state == leaving.state]
    roles = [role for role in (DECODE, PREFILL) if leaving.serves(role)]
    orphaned = (role for role in roles if not any(other.serves(role) for other in others))
    return next((f"{role} worker for its state" for role in orphaned), "")


def _unready_text(beat: Heartbeat) -> str:
    # A router that has just started knows no workers yet; its beat does not show which of the
    # two.
    return "drains already, or hears of no workers" if beat.role == ROUTER else "drains already"


def load_text(beat: Heartbeat) -> str:
    return f"{beat.num_running} running, {beat.num_queued} queued"


def tell(facts: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """A line on stdout, at once: the facts, or the words for a person."""
    print(json.dumps(facts) if as_json else text, flush=True)


class DrainReport:
    """Reports a drain on stdout: a line for each change."""

    def __init__(self, worker_id: str, *, as_json: bool) -> None:
        self.worker_id, self._as_json = worker_id, as_json
        self._last: tuple[int, int] | None = None

    def ordered(self) -> None:
        self._say("ordered", f"{self.worker_id} takes nothing new")

    def goes_on(self, beat: Heartbeat) -> None:
        """A heartbeat of the draining worker."""
        load = beat.num_running, beat.num_queued
        if load != self._last:
            self._last = load
            text = f"{self.worker_id} drains: {load_text(beat)}"
            self._say("draining", text, running=load[0], queued=load[1])

    def ended(self) -> None:
        self._say("ended", f"{self.worker_id} has ended")

    def _say(self, state: str, text: str, **counts: int) -> None:
        facts = {"worker_id": self.worker_id, "state": state, **counts}
        tell(facts, text, as_json=self._as_json)


def run_drain(access: OrderAccess, choice: DrainChoice, *, waits: bool, as_json: bool) -> int:
    """Orders it, and with `waits` follows it to its end."""
    asyncio.run(_drain(access, choice, DrainReport(choice.worker_id, as_json=as_json), waits))
    return 0


async def _drain(
    access: OrderAccess, choice: DrainChoice, report: DrainReport, waits: bool
) -> None:
    order = drain_order(access, choice.worker_id)
    async with hearing_beats(access) as (bus, messages):
        hear = partial(next_beat, messages)
        await _may_go(choice, messages)
        await order.give(bus)
        report.ordered()
        if waits:
            await until_ended(bus, hear, order, choice.worker_id, report.goes_on)
            report.ended()


@asynccontextmanager
async def hearing_beats(access: OrderAccess) -> AsyncIterator[tuple[NatsBus, Messages]]:
    """The broker, and all heartbeats of the cluster from now on."""
    async with (
        connected_with(access.options) as bus,
        bus.subscribed(Subjects(access.cluster).all_beats) as messages,
    ):
        yield bus, messages


def drain_order(access: OrderAccess, worker_id: str) -> DrainOrder:
    """The order to that worker."""
    return DrainOrder(Subjects(access.cluster).control(worker_id, "drain"))


async def _may_go(choice: DrainChoice, messages: Messages) -> None:
    """Listens until the worker may go, or long enough to know why not. Raises `check_drain`'s
    errors."""
    heard: dict[str, Heartbeat] = {}
    try:
        async with asyncio.timeout(FIRST_BEAT_SECONDS) as limit:
            while True:
                beat = await next_beat(messages)
                if not heard:
                    limit.reschedule(asyncio.get_running_loop().time() + LISTEN_SECONDS)
                heard[beat.worker_id] = beat
                try:
                    return check_drain(choice, heard.values())
                except (NotFound, InvalidRequest):
                    continue
    except TimeoutError:
        check_drain(choice, heard.values())


class Presence(Enum):
    """The results of a look at a worker."""

    THERE = auto()
    GONE = auto()
    UNKNOWN = auto()


class DrainOrder:
    """The order to one worker. To give it again changes nothing, so it also asks whether the worker
    is still there."""

    def __init__(self, subject: str) -> None:
        self._subject = subject

    async def give(self, bus: NatsBus) -> None:
        """Raises Unavailable without an answer, PermissionDenied for a login that may not order."""
        try:
            await bus.request(self._subject, b"", timeout_seconds=ORDER_SECONDS)
        except DeadlineExceeded:
            if bus.statistics().num_forbidden:
                raise PermissionDenied(
                    "this login may not give orders: show a router's (--credentials router.json)"
                ) from None
            raise

    async def presence(self, bus: NatsBus) -> Presence:
        """Whether the worker is there. While the broker is away that is unknown, and while somebody
        listens who gives no answer, or one without the worker's proof: it may be late."""
        num_unproven = bus.statistics().num_unproven
        try:
            await self.give(bus)
        except DeadlineExceeded:
            return Presence.UNKNOWN
        except Unavailable:
            if bus.is_connected and bus.statistics().num_unproven == num_unproven:
                return Presence.GONE
            return Presence.UNKNOWN
        return Presence.THERE


async def until_ended(
    bus: NatsBus,
    hear: Callable[[], Awaitable[Heartbeat]],
    order: DrainOrder,
    worker_id: str,
    goes_on: Callable[[Heartbeat], None],
) -> None:
    """Passes on the worker's heartbeats, until it neither beats nor answers. `hear` waits for the
    next heartbeat of any process. Raises Unavailable when for UNKNOWN_SECONDS nothing shows whether
    the worker is there."""
    clock = asyncio.get_running_loop().time
    unanswered, heard_at = 0, clock()
    while unanswered < MAX_UNANSWERED:
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                while (beat := await hear()).worker_id != worker_id:
                    pass
        except TimeoutError:
            presence = await order.presence(bus)
            unanswered = unanswered + 1 if presence is Presence.GONE else 0
            if presence is not Presence.UNKNOWN:
                heard_at = clock()
            elif clock() - heard_at >= UNKNOWN_SECONDS:
                raise Unavailable(_unknown_text(bus, worker_id)) from None
        else:
            unanswered, heard_at = 0, clock()
            goes_on(beat)


def _unknown_text(bus: NatsBus, worker_id: str) -> str:
    why = "somebody takes its orders and gives no answer of its" if bus.is_connected else ""
    return (
        f"{worker_id} was ordered to end, but nothing was heard of it for {UNKNOWN_SECONDS:.0f} s:"
        f" {why or 'the broker is away'}; `ferryman top` shows whether it is there"
    )
