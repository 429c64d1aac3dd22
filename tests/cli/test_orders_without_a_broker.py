"""`ferryman drain` and `ferryman roll` while their broker goes and comes back, and while another
listens in a worker's place: nothing is said to have ended that may be there, and no wait is for
ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from tests.waiting import until

from ferryman.cache.manifest import Kind
from ferryman.ids import make_life_secret, worker_id_of
from ferryman.runtime import embedded
from ferryman.runtime.embedded import EmbeddedServer, free_port, nats_command
from ferryman.runtime.life import alongside
from ferryman.wire.nats.bus import BusMessage
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, beat_to_bytes
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli import drain, roll
from ferryman_cli.app import run
from ferryman_cli.drain import DrainOrder, Presence

SUBJECTS = Subjects("local")
STATE = ServedState("f", 16, "d", (Kind.FULL,))
FAILSAFE_SECONDS = 120

Command = asyncio.Future[int]


class FlakyBroker:
    """A real broker at one port, which can go and come back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port, self._num_lives = folder, free_port(), 0
        self._server: EmbeddedServer
        self.url = f"nats://127.0.0.1:{self._port}"

    def come(self) -> None:
        self._num_lives += 1
        folder = self._folder / str(self._num_lives)
        folder.mkdir()
        self._server = embedded.start(nats_command(folder, self._port), folder)

    def go(self) -> None:
        self._server.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FlakyBroker]:
    flaky = FlakyBroker(tmp_path)
    flaky.come()
    yield flaky
    flaky.go()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Presence]:
    """The presences that the orders of a command have shown; the command is in a hurry."""
    shown: list[Presence] = []

    class NotedOrder(DrainOrder):
        async def presence(self, bus: NatsBus) -> Presence:
            shown.append(await super().presence(bus))
            return shown[-1]

    monkeypatch.setattr(drain, "DrainOrder", NotedOrder)
    monkeypatch.setattr(drain, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(drain, "ORDER_SECONDS", 0.3)
    return shown


@dataclass
class BeatingWorker:
    """A decode worker that notes when it is `ordered` to end, and does not end by itself."""

    name: str = field(default_factory=lambda: worker_id_of("decode", make_life_secret()))
    ordered: asyncio.Event = field(default_factory=asyncio.Event)

    async def obey(self, message: BusMessage) -> bytes:
        self.ordered.set()
        return b'{"draining": true}'

    @property
    def beat(self) -> Heartbeat:
        is_ready = not self.ordered.is_set()
        return Heartbeat("decode", self.name, 1, "h:1", is_ready, STATE, 4096)


@asynccontextmanager
async def living(url: str, *workers: BeatingWorker) -> AsyncIterator[None]:
    """The workers answer and beat for the length of the block."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(nats_bus(NatsOptions(url, "workers")))
        await bus.connected()
        for worker in workers:
            at = SUBJECTS.all_control_of(worker.name)
            await stack.enter_async_context(bus.answering(at, worker.obey))
        await stack.enter_async_context(alongside(beat_for_ever(bus, workers)))
        yield


async def beat_for_ever(bus: NatsBus, workers: Sequence[BeatingWorker]) -> None:
    while True:
        for beat in (worker.beat for worker in workers):
            bus.offer(SUBJECTS.beat(beat.role, beat.worker_id), beat_to_bytes(beat))
        await asyncio.sleep(0.02)


def command(*line: str) -> Command:
    """The status of `ferryman …`, which runs beside."""
    return asyncio.ensure_future(asyncio.to_thread(run, list(line)))


async def goes_and_comes(broker: FlakyBroker, seen: Sequence[Presence], beside: Command) -> None:
    """The broker is away until the command has looked for its worker three times."""
    before = seen.count(Presence.UNKNOWN)
    await asyncio.to_thread(broker.go)
    await until(lambda: seen.count(Presence.UNKNOWN) >= before + 3)
    assert not beside.done()
    await asyncio.to_thread(broker.come)


async def test_a_drain_goes_on_when_the_broker_is_back(
    broker: FlakyBroker, seen: list[Presence], capsys: pytest.CaptureFixture[str]
) -> None:
    drained, other = BeatingWorker(), BeatingWorker()
    async with asyncio.timeout(FAILSAFE_SECONDS), living(broker.url, other):
        async with living(broker.url, drained):
            draining = command("drain", drained.name, "--nats", broker.url, "--json")
            await drained.ordered.wait()
            await goes_and_comes(broker, seen, draining)
            drained.ordered.clear()
            await drained.ordered.wait()  # it was asked whether it is there
            assert not draining.done()
        assert await draining == 0
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert (states[0], states[-1], states.count("ended")) == ("ordered", "ended", 1)


async def test_a_drain_ends_with_a_reason_when_the_broker_stays_away(
    broker: FlakyBroker,
    seen: list[Presence],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "UNKNOWN_SECONDS", 0.5)
    drained, other = BeatingWorker(), BeatingWorker()
    async with asyncio.timeout(FAILSAFE_SECONDS), living(broker.url, other, drained):
        draining = command("drain", drained.name, "--nats", broker.url)
        await drained.ordered.wait()
        await asyncio.to_thread(broker.go)
        assert await draining == 1
    said = capsys.readouterr()
    assert f"{drained.name} was ordered to end, but nothing was heard of it" in said.err
    assert "the broker is away" in said.err
    assert "has ended" not in said.out


async def test_who_listens_silently_in_a_worker_s_place_keeps_no_drain(
    broker: FlakyBroker,
    seen: list[Presence],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drain, "UNKNOWN_SECONDS", 0.5)
    drained, other = BeatingWorker(), BeatingWorker()

    async def keep(_message: object) -> None:
        """Says nothing."""

    async with (
        asyncio.timeout(FAILSAFE_SECONDS),
        await nats.connect(broker.url) as thief,
        living(broker.url, other),
    ):
        await thief.subscribe(SUBJECTS.all_control_of_role("decode"), cb=keep)
        async with living(broker.url, drained):
            draining = command("drain", drained.name, "--nats", broker.url)
            await drained.ordered.wait()
        assert await draining == 1
    said = capsys.readouterr()
    assert "somebody takes its orders and gives no answer of its" in said.err
    assert "has ended" not in said.out
    assert seen[-1] is Presence.UNKNOWN


async def test_a_roll_goes_on_when_the_broker_is_back(
    broker: FlakyBroker,
    seen: list[Presence],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll, "LISTEN_SECONDS", 0.3)
    workers = {worker.name: worker for worker in (BeatingWorker(), BeatingWorker())}
    async with asyncio.timeout(FAILSAFE_SECONDS), AsyncExitStack() as lives:
        of = {name: await lives.enter_async_context(AsyncExitStack()) for name in workers}
        for name, worker in workers.items():
            await of[name].enter_async_context(living(broker.url, worker))
        rolling = command("roll", "--nats", broker.url, "--json")
        for number in range(2):
            await until(lambda: any(one.ordered.is_set() for one in workers.values()))
            (name,) = [name for name, one in workers.items() if one.ordered.is_set()]
            if number == 0:
                await goes_and_comes(broker, seen, rolling)
            del workers[name]
            await of[name].aclose()
            await lives.enter_async_context(living(broker.url, BeatingWorker()))
        assert await rolling == 0
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["draining", "replaced"] * 2
