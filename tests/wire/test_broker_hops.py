"""nats-server's own traces of sampled requests, by real brokers: a locked one, and a leaf's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.cluster_keys import KEY
from tests.servers import TESTS, locked_nats_server

from ferryman.runtime.credential_folders import with_login
from ferryman.runtime.embedded import free_port, nats_command, started
from ferryman.runtime.lifecycle import LifecyclePublisher, Publisher
from ferryman.runtime.membership import TRACE_DESTINATION, broker_traces
from ferryman.security.credentials import ClusterRole, Login, credentials_of
from ferryman.wire.nats.broker_hops import BrokerHop, hop_from_trace
from ferryman.wire.nats.bus import RecordedMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.app import run

LOCAL = Subjects("local")
SAMPLED, UNSAMPLED = (f"00-{7:032x}-{7:016x}-{flags}" for flags in ("01", "00"))
SERVICES = [role for role in ClusterRole if role not in (ClusterRole.OBSERVER, ClusterRole.BOTH)]
FAILSAFE_SECONDS = 120


def publisher_of(bus: NatsBus, role: str) -> LifecyclePublisher:
    life = Publisher(role, f"{role}-0000000a", 1)
    return LifecyclePublisher(bus.publish, LOCAL, life, headers=broker_traces(LOCAL))


async def with_log(bus: NatsBus) -> None:
    """Waits until the bus that keeps the log has made it."""
    async with asyncio.timeout(FAILSAFE_SECONDS):
        while not (await bus.log_state()).has_stream:
            await bus.flush()


async def logged(bus: NatsBus, pattern: str, number: int) -> list[RecordedMessage]:
    """The entries of the log, as soon as there are so many."""
    await with_log(bus)
    async with asyncio.timeout(FAILSAFE_SECONDS):
        while len(entries := await bus.history(pattern, max_events=99)) < number:
            await bus.flush()
    return list(entries)


async def hops_of(bus: NatsBus, request_id: str, number: int) -> list[BrokerHop]:
    entries = await logged(bus, LOCAL.all_hops_of(request_id), number)
    return [hop_from_trace(entry.payload) for entry in entries]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with locked_nats_server() as url:
        yield url


def options(url: str, login: Login) -> NatsOptions:
    return NatsOptions(url, "tests", login)


@pytest.mark.parametrize("role", SERVICES)
async def test_each_role_s_broker_traces_its_events_and_records_them(
    url: str, role: ClusterRole
) -> None:
    async with nats_bus(options(url, TESTS)) as reader:
        await reader.connected()
        await reader.flush()
        async with nats_bus(options(url, credentials_of(KEY, role).nats)) as bus:
            name = f"req-{role.value}"
            publisher_of(bus, role.value).publish(name, 1, "routed", traceparent=SAMPLED)
            (event,) = await logged(reader, LOCAL.all_life_of(name), 1)
            (hop,) = await hops_of(reader, name, 1)
            assert bus.statistics().num_forbidden == 0
    assert hop.subject == event.subject
    assert (hop.arrived_by, hop.streams, hop.brokers, hop.errors) == (
        "client",
        ("LIFECYCLE",),
        (),
        (),
    )
    assert 0 <= hop.seconds < FAILSAFE_SECONDS


async def test_nothing_is_added_to_a_request_that_is_not_sampled(url: str) -> None:
    async with nats_bus(options(url, TESTS)) as bus:
        await bus.connected()
        await bus.flush()
        pattern = f"{LOCAL.root}.life.router.*.*.*"
        async with bus.subscribed(pattern) as messages, asyncio.timeout(FAILSAFE_SECONDS):
            life = publisher_of(bus, "router")
            life.publish("req-plain", 1, "received")
            life.publish("req-unsampled", 1, "received", traceparent=UNSAMPLED)
            life.publish("req-sampled", 1, "received", traceparent=SAMPLED)
            headers = [(await anext(messages)).headers for _ in range(3)]
        traced = [TRACE_DESTINATION in of_message for of_message in headers]
        assert traced == [False, False, True]
        # Later ones first: the broker traces in order.
        await hops_of(bus, "req-sampled", 1)
        for name in ("req-plain", "req-unsampled"):
            assert await bus.history(LOCAL.all_hops_of(name), max_events=9) == ()


async def test_a_role_has_its_events_traced_to_its_own_subject_alone(url: str) -> None:
    """An event that would write into another role's traces is refused, and counted."""
    decode = credentials_of(KEY, ClusterRole.DECODE).nats
    async with nats_bus(options(url, TESTS)) as reader, nats_bus(options(url, decode)) as bus:
        await reader.connected()
        await reader.flush()
        subject = LOCAL.life("decode", "decode-0000000a", "req-forged", "finished")
        there = {TRACE_DESTINATION: LOCAL.hops("router", "router-0000000a", "req-forged")}
        bus.publish(subject, b"{}", there)
        await bus.connected()
        async with asyncio.timeout(FAILSAFE_SECONDS):
            while not bus.statistics().num_forbidden:
                await bus.flush()
        assert await reader.history(LOCAL.all_hops_of("req-forged"), max_events=9) == ()


@contextmanager
def hub_with_a_leaf(folder: Path) -> Iterator[tuple[str, str]]:
    """The URLs of two brokers; the hub keeps the log, and the leaf has none."""
    port = free_port()
    hub, leaf = folder / "hub.conf", folder / "leaf.conf"
    hub.write_text(f'server_name: hub\nleafnodes {{ listen: "127.0.0.1:{port}" }}\n')
    remotes = f'[{{ url: "nats-leaf://127.0.0.1:{port}" }}]'
    leaf.write_text(f"server_name: leaf\nleafnodes {{ remotes: {remotes} }}\n")
    with (
        started(partial(nats_command, config=hub), folder / "hub") as center,
        started(partial(nats_command, config=leaf), folder / "leaf") as edge,
    ):
        yield center.url, edge.url


async def test_a_leaf_and_its_hub_each_say_what_they_did(tmp_path: Path) -> None:
    with hub_with_a_leaf(tmp_path) as (center, edge):
        async with (
            nats_bus(NatsOptions(center)) as hub,
            nats_bus(NatsOptions(edge, log=None)) as bus,
        ):
            await hub.connected()
            await with_log(hub)
            life, name = publisher_of(bus, "decode"), "req-leaf"
            async with asyncio.timeout(FAILSAFE_SECONDS):
                # Until the leaf knows that the hub wants events, it has nowhere to send them.
                while not await hub.history(LOCAL.all_life_of(name), max_events=1):
                    life.publish(name, 1, "reserved", traceparent=SAMPLED)
                    await bus.flush()
            life.publish(name, 1, "finished", traceparent=SAMPLED)
            async with asyncio.timeout(FAILSAFE_SECONDS):
                while True:
                    traces = await hub.history(LOCAL.all_hops_of(name), max_events=999)
                    hops = [hop_from_trace(trace.payload) for trace in traces]
                    last = {hop.broker: hop for hop in hops if hop.subject.endswith(".finished")}
                    if len(last) == 2:
                        break
    assert (last["leaf"].arrived_by, last["leaf"].brokers) == ("client", ("hub",))
    assert last["leaf"].streams == ()
    assert (last["hub"].arrived_by, last["hub"].streams) == ("leaf", ("LIFECYCLE",))


def in_the_log(url: str, request_id: str, traceparent: str) -> None:
    """A request that was received, and failed."""

    async def publish() -> None:
        async with nats_bus(options(url, credentials_of(KEY, ClusterRole.ROUTER).nats)) as bus:
            await bus.connected()
            life = publisher_of(bus, "router")
            life.publish(request_id, 1, "received", traceparent=traceparent, tokens=3)
            life.publish(request_id, 1, "failed", reason="NoWorker")
            await logged(bus, LOCAL.all_life_of(request_id), 2)

    asyncio.run(publish())


def test_trace_shows_the_way_through_the_broker(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = with_login(url, credentials_of(KEY, ClusterRole.OBSERVER).nats)
    in_the_log(url, "req-seen", SAMPLED)
    assert run(["trace", "req-seen", "--broker", "--json", "--nats", observer]) == 0
    received, failed = json.loads(capsys.readouterr().out)["broker"]
    assert received["subject"].endswith("router-0000000a.req-seen.received")
    assert failed["streams"] == ["LIFECYCLE"]
    assert received["at_ms"] <= failed["at_ms"]
    assert run(["trace", "req-seen", "--broker", "--nats", observer]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = lines[next(i for i, line in enumerate(lines) if "through the broker" in line) + 1 :]
    assert [line.split()[2:4] for line in shown] == [["router", "received"], ["router", "failed"]]
    assert all(" client: stream LIFECYCLE" in line for line in shown)


def test_trace_says_that_the_broker_traced_nothing(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = with_login(url, credentials_of(KEY, ClusterRole.OBSERVER).nats)
    in_the_log(url, "req-unseen", UNSAMPLED)
    assert run(["trace", "req-unseen", "--broker", "--nats", observer]) == 0
    assert "the broker traced none of its events" in capsys.readouterr().out


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b'{"server": {"name": "a"}, "events": []}',
        b'{"server": {"name": "a"}, "events": [{"type": "in", "kind": 99, "ts": "", "subj": ""}]}',
        b'{"server": {"name": "a"}, "events": [{"type": "in", "kind": 0, "ts": "x", "subj": ""}]}',
        b'{"server": 7, "events": 7}',
    ],
)
def test_what_is_no_trace_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"trace|Expecting|isoformat|JSON"):
        hop_from_trace(payload)
