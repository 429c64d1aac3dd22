"""Two nodes as `ferryman up --nodes 2` starts them, but without a router: orders name a worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import httpx

from ferryman.cache.keys import PageKey
from ferryman.errors import Unavailable
from ferryman.runtime.life import alongside
from ferryman.wire.codec.prefill import prefill_order_to_wire, progress_from_wire
from ferryman.wire.codec.tokens import step_frame_from_wire
from ferryman.wire.nats_bus import NatsBus, NatsOptions, nats_bus
from ferryman.wire.rpc import Channels
from ferryman.wire.status import typed_errors
from ferryman.wire.subjects import Subjects
from ferryman.wire.v1 import decode_pb2, hostcache_pb2
from ferryman.wire.v1.decode_pb2_grpc import DecodeServiceStub
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.v1.prefill_pb2_grpc import PrefillServiceStub
from ferryman.wire.values import HandedOff, PrefillOrder, WorkerAddress
from ferryman_cli.child import Said
from ferryman_cli.choices import Choices
from ferryman_cli.roster import roster
from ferryman_cli.state_folder import StateFolder
from ferryman_cli.supervisor import Supervisor

ROUTER_ID = "bench"
DRAIN_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.02
ORDER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """When the first token of a request came, and what prefill said of the hand-off before it."""

    seconds: float
    done: HandedOff


class Nodes:
    """Processes by name: hostcache-1, hostcache-2, prefill-1, prefill-2, decode."""

    def __init__(self, said: Mapping[str, Said], bus: NatsBus, channels: Channels) -> None:
        self._said, self._bus, self._channels = said, bus, channels
        self._firsts: dict[str, asyncio.Future[float]] = {}

    def address(self, name: str) -> WorkerAddress:
        said = self._said[name]
        return WorkerAddress(said["worker_id"], said["address"], said["epoch"])

    async def listen(self) -> None:
        """Notes when first tokens come, for ever."""
        decode = self.address("decode")
        asked = decode_pb2.TokensRequest(router_id=ROUTER_ID, worker_epoch=decode.epoch)
        with typed_errors():
            async for message in DecodeServiceStub(self._channels.to(decode.address)).Tokens(asked):
                now = perf_counter()
                for tokens in step_frame_from_wire(message).requests:
                    first = self._firsts.pop(tokens.request_id, None)
                    if first is not None:
                        first.set_result(now)

    async def first_token(self, prefill: str, order: PrefillOrder) -> FirstToken:
        """Runs an order there. Raises what ended it, Unavailable among it."""
        stub = PrefillServiceStub(self._channels.to(self.address(prefill).address))
        request_id = order.context.request_id
        first = self._firsts[request_id] = asyncio.get_running_loop().create_future()
        began, seconds_left = perf_counter(), order.context.deadline_seconds
        with typed_errors():
            async for message in stub.Prefill(prefill_order_to_wire(order), timeout=seconds_left):
                progress = progress_from_wire(message)
                if isinstance(progress, HandedOff):
                    return FirstToken(await first - began, progress)
        raise Unavailable(f"{prefill} said nothing of a hand-off")

    async def flush(self, *names: str, payload: bytes = b"") -> None:
        """Has processes give up what they hold and nobody uses."""
        for name in names:
            subject = Subjects().control(self.address(name).worker_id, "flush")
            async with asyncio.timeout(ORDER_SECONDS):
                while not await self._obeyed(subject, payload):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)

    async def _obeyed(self, subject: str, payload: bytes) -> bool:
        """A process that has just started may not be listening yet."""
        try:
            await self._bus.request(subject, payload, timeout_seconds=ORDER_SECONDS)
        except Unavailable:
            return False
        return True

    async def stored(self, hostcache: str, keys: Sequence[PageKey]) -> None:
        """Waits until a host-cache holds all of a chain, and its storage tier too."""
        there = self.address(hostcache)
        stub = HostCacheServiceStub(self._channels.to(there.address))
        request = hostcache_pb2.LookupRequest(epoch=there.epoch, page_keys=b"".join(keys))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await stub.Lookup(request)).usable_pages < len(keys):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)  # another process stores; it tells nobody
            while not await asyncio.to_thread(self._is_settled, hostcache):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)

    def _is_settled(self, hostcache: str) -> bool:
        """Whether nothing waits to be written to storage, or is being written."""
        answer = httpx.get(f"http://{self._said[hostcache]['observe']}/metrics", timeout=10)
        gauges = dict(
            line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")
        )
        names = ("backlog_waiting", "storage_in_flight", "storage_leases")
        return not any(float(gauges[f"ferryman_hostcache_{name}"]) for name in names)


@asynccontextmanager
async def two_nodes(choices: Choices, folder: Path) -> AsyncIterator[Nodes]:
    """Ready for the length of a block; logs are in the folder."""
    state = StateFolder(folder)
    jobs = roster(choices, state)
    supervisor = Supervisor(state, os.environ, say=_say_nothing)
    try:
        await supervisor.start(jobs.servers)
        said = await supervisor.start(job for job in jobs.services if job.name != "router")
        bus_options = NatsOptions(jobs.nats_url, "bench")
        async with nats_bus(bus_options) as bus, Channels() as channels:
            await bus.connected()
            nodes = Nodes(said, bus, channels)
            async with alongside(nodes.listen()):
                yield nodes
    finally:
        await supervisor.drain(DRAIN_SECONDS)


def _say_nothing(_line: str) -> None:
    """Whatever dies shows up as an error of what was asked of it."""
