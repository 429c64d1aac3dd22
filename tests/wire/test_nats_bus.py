"""Behaviour of NATS alone: outages, reconnection, acknowledgements, and presence."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from tests.servers import running_nats

from ferryman.errors import ConfigError, Unavailable
from ferryman.runtime.embedded import EmbeddedServer, free_port, nats_command, start
from ferryman.wire.nats import lifecycle_log
from ferryman.wire.nats import nats_bus as bus_module
from ferryman.wire.nats.bus import Discoverable, RecordedMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.lifecycle_log import STREAM, LogKeeper, LogLimits
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects

LOCAL = Subjects("local")
FAILSAFE_SECONDS = 30
LIFE = LOCAL.life("router", "router-00000001", "req-1", "received")


async def settled(bus: NatsBus, number: int) -> None:
    """Waits until `number` events are known to be in the log or not."""
    while bus.statistics().num_recorded + bus.statistics().num_unrecorded < number:
        await bus.flush()
        await asyncio.sleep(0)


async def log_of(bus: NatsBus) -> tuple[RecordedMessage, ...]:
    """The log of a broker that a busy machine may make seem away: pings end after two seconds."""
    async with asyncio.timeout(120):
        while True:
            with suppress(Unavailable):
                return await bus.history(LOCAL.all_life, max_events=9)
            await asyncio.sleep(0)


async def test_a_bus_begins_without_a_broker_and_sends_what_was_kept(tmp_path: Path) -> None:
    port = free_port()
    async with nats_bus(NatsOptions(f"nats://127.0.0.1:{port}")) as bus:
        bus.publish(LIFE, b"early")
        assert not bus.is_connected
        with pytest.raises(Unavailable):
            await bus.request("any.one", b"", timeout_seconds=1)
        with pytest.raises(Unavailable):
            await bus.history(LOCAL.all_life, max_events=1)
        async with bus.subscribed(LOCAL.all_life) as messages:
            server = start(nats_command(tmp_path, port), tmp_path)
            try:
                assert (await anext(messages)).payload == b"early"
            finally:
                server.stop()


async def test_a_bus_ends_though_no_broker_ever_came() -> None:
    async with nats_bus(NatsOptions(f"nats://127.0.0.1:{free_port()}")) as bus:
        bus.publish(LIFE, b"in vain")
        async with bus.subscribed(LOCAL.all_life):
            await bus.disconnected()
    assert bus.statistics().num_waiting == 1


async def test_a_bus_ends_though_an_answer_that_it_awaits_loses_a_cancel(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asking = asyncio.Event()

    async def ensure(_: LogKeeper) -> None:
        is_asking.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    monkeypatch.setattr(LogKeeper, "ensure", ensure)
    monkeypatch.setattr(bus_module, "CONNECT_SECONDS", 0.01)
    async with asyncio.timeout(FAILSAFE_SECONDS):
        async with nats_bus(NatsOptions(nats_url, log=LogLimits(60.0, 1 << 20))):
            await is_asking.wait()


async def test_a_broker_that_comes_back_gets_what_was_said_meanwhile(tmp_path: Path) -> None:
    port = free_port()
    server = start(nats_command(tmp_path, port), tmp_path)
    async with nats_bus(NatsOptions(server.url)) as bus:
        await bus.connected()
        async with bus.subscribed(LOCAL.all_life) as messages:
            bus.publish(LIFE, b"before")
            assert (await anext(messages)).payload == b"before"
            await settled(bus, 1)  # what the log has not acknowledged is sent again
            server.stop()
            for number in range(50):
                bus.publish(LIFE, b"%d" % number)
            server = start(nats_command(tmp_path, port), tmp_path)
            try:
                assert [int((await anext(messages)).payload) for _ in range(50)] == list(range(50))
                await settled(bus, 51)
            finally:
                server.stop()


@pytest.mark.parametrize("call", ["publish", "request"])
async def test_a_transport_that_closed_before_the_library_noticed_ends_no_bus(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """uvloop raises a RuntimeError then: from a message, or from a question about the log."""
    original, closed = getattr(Client, call), list[str]()

    async def failing_once(client: Client, subject: str, *args: Any, **more: Any) -> Any:
        if not closed:
            closed.append(subject)
            raise RuntimeError("unable to perform operation on a transport; the handler is closed")
        return await original(client, subject, *args, **more)

    monkeypatch.setattr(Client, call, failing_once)
    async with asyncio.timeout(FAILSAFE_SECONDS), nats_bus(NatsOptions(nats_url)) as bus:
        async with bus.subscribed(LIFE) as messages:
            bus.publish(LIFE, b"after it")
            assert (await anext(messages)).payload == b"after it"
    assert closed, "the fault took effect"


async def test_a_stopped_broker_is_noticed_and_nothing_waits_for_it() -> None:
    with running_nats() as server:
        async with nats_bus(NatsOptions(server.url)) as bus:
            await bus.connected()
            server.process.send_signal(signal.SIGSTOP)
            try:
                bus.publish(LIFE, b"kept")
                async with asyncio.timeout(120):
                    await bus.disconnected()
                with pytest.raises(Unavailable, match="away"):
                    await bus.request("any.one", b"", timeout_seconds=60)
            finally:
                server.process.send_signal(signal.SIGCONT)
            await settled(bus, 1)


async def test_the_log_is_made_with_its_limits_and_brought_to_new_ones(nats_url: str) -> None:
    for max_bytes in (1 << 20, 2 << 20):
        limits = LogLimits(max_age_seconds=60, max_bytes=max_bytes)
        async with nats_bus(NatsOptions(nats_url, log=limits)) as bus:
            bus.publish(LIFE, b"{}")
            await settled(bus, 1)
            client = await nats.connect(nats_url)
            config = (await client.jetstream().stream_info(STREAM)).config
            await client.close()
        assert (config.max_bytes, config.max_age) == (max_bytes, 60)
        assert config.subjects == ["ferryman.v1.*.life.>", "ferryman.v1.*.hops.>"]


async def test_many_events_are_acknowledged_without_waiting_for_each(nats_url: str) -> None:
    async with nats_bus(NatsOptions(nats_url)) as bus:
        for _ in range(3000):
            bus.publish(LIFE, b"{}")
        await settled(bus, 3000)
        statistics = bus.statistics()
    assert (statistics.num_unrecorded, statistics.num_refused) == (0, 0)


async def test_the_fleet_shows_in_service_discovery(nats_url: str) -> None:
    process = Discoverable("ferryman-decode", "0.1.0", "decode worker", {"worker_id": "decode-7"})
    async with nats_bus(NatsOptions(nats_url)) as bus:
        await bus.connected()
        async with bus.discoverable(process):
            pong = await bus.request("$SRV.PING.ferryman-decode", b"", timeout_seconds=60)
            assert json.loads(pong)["metadata"] == {"worker_id": "decode-7"}
        with pytest.raises(Unavailable, match="nobody answers"):
            await bus.request("$SRV.PING.ferryman-decode", b"", timeout_seconds=60)


async def test_a_broker_that_stands_still_as_a_process_enters_discovery_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush = Client.flush
    # The library waits ten seconds, then raises.
    monkeypatch.setattr(Client, "flush", lambda self, seconds=0.2: flush(self, seconds))
    with running_nats() as server:
        async with nats_bus(NatsOptions(server.url)) as bus:
            await bus.connected()
            server.process.send_signal(signal.SIGSTOP)
            try:
                async with bus.discoverable(Discoverable("decode", "1.0.0", "a worker")):
                    async with asyncio.timeout(120):
                        await bus.disconnected()
                        server.process.send_signal(signal.SIGCONT)
                        await bus.connected()
                    found = await bus.request("$SRV.PING.decode", b"", timeout_seconds=60)
            finally:
                server.process.send_signal(signal.SIGCONT)
    assert json.loads(found)["name"] == "decode"


@pytest.mark.parametrize("url", ["localhost:4222", "someone:hidden@localhost:4222"])
def test_a_url_that_is_none_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="'localhost:4222' is no NATS URL"):
        NatsBus(NatsOptions(url))


async def test_no_log_line_has_the_password_of_a_url(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with running_nats() as server:
        at = server.url.partition("://")[2]
        urls = f"nats://someone:hidden@{at}, nats://token-that-is-hidden@{at}"
        async with nats_bus(NatsOptions(urls)) as bus:
            await bus.connected()
            server.process.kill()
            async with asyncio.timeout(120):
                await bus.disconnected()
    shown = f"url=nats://{at},nats://{at}"
    assert [r.getMessage() for r in caplog.records if "url=" in r.getMessage()] == [
        f"bus connected {shown}",
        f"bus away {shown}",
    ]
    assert "hidden" not in caplog.text


async def test_every_reader_of_the_log_sees_all_of_it_and_leaves_nothing() -> None:
    """The broker's word on how much there is may come before or after what there is."""
    with running_nats() as server:
        await _read_by_eight(server.url)


async def _read_by_eight(url: str) -> None:
    async with nats_bus(NatsOptions(url)) as bus:
        await bus.connected()
        for number in range(8):
            bus.publish(LIFE, str(number).encode())
        await settled(bus, 8)

        async def read(num_times: int) -> list[int]:
            return [len(await bus.history(LOCAL.all_life, max_events=9)) for _ in range(num_times)]

        lengths = await asyncio.gather(*(read(50) for _ in range(8)))
        assert {length for reader in lengths for length in reader} == {8}
        assert len(await bus.history(LOCAL.all_life, max_events=3)) == 3
        async with await nats.connect(url) as client:
            stream = await client.jetstream().stream_info(STREAM)
            assert stream.state.consumer_count == 0


@contextmanager
def full_disk(server: EmbeddedServer) -> Iterator[None]:
    """No file of the broker grows, as on a full disk: the kernel refuses each write beyond."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    yield
    everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, everything)


async def published_until_recorded(bus: NatsBus) -> None:
    """Publishes until one more event is in the log."""
    before = bus.statistics().num_recorded
    async with asyncio.timeout(120):
        while bus.statistics().num_recorded == before:
            bus.publish(LIFE, b"{}")
            await asyncio.sleep(0.05)


async def published_until_lost(bus: NatsBus) -> None:
    """Publishes until the broker's log has taken nothing for a while."""
    async with asyncio.timeout(120):
        num_same, last = 0, -1
        while num_same < 20:
            bus.publish(LIFE, b"{}")
            await asyncio.sleep(0.05)
            num_same = num_same + 1 if bus.statistics().num_recorded == last else 0
            last = bus.statistics().num_recorded


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lifecycle_log, bus_module):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.5)


@pytest.mark.usefixtures("frequent_looks")
async def test_a_log_that_met_a_full_disk_records_again_once_there_is_room() -> None:
    with running_nats() as server:
        async with nats_bus(NatsOptions(server.url)) as bus:
            await published_until_recorded(bus)
            with full_disk(server):
                await published_until_lost(bus)
            await published_until_recorded(bus)
            assert await bus.history(LOCAL.all_life, max_events=1)


@pytest.mark.usefixtures("frequent_looks")
async def test_a_log_that_cannot_be_made_on_a_full_disk_is_made_once_there_is_room() -> None:
    with running_nats() as server, full_disk(server):
        async with nats_bus(NatsOptions(server.url)) as bus:
            await published_until_lost(bus)
            assert bus.statistics().num_recorded == 0
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (-1, -1))
            await published_until_recorded(bus)


@pytest.mark.usefixtures("frequent_looks")
async def test_a_stopped_broker_costs_no_event_of_its_log() -> None:
    """Acknowledgements are late then, and the log is whole."""
    with running_nats() as server:
        async with nats_bus(NatsOptions(server.url)) as bus:
            bus.publish(LIFE, b"first")
            await settled(bus, 1)
            server.process.send_signal(signal.SIGSTOP)
            bus.publish(LIFE, b"meanwhile")
            async with asyncio.timeout(120):
                await bus.disconnected()
            server.process.send_signal(signal.SIGCONT)
            await settled(bus, 2)
            recorded = await log_of(bus)
            assert [message.payload for message in recorded] == [b"first", b"meanwhile"]
