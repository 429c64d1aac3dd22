"""`ferryman drain`: when it refuses, and against a locked broker its order and its report."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from tests.cluster_keys import KEY
from tests.servers import TESTS, locked_nats_server

from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError, InvalidRequest, NotFound, Unavailable
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.runtime.credential_folders import with_login
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import write_all_credentials
from ferryman.wire.nats.bus import BusMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import NO_STATE, Heartbeat, ServedState, beat_to_bytes
from ferryman.wire.nats.lifecycle_log import STREAM, LogLimits
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli import drain
from ferryman_cli.app import run
from ferryman_cli.drain import DrainChoice, Presence, check_drain, order_access
from ferryman_launcher.state_folder import CREDENTIALS, RunningCluster, StateFolder

SUBJECTS = Subjects("local")
STATE = ServedState("f", 16, "d", (Kind.FULL,))
FAILSAFE_SECONDS = 120
SECRET = make_life_secret()
DRAINED = worker_id_of("decode", SECRET)


def beat(role: str, number: int = 1) -> Heartbeat:
    return Heartbeat(role, f"{role}-{number}", 1, f"h:{number}", True, STATE, 4096)


PREFILL, DECODE, OTHER, BOTH = beat("prefill"), beat("decode"), beat("decode", 2), beat("both")
DRAINING = replace(OTHER, is_ready=False, num_running=3)
NEW_ROUTER = replace(beat("router", 2), state=NO_STATE)
FOREIGN = replace(OTHER, state=replace(STATE, digest="another model"))


@pytest.mark.parametrize(
    ("worker_id", "heard"),
    [
        pytest.param("decode-1", [PREFILL, DECODE, OTHER], id="another decodes"),
        pytest.param("prefill-1", [PREFILL, DECODE, beat("prefill", 2)], id="another prefills"),
        pytest.param("decode-1", [PREFILL, DECODE, BOTH], id="one that does both is left"),
        pytest.param("both-1", [PREFILL, DECODE, BOTH], id="a pair is left"),
        pytest.param("router-1", [beat("router"), NEW_ROUTER], id="another router is there"),
    ],
)
def test_a_worker_may_go_while_its_roles_are_served(
    worker_id: str, heard: Sequence[Heartbeat]
) -> None:
    check_drain(DrainChoice(worker_id, takes_last=False), heard)


@pytest.mark.parametrize(
    ("worker_id", "heard", "error", "words"),
    [
        pytest.param(
            "decode-9", [PREFILL, DECODE], NotFound, "there are: decode-1, prefill-1", id="unknown"
        ),
        pytest.param("decode-9", [], NotFound, "there are: none", id="nobody"),
        pytest.param(
            "hostcache-1",
            [beat("hostcache")],
            InvalidRequest,
            "only workers and routers",
            id="no worker",
        ),
        pytest.param("decode-2", [DECODE, DRAINING], Unavailable, "already: 3 running", id="twice"),
        pytest.param("decode-1", [PREFILL, DECODE], InvalidRequest, "last ready decode", id="last"),
        pytest.param(
            "decode-1", [DECODE, DRAINING], InvalidRequest, "last ready decode", id="other drains"
        ),
        pytest.param(
            "decode-1", [DECODE, FOREIGN], InvalidRequest, "last ready decode", id="other state"
        ),
        pytest.param(
            "router-1", [beat("router"), DECODE], InvalidRequest, "last ready router", id="door"
        ),
        pytest.param(
            "both-1", [BOTH, DECODE], InvalidRequest, "last ready prefill", id="half is left"
        ),
    ],
)
def test_a_worker_that_may_not_go_is_told_why(
    worker_id: str, heard: Sequence[Heartbeat], error: type[FerrymanError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_drain(DrainChoice(worker_id, takes_last=False), heard)


def test_the_last_one_goes_if_that_is_wanted() -> None:
    check_drain(DrainChoice("decode-1", takes_last=True), [PREFILL, DECODE])
    with pytest.raises(Unavailable):
        check_drain(DrainChoice("decode-2", takes_last=True), [DRAINING])


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    with locked_nats_server() as url:
        yield url


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    return write_all_credentials(tmp_path, KEY)[ClusterRole.ROUTER]


@dataclass
class OrderedWorker:
    """A worker with two requests; each heartbeat after its order ends one of them."""

    orders: list[bytes] = field(default_factory=list)
    said: Heartbeat = field(
        default_factory=lambda: replace(DECODE, worker_id=DRAINED, num_running=2)
    )

    async def obey(self, message: BusMessage) -> bytes:
        self.orders.append(message.payload)
        self.said = replace(self.said, is_ready=False)
        return b'{"draining": true}'

    def tell(self, bus: NatsBus, *beats: Heartbeat) -> None:
        for one in (self.said, *beats):
            bus.offer(SUBJECTS.beat(one.role, one.worker_id), beat_to_bytes(one))
        if self.orders:
            self.said = replace(self.said, num_running=self.said.num_running - 1)


@asynccontextmanager
async def worker_bus(url: str) -> AsyncIterator[NatsBus]:
    login = credentials_of(KEY, ClusterRole.DECODE).nats
    async with nats_bus(NatsOptions(url, DRAINED, login, life_secret=SECRET)) as bus:
        async with asyncio.timeout(FAILSAFE_SECONDS):
            await bus.connected()
        yield bus


async def drained(url: str, worker: OrderedWorker, shown: str, *flags: str) -> int:
    """The status of `ferryman drain DRAINED` by the URL `shown`, with another decode worker beside
    it."""
    line = ["drain", DRAINED, "--nats", shown, *flags]
    async with worker_bus(url) as bus, asyncio.timeout(FAILSAFE_SECONDS):
        command = asyncio.ensure_future(asyncio.to_thread(run, line))
        async with bus.answering(SUBJECTS.all_control_of(DRAINED), worker.obey):
            while worker.said.num_running >= 0 and not command.done():
                worker.tell(bus, OTHER)
                await asyncio.wait([command], timeout=0.1)
        return await command


async def test_a_drain_is_ordered_and_followed_to_its_end(
    nats_url: str, credentials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The login may change the limits of the log, which are the running router's: it does not."""
    worker, limits = OrderedWorker(), LogLimits(max_age_seconds=60)
    async with nats_bus(NatsOptions(nats_url, "tests", TESTS, limits)) as tests:
        await tests.connected()
        await tests.flush()
        flags = "--credentials", str(credentials), "--json"
        assert await drained(nats_url, worker, nats_url, *flags) == 0
        subject = f"$JS.API.STREAM.INFO.{STREAM}"
        log = await tests.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS)
    assert worker.orders[0] == b""
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    states = [each["state"] for each in said]
    assert (states[0], states[-1]) == ("ordered", "ended")
    assert [each["running"] for each in said[1:-1]] == [2, 1, 0]
    assert {each["worker_id"] for each in said} == {DRAINED}
    assert json.loads(log)["config"]["max_age"] == 60 * 10**9


async def test_without_waiting_it_ends_with_the_order(
    nats_url: str, credentials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = OrderedWorker()
    flags = "--credentials", str(credentials), "--no-wait"
    assert await drained(nats_url, worker, nats_url, *flags) == 0
    assert len(worker.orders) == 1
    assert capsys.readouterr().out == f"{DRAINED} takes nothing new\n"


@pytest.mark.parametrize(
    ("role", "words"),
    [
        pytest.param(ClusterRole.OBSERVER, "this login may not give orders", id="an observer"),
        pytest.param(None, "refuses this login", id="nobody"),
    ],
)
async def test_others_than_routers_order_nothing(
    nats_url: str, role: ClusterRole | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = with_login(nats_url, credentials_of(KEY, role).nats) if role else nats_url
    worker = OrderedWorker()
    assert await drained(nats_url, worker, shown) == 1
    said = capsys.readouterr().err
    assert words in said
    assert worker.orders == []
    assert credentials_of(KEY, ClusterRole.OBSERVER).nats.password not in said


async def test_a_worker_that_does_not_answer_is_not_said_to_drain(
    nats_url: str, credentials: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["drain", DRAINED, "--nats", nats_url, "--credentials", str(credentials)]
    async with worker_bus(nats_url) as bus, asyncio.timeout(FAILSAFE_SECONDS):
        command = asyncio.ensure_future(asyncio.to_thread(run, line))
        while not command.done():
            OrderedWorker().tell(bus, OTHER)
            await asyncio.wait([command], timeout=0.1)
    assert await command == 1
    said = capsys.readouterr()
    subject = f"ferryman.v1.local.control.decode.{DRAINED}.drain"
    assert said.err == f"error: nobody answers on {subject}\n"
    assert said.out == ""


async def test_a_worker_whose_answers_others_drown_may_be_there_still(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drain goes on, as behind an answer that comes late."""
    monkeypatch.setattr(drain, "ORDER_SECONDS", 0.5)
    thief = credentials_of(KEY, ClusterRole.DECODE).nats
    router = NatsOptions(nats_url, "router", credentials_of(KEY, ClusterRole.ROUTER).nats)
    order = drain.DrainOrder(SUBJECTS.control(DRAINED, "drain"))

    async def steal(message: Msg) -> None:
        await client.publish(message.reply, b"stolen")

    async with (
        await nats.connect(nats_url, user=thief.user, password=thief.password) as client,
        nats_bus(router) as bus,
        asyncio.timeout(FAILSAFE_SECONDS),
    ):
        await client.subscribe(SUBJECTS.all_control_of_role("decode"), cb=steal)
        await client.flush()
        await bus.connected()
        assert await order.presence(bus) is Presence.UNKNOWN
        assert bus.statistics().num_unproven == 1


def test_credentials_of_another_role_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = write_all_credentials(tmp_path, KEY)[ClusterRole.OBSERVER]
    line = ["drain", "decode-1", "--nats", "nats://127.0.0.1:1", "--credentials", str(observer)]
    assert run(line) == 2
    assert "orders need a router's, these are of role observer" in capsys.readouterr().err


def test_in_a_state_folder_the_login_is_found(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write(
        RunningCluster("http://h:1", "h:2", "nats://h:3", "redis://h:4", "blue", "m", os.getpid())
    )
    before = order_access("", "", None, tmp_path)
    assert (before.cluster, before.options.login) == ("blue", None), "an older version's folder"
    write_all_credentials(folder.private(CREDENTIALS), KEY)
    access = order_access("", "", None, tmp_path)
    assert access.options.login == credentials_of(KEY, ClusterRole.ROUTER).nats
    assert (access.options.url, access.options.kept_log) == ("nats://h:3", None)
