"""The bytes of a hand-off by each plane, beside a raw NIXL write and a memcpy of the same bytes.

All of them run in turn in one process, against a receiver in another, so that other load on the
machine affects all alike. A hand-off lasts from its first write to its last acknowledgement, the
writer's digests included. The receiver computes its digests meanwhile, and `verified` lasts until
it has compared the last of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out
from ferryman.cache.rank_runs import RankShares
from ferryman.errors import ConfigError, CorruptState, Unavailable
from ferryman.handoff.effects import WriterId, fence_of
from ferryman.handoff.values import Reservation, UnitDigest, WantedUnit, ranges_of
from ferryman.schedule.batch import Sampled
from ferryman.wire.codec.handoff import commit_order_to_wire
from ferryman.wire.codec.pieces import WriteHeader
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.borrowed_memories import BorrowedMemories
from ferryman.wire.handoff.grpc_plane import Sent, send_units
from ferryman.wire.handoff.host_network import ucx_device
from ferryman.wire.handoff.lent_memory import LENT_BYTES, place_of
from ferryman.wire.handoff.memory_plane import FrameStore, send_units_by_memory
from ferryman.wire.handoff.nixl_agent import nixl_agent
from ferryman.wire.handoff.nixl_library import HOST, MemoryRegion, NixlOptions, WriteRun, has_nixl
from ferryman.wire.handoff.nixl_writer import NixlWriter
from ferryman.wire.handoff.outgoing_units import OutgoingUnit
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman.wire.plane_values import GRPC, NIXL, GrpcOnly, MemoryGrant, NixlGrant, RankSlabs
from ferryman.wire.v1 import decode_pb2_grpc
from ferryman.wire.values import CommitOrder, RequestContext, Usage

UNIT_BYTES = 256 << 10
EPOCH = 1
WRITER = WriterId("bench-writer", EPOCH)
Bytes = NDArray[np.uint8]
Job = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second over several runs with the same bytes."""

    median: float
    best: float


@dataclass(frozen=True, slots=True)
class PlaneRates:
    """Rates by name: memcpy, grpc, memory, and with NIXL also raw_nixl, nixl and nixl_verified."""

    num_bytes: int
    rates: dict[str, Rate]

    def share(self, name: str, of: str) -> float:
        """The best rate of `name` as a share of the best rate of `of`."""
        return self.rates[name].best / self.rates[of].best


def plane_rates(
    num_bytes: int = 64 << 20,
    repeats: int = 7,
    *,
    unit_bytes: int = UNIT_BYTES,
    opens_nixl: bool = False,
    inside: Sequence[str] = (),
    host: str = "127.0.0.1",
) -> PlaneRates:
    """Measures gRPC, memory and a memcpy in turn, `repeats` times; NIXL too if `opens_nixl`, which
    opens ports without a lock at both ends.

    `inside` is a command that runs the receiver elsewhere, for example in another network
    namespace, where it listens on `host`. Raises CorruptState when other bytes arrive than were
    sent, and ConfigError where NIXL is wanted and not installed.
    """
    if opens_nixl and not has_nixl():
        raise ConfigError("NIXL is not installed: pip install 'ferryman[nixl]'")
    units = (max(1, num_bytes // unit_bytes), unit_bytes)
    with _site(units, opens_nixl=opens_nixl, inside=inside, host=host) as site:
        return asyncio.run(_measured(site, units, repeats))


def shares_of(unit_bytes: int) -> RankShares:
    """Units of one section each, which nobody divides."""
    section = SectionSpec("unit", 0, (unit_bytes // 4,), "float32", None)
    layout = lay_out(Kind.FULL, [section])
    return RankShares.undivided(StateManifest("bench", 1, 1, 0, (layout,)))


def agent_options(host: str) -> NixlOptions:
    """Options of an agent that others reach at `host`, like a worker's. Raises ConfigError."""
    device = ucx_device(host, os.environ)
    if isinstance(device, GrpcOnly):
        raise ConfigError(f"{host}: {device.why}; set UCX_NET_DEVICES")
    return NixlOptions(device)


async def _measured(site: _SiteAddress, units: tuple[int, int], repeats: int) -> PlaneRates:
    source = _filled(*units)
    async with channel(site.address) as connection:
        stub = decode_pb2_grpc.DecodeServiceStub(connection)
        bench = _Bench(source, units[1], site, stub)
        with closing(BorrowedMemories(SHARED_MEMORY)) as memories:
            store = await memories.of(site.lent) if site.lent else None
            lent: dict[str, Job] = {"memory": lambda: bench.by_memory(store)} if store else {}
            return await _with_nixl(bench, source, site, repeats, lent)


async def _with_nixl(
    bench: _Bench, source: Bytes, site: _SiteAddress, repeats: int, others: dict[str, Job]
) -> PlaneRates:
    if not site.grant.metadata:
        return await bench.run(repeats, others)
    region = MemoryRegion(int(source.ctypes.data), source.nbytes)
    with nixl_agent("bench-writer", [region], agent_options("127.0.0.1")) as agent:
        peer = await agent.add_peer(site.grant.metadata)
        base = int(source.ctypes.data)
        whole = WriteRun(base, site.grant.slabs.addresses[Kind.FULL][0], source.nbytes)
        writer = NixlWriter(agent, _slabs_at(base), shares_of(bench.unit_bytes))

        async def raw() -> None:
            await asyncio.wrap_future(agent.write(peer, [whole]))

        jobs: dict[str, Job] = {
            **others,
            "raw_nixl": raw,
            "nixl": lambda: bench.by_nixl(writer),
            "nixl_verified": lambda: bench.verified(writer),
        }
        return await bench.run(repeats, jobs)


class _Bench:
    """Sends the same units again and again, each time under a new reservation."""

    def __init__(
        self,
        source: Bytes,
        unit_bytes: int,
        site: _SiteAddress,
        stub: decode_pb2_grpc.DecodeServiceStub,
    ) -> None:
        self.unit_bytes = unit_bytes
        self._source, self._site, self._stub = source, site, stub
        self._target = np.zeros_like(source)
        self._round = 0
        content = memoryview(source.data)
        self._units = [
            OutgoingUnit(WantedUnit(Kind.FULL, index, 1), content[at : at + unit_bytes], index)
            for index, at in enumerate(range(0, len(content), unit_bytes))
        ]
        self._wanted = tuple(unit.unit for unit in self._units)

    async def run(self, repeats: int, jobs: dict[str, Job]) -> PlaneRates:
        everything: dict[str, Job] = {"memcpy": self._copy, "grpc": self._by_grpc, **jobs}
        seconds: dict[str, list[float]] = {name: [] for name in everything}
        for nth in range(repeats + 1):
            for name, job in everything.items():
                began = perf_counter()
                await job()
                if nth:  # the first of each connects and warms up
                    seconds[name].append(perf_counter() - began)
        size = self._source.nbytes
        rates = {
            name: Rate(size / median(found), size / min(found)) for name, found in seconds.items()
        }
        return PlaneRates(size, rates)

    async def _copy(self) -> None:
        np.copyto(self._target, self._source)

    async def _by_grpc(self) -> Sent:
        return await send_units(self._stub, self._reservation(), "bench", "digest", self._batch())

    async def by_memory(self, store: FrameStore) -> Sent:
        reservation = self._reservation()
        header = WriteHeader(fence_of(reservation), "bench", "digest")
        return await send_units_by_memory(self._stub, reservation, header, self._batch(), store)

    async def by_nixl(self, writer: NixlWriter) -> Sent:
        return await writer.send(self._site.grant, self._reservation(), self._batch())

    async def verified(self, writer: NixlWriter) -> None:
        reservation = self._reservation()
        sent = await writer.send(self._site.grant, reservation, self._batch())
        with typed_errors():
            await self._stub.Commit(commit_order_to_wire(_commit(reservation, sent.digests)))

    def _reservation(self) -> Reservation:
        self._round += 1
        return Reservation(f"bench-{self._round}", EPOCH, 1, self._wanted, 60.0)

    async def _batch(self) -> AsyncIterator[Sequence[OutgoingUnit]]:
        yield self._units


def _commit(reservation: Reservation, digests: tuple[UnitDigest, ...]) -> CommitOrder:
    return CommitOrder(
        context=RequestContext("bench", 1, 60.0),
        reservation_id=reservation.reservation_id,
        epoch=reservation.epoch,
        written=ranges_of(digest.name for digest in digests),
        digests=digests,
        first=Sampled(0, {}),
        usage=Usage(0),
    )


def _filled(num_units: int, unit_bytes: int) -> Bytes:
    content = np.arange(num_units * unit_bytes // 8, dtype=np.uint64)
    content *= np.uint64(0x9E3779B97F4A7C15)
    return content.view(np.uint8)


def _slabs_at(address: int) -> RankSlabs:
    return RankSlabs((HOST,), {Kind.FULL: (address,)})


@dataclass(frozen=True, slots=True)
class _SiteAddress:
    """The receiving process: the address on which it listens, the grant to write there, without
    metadata if it has no NIXL, and the memory that it lends, if it is on this machine."""

    address: str
    grant: NixlGrant
    lent: MemoryGrant | None


@contextmanager
def _site(
    units: tuple[int, int], *, opens_nixl: bool, inside: Sequence[str], host: str
) -> Iterator[_SiteAddress]:
    """Runs the receiving process; `inside` is put before its command, to run it elsewhere."""
    plane = NIXL if opens_nixl else GRPC
    receiver = "ferryman_bench.transport.receiver_process"
    place = place_of(SHARED_MEMORY)
    command = [*inside, sys.executable, "-m", receiver, *map(str, units), host, plane, place]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        # The receiver says where it listens once its memory is there.
        line = child.stdout.readline()
        if not line:
            raise Unavailable("the receiving process ended before it was ready")
        try:
            yield _site_address(json.loads(line), *units)
        finally:
            child.stdin.close()


def _site_address(said: dict[str, Any], num_units: int, unit_bytes: int) -> _SiteAddress:
    """The receiver's line of JSON."""
    metadata, slabs = bytes.fromhex(said["metadata"]), _slabs_at(said["base"])
    slots, layout = tuple(range(num_units)), shares_of(unit_bytes).digest
    grant = NixlGrant("bench-site", metadata, slabs, slots, layout)
    ticket = bytes.fromhex(said["ticket"])
    lent = MemoryGrant(said["socket"], ticket, LENT_BYTES) if ticket else None
    return _SiteAddress(said["address"], grant, lent)


def compare(sent: Sequence[UnitDigest], found: dict[int, bytes]) -> None:
    """Compares the digests of a commit with the receiver's. Raises CorruptState if any differs."""
    wrong = [digest.index for digest in sent if found.get(digest.index) != digest.digest]
    if wrong:
        raise CorruptState(f"other bytes than were sent: {wrong}")
