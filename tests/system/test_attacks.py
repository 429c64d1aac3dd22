"""Attacks on a cluster of `ferryman up` with its defaults: by a stranger who knows every address,
and by somebody with the credentials of one role. Each is refused and counted, and an answer under
way beside it ends right. Each works for those who may, or on servers without locks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from urllib.parse import urlsplit

import nats.errors
import pytest
from nats.aio.msg import Msg
from redis.exceptions import AuthenticationError, NoPermissionError
from tests.harness.cluster import API_KEY, up
from tests.sockets import addresses_of, listening_addresses
from tests.system.attacked_cluster import (
    FAILSAFE_SECONDS,
    LEAKED,
    SUBJECTS,
    AttackedCluster,
    look_at,
    raw_nats_client,
    refusals,
    strangers,
)
from tests.system.forged_calls import CALLS, TOKENS, ForgedCalls, forge_units, method_of
from tests.system.public_doors import errors_over_grpc, statuses_over_http
from tests.waiting import wait_until

from ferryman.client import Client
from ferryman.errors import (
    InvalidRequest,
    LeaseLost,
    NotFound,
    PermissionDenied,
    Stale,
    Unauthenticated,
)
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.runtime.lifecycle import encode_event
from ferryman.schedule.request import SamplingParams
from ferryman.security.credentials import ClusterRole, Login
from ferryman.wire.grpc.role_tokens import ALLOWED, GrpcAccess
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import beat_to_bytes
from ferryman.wire.nats.lifecycle_log import STREAM
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.permissions import inbox_of
from ferryman.wire.nats.sender_proof import LIFE_HEADER
from ferryman.wire.public import GenerateFinished
from ferryman.wire.signed_orders import RouterSignatures
from ferryman.wire.values import Usage

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROUTER, PREFILL, DECODE = ClusterRole.ROUTER, ClusterRole.PREFILL, ClusterRole.DECODE
OTHER_KEY = "sk-of-another-tenant"
ENDLESS = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
HOST_CACHE, OBSERVER = ClusterRole.HOST_CACHE, ClusterRole.OBSERVER


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedCluster]:
    keys = f"{API_KEY},{OTHER_KEY}"
    with up(tmp_path_factory.mktemp("up"), FERRYMAN_API_KEYS=keys) as running:
        yield asyncio.run(look_at(running))


def calls_by(cluster: AttackedCluster, token: str, request_id: str) -> ForgedCalls:
    return ForgedCalls(token, cluster.beats, request_id, cluster.router_id)


def calls_of_a_router(cluster: AttackedCluster, request_id: str) -> ForgedCalls:
    """By its file, in which there is the key that signs."""
    file = cluster.leaked(ROUTER)
    signatures = RouterSignatures(GrpcAccess(file))
    calls = calls_by(cluster, file.grpc_token, request_id)
    return replace(calls, signatures=signatures)


async def test_a_stranger_gives_no_worker_an_order(cluster: AttackedCluster) -> None:
    before = cluster.refused_calls("Unauthenticated")
    async with cluster.stream_beside() as request_id:
        for token in ("", strangers(ROUTER).grpc_token):
            for call in CALLS:
                with pytest.raises(Unauthenticated):
                    await getattr(calls_by(cluster, token, request_id), call)()
    assert cluster.refused_calls("Unauthenticated") - before == dict.fromkeys(CALLS, 2)


async def test_a_leaked_token_gives_no_order_of_another_role(cluster: AttackedCluster) -> None:
    before, tried = cluster.refused_calls("PermissionDenied"), Counter[str]()
    async with cluster.stream_beside() as request_id:
        for role in LEAKED:
            calls = calls_by(cluster, cluster.leaked(role).grpc_token, request_id)
            for call in CALLS:
                if role not in ALLOWED[method_of(call)]:
                    with pytest.raises(PermissionDenied):
                        await getattr(calls, call)()
                    tried[call] += 1
    refused = cluster.refused_calls("PermissionDenied") - before
    # A call whose refusal gRPC lost was made again.
    assert set(refused) == set(tried) == set(CALLS)
    assert refused >= tried


async def test_a_leaked_writer_cannot_touch_a_hand_off_of_another(cluster: AttackedCluster) -> None:
    """A reservation is known by 96 random bits, which only its writer was told."""
    before = cluster.metric("decode", "reservations_refused ")
    aborts = cluster.refused_calls("PermissionDenied")["abort"]
    async with cluster.stream_beside() as request_id:
        calls = calls_by(cluster, cluster.leaked(PREFILL).grpc_token, request_id)
        for touch in (calls.renew, calls.write_pages, calls.land_pages):
            with pytest.raises(LeaseLost):
                await touch()
        with pytest.raises(PermissionDenied, match="signed"):
            await calls.commit()
        await calls.abort_writing()
        with pytest.raises(PermissionDenied, match="role router"):
            await calls.abort()
    assert cluster.metric("decode", "reservations_refused ") >= before + 2
    assert cluster.refused_calls("PermissionDenied")["abort"] == aborts + 1


async def test_a_router_s_token_alone_orders_nothing(cluster: AttackedCluster) -> None:
    """Each worker that a router calls sees it. The key that signs orders is in its file alone."""
    before = cluster.refused_calls("PermissionDenied")
    orders = [call for call in CALLS if ROUTER in ALLOWED[method_of(call)]]
    async with cluster.stream_beside() as request_id:
        calls = calls_by(cluster, cluster.leaked(ROUTER).grpc_token, request_id)
        for call in orders:
            with pytest.raises(PermissionDenied, match="signed"):
                await getattr(calls, call)()
    assert cluster.refused_calls("PermissionDenied") - before >= Counter(orders)
    of_units = {"look_up", "fetch", "deposit"}
    assert set(orders) == {"prefill", "abort", "detach", "hand_off", "read_tokens", *of_units}


async def test_a_router_s_file_would_do_it_all(cluster: AttackedCluster) -> None:
    """The same calls, by the one who may."""
    async with cluster.stream_beside() as request_id:
        await calls_of_a_router(cluster, request_id).prefill()
    async with cluster.running(ENDLESS) as (request_id, _, _):
        await calls_of_a_router(cluster, request_id).read_tokens()
        await calls_of_a_router(cluster, request_id).abort()
    async with cluster.running(ENDLESS) as (request_id, _, _):
        await calls_of_a_router(cluster, request_id).detach()
        # Its own router may have ended it by then.
        with pytest.raises(Stale, match=r"other tokens|is not kept here"):
            await calls_of_a_router(cluster, request_id).hand_off()


# NATS. A worker may say nothing but what is its role's: its beats, events and caches.
LOGIN_REFUSED, REFUSED = "authentication error", "Publish Violation"
DRAIN = SUBJECTS.control("decode-00000000", "drain")
FORGED = {
    SUBJECTS.beat("router", "router-00000000"): set(LEAKED),
    SUBJECTS.beat("prefill", "prefill-00000000"): {DECODE, HOST_CACHE, OBSERVER},
    SUBJECTS.beat("decode", "decode-00000000"): {PREFILL, HOST_CACHE, OBSERVER},
    SUBJECTS.life("router", "router-00000000", "r1", "finished"): set(LEAKED),
    DRAIN: set(LEAKED),
    f"$JS.API.STREAM.PURGE.{STREAM}": set(LEAKED) | {ROUTER},
    f"$JS.API.STREAM.DELETE.{STREAM}": set(LEAKED),  # a router makes a log anew that stores nothing
    f"$JS.API.STREAM.MSG.DELETE.{STREAM}": set(LEAKED) | {ROUTER},
}


async def test_a_stranger_is_not_let_in_by_the_broker(cluster: AttackedCluster) -> None:
    before = cluster.up.log("nats").count(LOGIN_REFUSED)
    counted = cluster.metric("router", "refused_bus_logins_total")
    async with cluster.stream_beside():
        for login in (Login("", ""), Login("router", ""), strangers(ROUTER).nats):
            with pytest.raises(nats.errors.Error):
                async with cluster.nats_client(login):
                    pass
    cluster.await_logged(LOGIN_REFUSED, before + 3)
    wait_until(
        lambda: cluster.metric("router", "refused_bus_logins_total") == counted + 3,
        "the router to count them",
        seconds=FAILSAFE_SECONDS,
    )


async def test_a_leaked_login_says_nothing_of_others_on_the_broker(
    cluster: AttackedCluster,
) -> None:
    before, tried = cluster.up.log("nats").count(REFUSED), 0
    async with cluster.stream_beside():
        logged = await cluster.num_logged()
        for role in {*LEAKED, ROUTER}:
            async with cluster.nats_client(cluster.leaked(role).nats) as (attacker, refused):
                subjects = [subject for subject, roles in FORGED.items() if role in roles]
                for subject in subjects:
                    await attacker.publish(subject, b"{}")
                await refusals(attacker, refused, len(subjects))
                tried += len(subjects)
        assert await cluster.num_logged() >= logged, "nothing was purged"
    cluster.await_logged(REFUSED, before + tried)
    assert cluster.metric("router", "lost_workers_total") == 0


@pytest.mark.parametrize("role", [PREFILL, DECODE, HOST_CACHE])
async def test_a_leaked_login_beats_in_no_other_s_name(
    cluster: AttackedCluster, role: ClusterRole
) -> None:
    """The broker lets it publish there; routers ask for the secret of the life that has the id."""
    beat, forged = cluster.beats[role], cluster.metric("router", "forged_messages_total")
    lies = [
        replace(beat, is_ready=False),
        replace(beat, address="127.0.0.1:1"),
        replace(beat, epoch=1),
        replace(beat, role="decode" if role is PREFILL else "prefill"),
    ]
    async with (
        cluster.stream_beside(),
        cluster.nats_client(cluster.leaked(role).nats) as (nats_, _),
    ):
        for lie in lies:
            subject = SUBJECTS.beat(role, beat.worker_id)
            await nats_.publish(subject, beat_to_bytes(lie), headers={LIFE_HEADER: 32 * "0"})
        await nats_.flush(FAILSAFE_SECONDS)
    wait_until(
        lambda: cluster.metric("router", "forged_messages_total") >= forged + len(lies),
        "forged beats",
        seconds=FAILSAFE_SECONDS,
    )
    assert cluster.metric("router", "lost_workers_total") == 0


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_leaked_login_drives_no_worker_from_its_address(
    cluster: AttackedCluster, role: ClusterRole
) -> None:
    """It beats in its own name, with the secret of its own life, at another worker's address."""
    secret = make_life_secret()
    liar = replace(cluster.beats[role], worker_id=worker_id_of(role, secret))
    subject = SUBJECTS.beat(role, liar.worker_id)
    misplaced = cluster.metric("router", "misplaced_beats_total")
    async with (
        cluster.stream_beside(),
        cluster.nats_client(cluster.leaked(role).nats) as (nats_, _),
        asyncio.timeout(FAILSAFE_SECONDS),
    ):
        while cluster.metric("router", "misplaced_beats_total") == misplaced:
            await nats_.publish(subject, beat_to_bytes(liar), headers={LIFE_HEADER: secret})
            await nats_.flush(FAILSAFE_SECONDS)
    assert cluster.metric("router", "lost_workers_total") == 0


@pytest.mark.parametrize("role", [PREFILL, DECODE, HOST_CACHE])
async def test_a_leaked_login_ends_no_request_in_the_log(
    cluster: AttackedCluster, role: ClusterRole
) -> None:
    """The broker lets it write events of its role; one that says it is a router's counts for
    nothing."""
    forged = cluster.metric("router", "forged_messages_total")
    async with (
        cluster.stream_beside() as request_id,
        cluster.nats_client(cluster.leaked(role).nats) as (nats_, refused),
        Client(cluster.up.said["grpc"], api_key=API_KEY) as client,
    ):
        await cluster.logged(request_id)
        ended = LifecycleEntry("router", cluster.router_id, 1, request_id, 1, 9, "failed", {})
        subject = SUBJECTS.life(role, cluster.beats[role].worker_id, request_id, "failed")
        await nats_.publish(subject, encode_event(ended))
        await nats_.flush(FAILSAFE_SECONDS)
        assert refused == []
        async with asyncio.timeout(FAILSAFE_SECONDS):
            while cluster.metric("router", "forged_messages_total") == forged:
                events = await client.trace(request_id)
    assert "failed" not in {event.event for event in events}


@pytest.mark.parametrize("role", [PREFILL, DECODE, HOST_CACHE])
async def test_a_leaked_login_answers_no_order_in_another_s_place(
    cluster: AttackedCluster, role: ClusterRole
) -> None:
    """The broker has it hear the orders to its role; an answer shows whose it is."""
    stolen = json.dumps({"ok": "stolen"}).encode()
    subject = SUBJECTS.control(cluster.beats[role].worker_id, "drain-not")
    login = cluster.leaked(ROUTER).nats
    async with (
        cluster.nats_client(cluster.leaked(role).nats) as (thief, refused),
        nats_bus(NatsOptions(cluster.up.said["nats"], "router", login, log=None)) as router,
    ):

        async def answer(order: Msg) -> None:
            await thief.publish(order.reply, stolen)

        await router.connected()
        await thief.subscribe(SUBJECTS.all_control_of_role(role), cb=answer)
        await thief.flush(FAILSAFE_SECONDS)
        asked = 0
        while asked < 12 or not router.statistics().num_unproven:  # until it was the first once
            asked += 1
            with pytest.raises(InvalidRequest, match="no order is called 'drain-not'"):
                await router.request(subject, b"", timeout_seconds=FAILSAFE_SECONDS)
        assert refused == []
        for other in {"router", PREFILL, DECODE, HOST_CACHE} - {role}:
            await thief.subscribe(SUBJECTS.all_control_of_role(other), cb=answer)
        await refusals(thief, refused, 3)


@pytest.mark.parametrize("role", [PREFILL, DECODE, HOST_CACHE])
async def test_a_leaked_login_does_not_hear_the_others(
    cluster: AttackedCluster, role: ClusterRole
) -> None:
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    async with cluster.nats_client(cluster.leaked(role).nats) as (attacker, refused):
        for pattern in (">", SUBJECTS.all_life, SUBJECTS.all_beats, "_INBOX.>", "$JS.>"):
            await attacker.subscribe(pattern, cb=hear)
        async with cluster.stream_beside():
            pass
        await refusals(attacker, refused, 5)
    assert heard == []


async def test_people_observe_by_the_context_of_their_tool(cluster: AttackedCluster) -> None:
    """As `nats --context` does: it hears all events, asks for the log, and changes nothing."""
    path = cluster.up.state_dir / "nats" / "context" / "ferryman.json"
    said = json.loads(path.read_text())
    assert said["url"] == cluster.up.said["nats"]
    login = Login(said["user"], said["password"])
    async with raw_nats_client(said["url"], login) as (tool, refused):
        heard = await tool.subscribe("ferryman.>")
        async with cluster.stream_beside():
            assert (await heard.next_msg(FAILSAFE_SECONDS)).subject.startswith("ferryman.v1.local.")
        assert said["inbox_prefix"] == inbox_of(login.user)
        assert (await tool.jetstream().stream_info(STREAM)).state.messages > 0
        assert refused == []
        await tool.publish(DRAIN, b"{}")
        await refusals(tool, refused, 1)


# Redis.
FLUSHES = ("FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "SET other 1", "SHUTDOWN NOSAVE")


async def test_a_stranger_and_workers_are_not_let_in_by_the_index(
    cluster: AttackedCluster,
) -> None:
    logins = [
        None,
        strangers(HOST_CACHE).redis,
        *(cluster.leaked(r).redis for r in (PREFILL, DECODE)),
    ]
    before = await cluster.redis_refusals()
    shown = cluster.metric("router", "index_refused ")
    async with cluster.stream_beside():
        for login in logins:
            async with cluster.redis_client(login) as attacker:
                with pytest.raises(AuthenticationError):
                    await attacker.execute_command("FLUSHALL")
    assert await cluster.redis_refusals() >= before + len(logins)
    wait_until(
        lambda: cluster.metric("router", "index_refused ") >= shown + len(logins),
        "refusals that the router counts",
        seconds=FAILSAFE_SECONDS,
    )


@pytest.mark.parametrize("role", [HOST_CACHE, OBSERVER, ROUTER])
async def test_a_leaked_login_flushes_no_index(cluster: AttackedCluster, role: ClusterRole) -> None:
    before = await cluster.redis_refusals()
    async with (
        cluster.stream_beside(),
        cluster.redis_client(cluster.leaked(role).redis) as attacker,
    ):
        for order in FLUSHES:
            with pytest.raises(NoPermissionError):
                await attacker.execute_command(*order.split())
    assert await cluster.redis_refusals() >= before + len(FLUSHES)


async def test_a_leaked_login_tells_the_index_nothing_that_is_believed(
    cluster: AttackedCluster,
) -> None:
    """It may write, but the cluster's key is in another file."""
    login, forged = cluster.leaked(HOST_CACHE).redis, cluster.metric("router", "index_forged ")
    await forge_units(cluster.up.said["redis"], login, cluster.beats, cluster.tenant_salt)
    async with asyncio.timeout(FAILSAFE_SECONDS):
        while cluster.metric("router", "index_forged ") == forged:  # it looks once a second
            async with cluster.stream_beside():
                pass
    async with Client(cluster.up.said["grpc"], api_key=API_KEY) as client:
        assert (await usage_of(client, TOKENS)).cached.total == 0


# The public doors, and what is told to everybody.


@pytest.mark.parametrize("key", ["", f"{API_KEY}x"])
async def test_nobody_asks_without_a_key(cluster: AttackedCluster, key: str) -> None:
    doors = [rf'responses_total{{door="{door}",status="(401|UNAUTH)' for door in ("http", "grpc")]
    before = [cluster.metric("router", one) for one in doors]
    async with cluster.stream_beside() as request_id:
        statuses = await statuses_over_http(cluster.up.said["http"], key)
        errors = await errors_over_grpc(cluster.up.said["grpc"], key, request_id)
    assert set(statuses.values()) == {401}
    assert {type(error) for error in errors.values()} == {Unauthenticated}
    after = [cluster.metric("router", one) for one in doors]
    assert after == [before[0] + len(statuses), before[1] + len(errors)]


async def test_with_a_key_they_do_answer(cluster: AttackedCluster) -> None:
    async with cluster.stream_beside() as request_id:
        await cluster.logged(request_id)
        statuses = await statuses_over_http(cluster.up.said["http"], API_KEY)
        errors = await errors_over_grpc(cluster.up.said["grpc"], API_KEY, request_id)
    assert set(statuses.values()) == {200}
    assert set(errors.values()) == {None}


async def test_another_tenant_finds_nothing_of_an_answer(cluster: AttackedCluster) -> None:
    """Neither its trace and its route, nor that its prompt is cached."""
    grpc_, prompt = cluster.up.said["grpc"], tuple(range(100, 200))
    own, other = Client(grpc_, api_key=API_KEY), Client(grpc_, api_key=OTHER_KEY)
    async with cluster.stream_beside() as request_id, own, other:
        await cluster.logged(request_id)
        for client, is_told in ((other, False), (own, True)):
            for ask in (client.trace, client.explain):
                with nullcontext() if is_told else pytest.raises(NotFound):
                    assert await ask(request_id)
        first, theirs = await usage_of(own, prompt), await usage_of(other, prompt)
        again = await usage_of(own, prompt)
    assert theirs == first
    assert again.cached.total > 0, "it is cached, for its own tenant"
    assert again.at_decode.total > 0, "by decode as well"
    assert first.at_decode.total == 0


async def usage_of(client: Client, prompt: Sequence[int]) -> Usage:
    *_, last = [each async for each in client.generate(prompt, SamplingParams(max_tokens=1))]
    assert isinstance(last, GenerateFinished)
    return last.usage


async def test_metrics_tell_numbers_and_no_secret(cluster: AttackedCluster) -> None:
    async with cluster.stream_beside() as request_id:
        told = "".join(cluster.metrics(r) for r in ("router", "prefill", "decode", "hostcache"))
    secrets = [API_KEY, request_id, "kite", "Oslo"]
    for role in ClusterRole:
        found = cluster.leaked(role)
        secrets += [found.grpc_token, found.nats.password, found.redis.password]
    assert not [secret for secret in secrets if secret in told]


SHOWN = {
    "router": ("/metrics",),
    **dict.fromkeys(("prefill", "decode", "hostcache"), ("/metrics", "/debug/ledger")),
}


def test_numbers_are_shown_to_observers_alone(cluster: AttackedCluster) -> None:
    expected = {
        "": 401,
        f"Bearer {API_KEY}": 401,
        f"Bearer {strangers(OBSERVER).grpc_token}": 401,
        f"Bearer {cluster.leaked(ROUTER).grpc_token}": 403,
        f"Bearer {cluster.leaked(OBSERVER).grpc_token}": 200,
    }
    for role, paths in SHOWN.items():
        before = cluster.metric(role, "refused_reads_total")
        for path in paths:
            found = {shown: cluster.read(role, path, shown).status_code for shown in expected}
            assert found == expected
        assert cluster.metric(role, "refused_reads_total") == before + 4 * len(paths)


def test_probes_are_answered_and_hear_nothing_else(cluster: AttackedCluster) -> None:
    told = {role: cluster.read(role, "/health") for role in SHOWN}
    assert {role: one.json() for role, one in told.items()} == {
        "router": {"status": "alive"},
        "prefill": {"status": "ok"},
        "decode": {"status": "ok"},
        "hostcache": {"status": "ready"},
    }
    assert cluster.read("router", "/ready").json() == {"status": "ready"}
    more = cluster.read("router", "/ready", cluster.up.as_observer["authorization"]).json()
    assert more["workers"] == {"prefill": 1, "decode": 1}


def test_every_port_of_a_process_is_one_of_its_locked_doors(cluster: AttackedCluster) -> None:
    """The tests above knock at each of them; one that a library opened would have no lock."""
    said = cluster.up.said
    doors = {"nats": [said["nats"]], "redis": [said["redis"]], "router": [said["http"]]}
    doors["router"].append(f"grpc://{said['grpc']}")
    for role, beat in cluster.beats.items():
        doors[role] = [f"grpc://{beat.address}", f"http://{cluster.ready(role)}"]
    assert {name: set(listening_addresses(pid)) for name, pid in cluster.up.pids.items()} == {
        name: {urlsplit(url).port for url in urls} for name, urls in doors.items()
    }
    assert not listening_addresses(cluster.up.process.pid), "the one that starts them has no door"


def test_nothing_of_it_listens_to_other_machines(cluster: AttackedCluster) -> None:
    listening = {name: addresses_of(pid) for name, pid in cluster.up.pids.items()}
    assert all(listening.values()), "each has a door"
    assert {one for found in listening.values() for one in found} == {"127.0.0.1"}
