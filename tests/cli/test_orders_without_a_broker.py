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


@dataclass
class NotedOrders:
    """The orders of a command: how many were answered, and the presences that they have shown."""

    num_answered: int = 0
    presences: list[Presence] = field(default_factory=list)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> NotedOrders:
    """Those of a command that is in a hurry."""
    noted = NotedOrders()

    class NotedOrder(DrainOrder):
        async def give(self, bus: NatsBus) -> None:
            await super().give(bus)
            noted.num_answered += 1

        async def presence(self, bus: NatsBus) -> Presence:
            noted.presences.append(await super().presence(bus))
            return noted.presences[-1]

    monkeypatch.setattr(drain, "DrainOrder", NotedOrder)
    monkeypatch.setattr(drain, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(drain, "ORDER_SECONDS", 0.3)
    return noted


@pytest.fixture
def hasty(orders: NotedOrders, monkeypatch: pytest.MonkeyPatch) -> NotedOrders:
    """The orders of a command that gives up soon when it hears nothing."""
    monkeypatch.setattr(drain, "UNKNOWN_SECONDS", 0.5)
    return orders


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


async def goes_and_comes(broker: FlakyBroker, orders: NotedOrders, beside: Command) -> None:
    """The broker is away until the command has looked for its worker three times. It goes when the
    order was answered: one whose answer is lost has failed."""
    await until(lambda: bool(orders.num_answered))
    before = orders.presences.count(Presence.UNKNOWN)
    await asyncio.to_thread(broker.go)
    await until(lambda: orders.presences.count(Presence.UNKNOWN) >= before + 3)
    assert not beside.done()
    await asyncio.to_thread(broker.come)


async def test_a_drain_goes_on_when_the_broker_is_back(
    broker: FlakyBroker, orders: NotedOrders, capsys: pytest.CaptureFixture[str]
) -> None:
    drained, other = BeatingWorker(), BeatingWorker()
    async with asyncio.timeout(FAILSAFE_SECONDS), living(broker.url, other):
        async with living(broker.url, drained):
            draining = command("drain", drained.name, "--nats", broker.url, "--json")
            await drained.ordered.wait()
            await goes_and_comes(broker, orders, draining)
            # It beats again, or is asked again: which of them comes first is a matter of time.
            assert not draining.done()
        assert await draining == 0
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert (states[0], states[-1], states.count("ended")) == ("ordered", "ended", 1)


async def test_a_drain_ends_with_a_reason_when_the_broker_stays_away(
    broker: FlakyBroker, hasty: NotedOrders, capsys: pytest.CaptureFixture[str]
) -> None:
    drained, other = BeatingWorker(), BeatingWorker()
    async with asyncio.timeout(FAILSAFE_SECONDS), living(broker.url, other, drained):
        draining = command("drain", drained.name, "--nats", broker.url)
        await until(lambda: bool(hasty.num_answered))
        await asyncio.to_thread(broker.go)
        assert await draining == 1
    said = capsys.readouterr()
    assert f"{drained.name} was ordered to end, but nothing was heard of it" in said.err
    assert "the broker is away" in said.err
    assert "has ended" not in said.out


async def test_who_listens_silently_in_a_worker_s_place_keeps_no_drain(
    broker: FlakyBroker, hasty: NotedOrders, capsys: pytest.CaptureFixture[str]
) -> None:
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
            await until(lambda: bool(hasty.num_answered))
        assert await draining == 1
    said = capsys.readouterr()
    assert "somebody takes its orders and gives no answer of its" in said.err
    assert "has ended" not in said.out
    assert hasty.presences[-1] is Presence.UNKNOWN


async def test_a_roll_goes_on_when_the_broker_is_back(
    broker: FlakyBroker,
    orders: NotedOrders,
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
                await goes_and_comes(broker, orders, rolling)
            del workers[name]
            await of[name].aclose()
            await lives.enter_async_context(living(broker.url, BeatingWorker()))
        assert await rolling == 0
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["draining", "replaced"] * 2
