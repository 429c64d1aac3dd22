"""Two nodes as `ferryman up --nodes 2` starts them, but without a router: orders name a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from urllib.request import urlopen

from ferryman.cache.keys import PageKey
from ferryman.errors import Unavailable
from ferryman.runtime.life import alongside
from ferryman.settings.cluster import UpOptions
from ferryman.wire.codec.prefill import prefill_order_to_wire, progress_from_wire
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.v1 import decode_pb2, hostcache_pb2
from ferryman.wire.v1.decode_pb2_grpc import DecodeServiceStub
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman.wire.v1.prefill_pb2_grpc import PrefillServiceStub
from ferryman.wire.values import PrefillHandedOff, PrefillOrder, WorkerAddress
from ferryman_bench.bench_cluster import running_jobs
from ferryman_launcher.readiness import ReadyEvent

ROUTER_ID = "bench"
STORE_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.02
FLUSH_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time of a request's first token, and prefill's report on the hand-off before it."""

    seconds: float
    done: PrefillHandedOff


class Nodes:
    """Processes by name: hostcache-1, hostcache-2, prefill-1, prefill-2, decode."""

    def __init__(self, said: Mapping[str, ReadyEvent], bus: NatsBus, channels: Channels) -> None:
        self._said, self._bus, self._channels = said, bus, channels
        self._firsts: dict[str, asyncio.Future[float]] = {}

    def address(self, name: str) -> WorkerAddress:
        said = self._said[name]
        return WorkerAddress(said["worker_id"], said["address"], said["epoch"])

    async def listen(self) -> None:
        """Notes the time of each first token, until it is cancelled."""
        decode = self.address("decode")
        asked = decode_pb2.TokensRequest(router_id=ROUTER_ID, worker_epoch=decode.epoch)
        with typed_errors():
            async for message in DecodeServiceStub(self._channels.to(decode.address)).Tokens(asked):
                now = perf_counter()
                for tokens in message.requests:
                    first = self._firsts.pop(tokens.request_id, None)
                    if first is not None:
                        first.set_result(now)

    async def first_token(self, prefill: str, order: PrefillOrder) -> FirstToken:
        """Runs an order on a prefill worker. Raises the error that ended it, or Unavailable."""
        stub = PrefillServiceStub(self._channels.to(self.address(prefill).address))
        request_id = order.context.request_id
        first = self._firsts[request_id] = asyncio.get_running_loop().create_future()
        began, seconds_left = perf_counter(), order.context.deadline_seconds
        with typed_errors():
            async for message in stub.Prefill(prefill_order_to_wire(order), timeout=seconds_left):
                progress = progress_from_wire(message)
                if isinstance(progress, PrefillHandedOff):
                    return FirstToken(await first - began, progress)
        raise Unavailable(f"{prefill} said nothing of a hand-off")

    async def flush(self, *names: str, payload: bytes = b"") -> None:
        """Makes processes give up all units that are not in use."""
        for name in names:
            subject = Subjects().control(self.address(name).worker_id, "flush")
            async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                while not await self._try_flush(subject, payload):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)

    async def _try_flush(self, subject: str, payload: bytes) -> bool:
        """Sends one flush; False if the process, just started, does not listen yet."""
        try:
            await self._bus.request(subject, payload, timeout_seconds=FLUSH_TIMEOUT_SECONDS)
        except Unavailable:
            return False
        return True

    async def stored(self, hostcache: str, keys: Sequence[PageKey]) -> None:
        """Waits until a host-cache holds a whole chain, in its storage tier too."""
        there = self.address(hostcache)
        stub = HostCacheServiceStub(self._channels.to(there.address))
        request = hostcache_pb2.LookupRequest(epoch=there.epoch, page_keys=b"".join(keys))
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            while (await stub.Lookup(request)).usable_pages < len(keys):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)  # another process stores, and sends no event
            while not await asyncio.to_thread(self._is_settled, hostcache):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    def _is_settled(self, hostcache: str) -> bool:
        """Whether no unit waits for storage or is being written to it."""
        with urlopen(f"http://{self._said[hostcache]['observe']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        gauges = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("backlog_waiting", "storage_in_flight", "storage_leases")
        return not any(float(gauges[f"ferryman_hostcache_{name}"]) for name in names)


@asynccontextmanager
async def two_nodes(choices: UpOptions, folder: Path) -> AsyncIterator[Nodes]:
    """Runs two nodes for the length of a block, ready at its start; logs are in `folder`."""
    async with running_jobs(choices, folder, without=("router",)) as jobs:
        bus_options = NatsOptions(jobs.nats_url, "bench")
        async with nats_bus(bus_options) as bus, Channels() as channels:
            await bus.connected()
            nodes = Nodes(jobs.said, bus, channels)
            async with alongside(nodes.listen()):
                yield nodes
