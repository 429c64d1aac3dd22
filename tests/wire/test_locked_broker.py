"""A real nats-server with the written configuration: attacks are refused, legal flows work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.cluster_keys import KEY, STRANGERS_KEY
from tests.waiting import until

from ferryman.errors import OutOfSlots, Unavailable
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.runtime.credential_folders import with_login, write_server_access
from ferryman.runtime.embedded import nats_command, started
from ferryman.security.credentials import ClusterRole, Login, credentials_of
from ferryman.wire.nats import nats_bus as bus_module
from ferryman.wire.nats.bus import BusMessage, Discoverable
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.lifecycle_log import STREAM
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.permissions import inbox_of
from ferryman.wire.nats.sender_proof import LIFE_HEADER
from ferryman.wire.nats.subjects import REFUSED_LOGINS, Subjects

LOCAL = Subjects("local")
DRAIN = LOCAL.control("decode-1", "drain")
ROUTER, DECODE, OBSERVER = ClusterRole.ROUTER, ClusterRole.DECODE, ClusterRole.OBSERVER
WORKERS = (ClusterRole.PREFILL, ClusterRole.DECODE, ClusterRole.BOTH)
SERVICES = (*WORKERS, ClusterRole.HOST_CACHE)
FAILSAFE_SECONDS = 120
SECRET = make_life_secret()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("locked")
    access = write_server_access(folder, KEY, "local")
    make = lambda place: nats_command(place, config=access.nats_config)  # noqa: E731
    with started(make, folder / "nats") as server:
        yield server.url


def login(role: ClusterRole) -> Login:
    return credentials_of(KEY, role).nats


@asynccontextmanager
async def connected(url: str, *roles: ClusterRole) -> AsyncIterator[list[NatsBus]]:
    """A bus of each role; the first one's log exists if it is a router."""
    async with AsyncExitStack() as stack, asyncio.timeout(FAILSAFE_SECONDS):
        options = [NatsOptions(url, role.value, login(role), life_secret=SECRET) for role in roles]
        buses = [await stack.enter_async_context(nats_bus(each)) for each in options]
        for bus in buses:
            await bus.connected()
            await bus.flush()
        if roles[0] is ROUTER:
            await log_of(buses[0])
        yield buses


async def log_of(router: NatsBus) -> None:
    """Waits for the log: a router makes it beside all else when it has connected."""
    while True:
        try:
            await router.history(LOCAL.all_life, max_events=1)
        except Unavailable:
            continue
        return


@asynccontextmanager
async def raw_client(url: str, role: ClusterRole) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client without our rules, as an attacker has one, and what the broker refused it."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    one = login(role)
    client = await nats.connect(
        url,
        user=one.user,
        password=one.password,
        error_cb=note,
        inbox_prefix=inbox_of(one.user),
    )
    try:
        yield client, refused
    finally:
        await client.close()


async def refusals(bus: NatsBus, number: int) -> None:
    """Waits until the broker has refused this many things."""
    async with asyncio.timeout(FAILSAFE_SECONDS):
        while bus.statistics().num_forbidden < number:
            await bus.flush()


FORGED = [
    pytest.param(LOCAL.beat("prefill", "prefill-1"), id="a beat of another role"),
    pytest.param(LOCAL.beat("router", "router-1"), id="a router's beat"),
    pytest.param(LOCAL.life("router", "router-1", "r1", "finished"), id="a router's event"),
    pytest.param(DRAIN, id="an order"),
    pytest.param(f"$JS.API.STREAM.PURGE.{STREAM}", id="the purge of the log"),
    pytest.param(f"$JS.API.STREAM.DELETE.{STREAM}", id="its removal"),
    pytest.param(f"$JS.API.STREAM.UPDATE.{STREAM}", id="other limits for it"),
    pytest.param(f"$JS.API.STREAM.MSG.DELETE.{STREAM}", id="the removal of an event"),
    pytest.param("$JS.API.STREAM.CREATE.OTHER", id="a log of its own"),
    pytest.param("ferryman.v1.other.worker.decode.decode-1.beat", id="another cluster's beat"),
    pytest.param("anything", id="anything else"),
]


@pytest.mark.parametrize("subject", FORGED)
async def test_a_worker_cannot_publish_what_is_not_its_own(url: str, subject: str) -> None:
    async with connected(url, ROUTER, DECODE) as (router, decode):
        before = await router.history(LOCAL.all_life, max_events=100)
        decode.publish(subject, b"{}")
        await refusals(decode, 1)
        assert await router.history(LOCAL.all_life, max_events=100) == before


async def test_a_refusal_is_counted_and_warned_of(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(url, DECODE) as (decode,):
        for _ in range(3):
            decode.offer(DRAIN, b"")
        await refusals(decode, 3)
    said = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert len(said) == 1, "the same refusal is told once"
    assert DRAIN in said[0]


@pytest.mark.parametrize("user", ["", "router", "decode", "default"])
async def test_a_stranger_gets_no_connection(
    url: str, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody without credentials hears a subject, neither with another cluster's password."""
    strangers = credentials_of(STRANGERS_KEY, ROUTER).nats.password
    options = NatsOptions(url, "stranger", Login(user, strangers) if user else None)
    async with nats_bus(options) as bus, asyncio.timeout(FAILSAFE_SECONDS):
        while not bus.statistics().num_forbidden:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not bus.is_connected
    assert "the broker refuses this process" in caplog.text


async def test_a_router_hears_of_each_refused_login(url: str) -> None:
    strangers = credentials_of(STRANGERS_KEY, DECODE).nats
    async with connected(url, ROUTER) as (router,), router.subscribed(REFUSED_LOGINS) as refused:
        await router.flush()
        for one in (strangers, Login("nobody", "password")):
            async with nats_bus(NatsOptions(url, "stranger", one)):
                users = [refused_user((await anext(refused)).payload, one)]
                while users[-1] != one.user:  # the one before may have tried again
                    users.append(refused_user((await anext(refused)).payload, one))


def refused_user(payload: bytes, secret: Login) -> str:
    """The user in an event that a login was refused, which does not give away the password."""
    said = json.loads(payload)
    assert said["reason"] == "Authentication Failure"
    assert secret.password not in payload.decode()
    return str(said["client"]["user"])


@pytest.mark.parametrize("pattern", ["$SYS.>", "$SYS.ACCOUNT.*.CONNECT", "$SYS.SERVER.*.STATSZ"])
async def test_a_router_hears_nothing_else_of_the_broker(url: str, pattern: str) -> None:
    async with raw_client(url, ROUTER) as (router, refused), asyncio.timeout(FAILSAFE_SECONDS):
        await router.subscribe(pattern)
        await router.publish("$SYS.REQ.SERVER.PING", b"")
        await router.publish("$SYS.REQ.SERVER.X.KICK", b"")
        while len(refused) < 3:
            await router.flush()


@pytest.mark.parametrize("role", [*SERVICES, OBSERVER])
async def test_nobody_else_hears_of_refused_logins_or_invents_some(
    url: str, role: ClusterRole
) -> None:
    async with connected(url, role) as (bus,), bus.subscribed(REFUSED_LOGINS):
        bus.publish(REFUSED_LOGINS.replace("*", "X"), b"{}")
        await refusals(bus, 2)


@pytest.mark.parametrize("role", [*SERVICES, OBSERVER])
@pytest.mark.parametrize("pattern", [">", "_INBOX.>", f"{inbox_of('router')}.>", "$JS.>"])
async def test_nobody_hears_answers_to_others(url: str, role: ClusterRole, pattern: str) -> None:
    async with connected(url, role) as (bus,), bus.subscribed(pattern):
        await refusals(bus, 1)


async def test_a_worker_hears_neither_beats_nor_events_of_others(url: str) -> None:
    async with connected(url, DECODE) as (bus,):
        async with bus.subscribed(LOCAL.all_life), bus.subscribed(LOCAL.all_beats):
            await refusals(bus, 2)


async def test_an_observer_publishes_nothing(url: str) -> None:
    async with connected(url, OBSERVER) as (bus,):
        for subject in (DRAIN, LOCAL.life("router", "router-1", "r1", "finished")):
            bus.publish(subject, b"{}")
        await refusals(bus, 2)


async def test_an_acknowledgement_sent_to_an_order_s_subject_is_no_order(url: str) -> None:
    """The broker itself sends it there, so its permissions do not help."""
    obeyed: list[BusMessage] = []
    life, name = LOCAL.life("prefill", "prefill-1", "r1", "queued"), worker_id_of("decode", SECRET)
    drain = LOCAL.control(name, "drain")

    async def obey(message: BusMessage) -> bytes:
        obeyed.append(message)
        return b""

    async with (
        connected(url, ROUTER, DECODE, OBSERVER) as (router, decode, observer),
        raw_client(url, ClusterRole.PREFILL) as (attacker, refused),
        decode.answering(LOCAL.all_control_of(name), obey),
        observer.subscribed(drain) as sent,
    ):
        await attacker.publish(life, b"{}", reply=drain)
        assert b"LIFECYCLE" in (await anext(sent)).payload, "the fault took effect"
        await router.request(drain, b"real", timeout_seconds=FAILSAFE_SECONDS)
    assert [message.payload for message in obeyed] == [b"real"]
    assert refused == []


def told_as(role: ClusterRole) -> tuple[str, ...]:
    """The roles in whose name a worker tells of its requests: one that does both has two."""
    return ("prefill", "decode") if role is ClusterRole.BOTH else (role.value,)


@pytest.mark.parametrize("role", [*SERVICES, ROUTER])
async def test_a_service_beats_is_ordered_and_tells_its_life(url: str, role: ClusterRole) -> None:
    name = worker_id_of(role.value, SECRET)
    (life, *others) = [LOCAL.life(told, name, "r1", "admitted") for told in told_as(role)]

    async def obey(message: BusMessage) -> bytes:
        return b"did " + message.payload

    async with (
        connected(url, ROUTER, role, OBSERVER) as (router, service, observer),
        router.subscribed(LOCAL.all_beats) as beats,
        router.subscribed(LOCAL.all_cache) as changes,
        observer.subscribed("ferryman.>") as seen,
        service.answering(LOCAL.all_control_of(name), obey),
        service.discoverable(Discoverable(f"ferryman-{role}", "0.1.0", "a service")),
    ):
        service.offer(LOCAL.beat(role, name), b"beat")
        assert (await anext(beats)).payload == b"beat"
        if role in WORKERS:
            service.publish(LOCAL.cache(name, 7), b"change")
            assert (await anext(changes)).payload == b"change"
        for told in (life, *others):
            service.publish(told, b"{}")
        while service.statistics().num_recorded < 1 + len(others):
            await service.flush()
        subject = LOCAL.control(name, "flush")
        said = await router.request(subject, b"it", timeout_seconds=FAILSAFE_SECONDS)
        assert said == b"did it"
        ping = f"$SRV.PING.ferryman-{role}"
        pong = await observer.request(ping, b"", timeout_seconds=FAILSAFE_SECONDS)
        assert b"ping_response" in pong
        assert LOCAL.beat(role, name) == (await anext(seen)).subject
        for reader in (router, observer):
            pattern = LOCAL.all_life_of("r1")
            log = await reader.history(pattern, max_events=100)
            assert {life, *others} <= {each.subject for each in log}
        for bus in (router, service, observer):
            assert bus.statistics().num_forbidden == 0


@asynccontextmanager
async def thief(
    url: str,
    role: ClusterRole,
    headers: dict[str, str] | None = None,
    content: bytes = b"stolen",
) -> AsyncIterator[list[Msg]]:
    """Somebody with a worker's login, who answers all orders to that role at once."""
    heard: list[Msg] = []

    async def answer(order: Msg) -> None:
        await client.publish(order.reply, content, headers=headers)
        await client.flush()
        heard.append(order)

    async with raw_client(url, role) as (client, refused):
        await client.subscribe(LOCAL.all_control_of_role(role.value), cb=answer)
        await client.flush()
        assert refused == []
        yield heard


GUESSES: list[dict[str, str] | None] = [
    None,
    {LIFE_HEADER: make_life_secret()},
    {LIFE_HEADER: ""},
    {"Nats-Service-Error": "no", "Nats-Service-Error-Code": "UNAVAILABLE"},
]


@pytest.mark.parametrize("headers", GUESSES)
async def test_an_order_is_answered_by_the_process_it_is_for(
    url: str, headers: dict[str, str] | None
) -> None:
    """Somebody else of its role has answered before."""
    name = worker_id_of("decode", SECRET)

    async with (
        connected(url, ROUTER, DECODE) as (router, decode),
        thief(url, DECODE, headers) as seen,
    ):

        async def obey(message: BusMessage) -> bytes:
            await until(lambda: bool(seen))
            return b"did " + message.payload

        async with decode.answering(LOCAL.all_control_of(name), obey):
            subject = LOCAL.control(name, "flush")
            said = await router.request(subject, b"it", timeout_seconds=FAILSAFE_SECONDS)
            assert said == b"did it"
    assert len(seen) == 1
    assert router.statistics().num_unproven == 1


async def test_a_refusal_of_an_order_is_the_process_s_own(url: str) -> None:
    name = worker_id_of("decode", SECRET)

    async def refuse(message: BusMessage) -> bytes:
        raise OutOfSlots("no room", 1.0)

    async with (
        connected(url, ROUTER, DECODE) as (router, decode),
        thief(url, DECODE),
        decode.answering(LOCAL.all_control_of(name), refuse),
    ):
        with pytest.raises(OutOfSlots):
            await router.request(
                LOCAL.control(name, "flush"), b"", timeout_seconds=FAILSAFE_SECONDS
            )


async def test_an_order_that_others_alone_answer_is_not_answered(url: str) -> None:
    name = worker_id_of("decode", SECRET)
    async with connected(url, ROUTER) as (router,), thief(url, DECODE) as seen:
        with pytest.raises(Unavailable, match="only others"):
            await router.request(LOCAL.control(name, "flush"), b"", timeout_seconds=0.5)
    assert len(seen) == 1


NOBODY = {"Status": "503"}  # as the broker says it where nobody listens


async def test_nobody_answers_is_not_believed_of_somebody_who_says_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "REFUSAL_SECONDS", FAILSAFE_SECONDS)
    name = worker_id_of("decode", SECRET)
    async with (
        connected(url, ROUTER, DECODE) as (router, decode),
        thief(url, DECODE, NOBODY, b"") as seen,
    ):

        async def obey(message: BusMessage) -> bytes:
            await until(lambda: bool(seen))
            return b"did " + message.payload

        async with decode.answering(LOCAL.all_control_of(name), obey):
            subject = LOCAL.control(name, "flush")
            said = await router.request(subject, b"it", timeout_seconds=FAILSAFE_SECONDS)
            assert said == b"did it"
    assert router.statistics().num_unproven == 1


async def test_where_nobody_listens_the_broker_is_believed(url: str) -> None:
    name = worker_id_of("decode", SECRET)
    async with connected(url, ROUTER) as (router,):
        with pytest.raises(Unavailable, match="nobody answers"):
            await router.request(
                LOCAL.control(name, "flush"), b"", timeout_seconds=FAILSAFE_SECONDS
            )
        assert router.statistics().num_unproven == 0


async def test_answers_of_others_are_counted_however_the_wait_ends(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = LOCAL.control(worker_id_of("decode", SECRET), "flush")
    async with connected(url, ROUTER) as (router,), thief(url, DECODE):
        asking = asyncio.create_task(router.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS))
        await until(lambda: "is not of the process" in caplog.text)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
    assert router.statistics().num_unproven == 1


async def test_a_worker_does_not_hear_the_orders_to_another_role(url: str) -> None:
    async with connected(url, DECODE) as (decode,):
        for number, role in enumerate(("prefill", "router", "hostcache", "both"), start=1):
            async with decode.subscribed(LOCAL.all_control_of_role(role)):
                await refusals(decode, number)
        async with decode.subscribed(f"{LOCAL.root}.control.>"):
            await refusals(decode, 5)


async def test_an_observer_s_url_is_all_that_a_tool_needs(url: str) -> None:
    async with nats_bus(NatsOptions(with_login(url, login(OBSERVER)))) as bus:
        async with asyncio.timeout(FAILSAFE_SECONDS), bus.subscribed("ferryman.>"):
            await bus.connected()
            await bus.flush()
    assert bus.statistics().num_forbidden == 0


def test_the_configuration_is_its_owner_s_alone(tmp_path: Path) -> None:
    access = write_server_access(tmp_path, KEY, "local")
    for path in (access.nats_config, access.redis_acl):
        assert path.stat().st_mode & 0o777 == 0o600
        assert KEY.text not in path.read_text()
