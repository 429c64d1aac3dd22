"""The receiving process of `planes.py`: a slab, decode's data-plane rpcs, and for the plane nixl
an agent that listens.

`python -m ferryman_bench.transport.receiver_process UNITS UNIT_BYTES HOST PLANE PLACE` writes its
addresses as one line of JSON, and ends with its standard input. It lends memory to a writer at its
own place.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import xxhash

from ferryman.cache.manifest import Kind
from ferryman.handoff.effects import WriteFence
from ferryman.handoff.values import WantedUnit, units_of
from ferryman.ids import make_epoch
from ferryman.runtime.background import Background
from ferryman.runtime.life import alongside
from ferryman.wire.codec.handoff import digest_from_wire
from ferryman.wire.codec.pieces import Piece, WriteHeader
from ferryman.wire.grpc.rpc import listening
from ferryman.wire.handoff.grpc_plane import receive_pages
from ferryman.wire.handoff.lent_memory import socket_name
from ferryman.wire.handoff.memory_lender import MemoryLender
from ferryman.wire.handoff.memory_plane import receive_landed
from ferryman.wire.handoff.nixl_agent import NixlAgent, nixl_agent
from ferryman.wire.handoff.nixl_library import MemoryRegion
from ferryman.wire.handoff.nixl_writer import landed_from_bytes
from ferryman.wire.hostcache.arena import SHARED_MEMORY
from ferryman.wire.plane_values import NIXL, GrpcOnly, MemoryGrant, MemoryOffer
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman_bench.transport.planes import WRITER, agent_options, compare


class ReceiverSite(decode_pb2_grpc.DecodeServiceServicer):
    """Receives pages, computes digests of landed units, and compares them with a commit's."""

    def __init__(self, num_units: int, unit_bytes: int, lender: MemoryLender) -> None:
        self._unit_bytes, self._lender = unit_bytes, lender
        self.slab = np.zeros(num_units * unit_bytes, np.uint8)
        self._content = memoryview(self.slab.data)
        self._digests: dict[str, dict[int, bytes]] = {}
        self._hashers: dict[int, xxhash.xxh3_128] = {}
        self._pending: list[asyncio.Task[None]] = []

    def begin(self, header: WriteHeader) -> None:
        """Accepts every writer."""

    def write(self, fence: WriteFence, piece: Piece) -> None:
        at = piece.unit.index * self._unit_bytes + piece.offset
        landed = self._content[at : at + len(piece.content)]
        landed[:] = piece.content
        if piece.offset == 0:
            self._hashers[piece.unit.index] = xxhash.xxh3_128()
        # As decode does: a whole slot would be hashed when it is not near the processor any more.
        self._hashers[piece.unit.index].update(landed)

    def finish(self, fence: WriteFence, unit: WantedUnit) -> None:
        self._hashers.pop(unit.index).digest()

    def _digest(self, index: int) -> bytes:
        at = index * self._unit_bytes
        return xxhash.xxh3_128_digest(self._content[at : at + self._unit_bytes])

    async def WritePages(
        self, requests: AsyncIterator[decode_pb2.WritePagesRequest], context: Any
    ) -> decode_pb2.WritePagesResponse:
        num_bytes = await receive_pages(requests, {Kind.FULL: self._unit_bytes}, self)
        return decode_pb2.WritePagesResponse(bytes_received=num_bytes)

    async def LandPages(
        self, requests: AsyncIterator[decode_pb2.LandPagesRequest], context: Any
    ) -> AsyncIterator[decode_pb2.LandPagesResponse]:
        sizes = {Kind.FULL: self._unit_bytes}
        async for num_bytes in receive_landed(requests, sizes, self, self._lender.memory_of):
            yield decode_pb2.LandPagesResponse(bytes_received=num_bytes)

    async def Commit(
        self, request: decode_pb2.CommitRequest, context: Any
    ) -> decode_pb2.CommitResponse:
        while self._pending:
            await self._pending.pop()
        found = self._digests.pop(request.reservation_id, {})
        sent = [digest_from_wire(digest) for digest in request.digests]
        await self._examine(found, [each.index for each in sent if each.index not in found])
        compare(sent, found)
        return decode_pb2.CommitResponse()

    async def receive_notifications(self, agent: NixlAgent) -> None:
        """Computes digests of landed units while the rest is on its way."""
        with agent.listening():
            while True:
                for message in await agent.notifications():
                    fence, ranges = landed_from_bytes(message)
                    found = self._digests.setdefault(fence.reservation_id, {})
                    units = [index for _, index in units_of(ranges)]
                    self._pending.append(asyncio.create_task(self._examine(found, units)))
                while len(self._digests) > 2:  # of commits that never come
                    self._digests.pop(next(iter(self._digests)))

    async def _examine(self, found: dict[int, bytes], units: list[int]) -> None:
        digests = await asyncio.to_thread(lambda: [self._digest(index) for index in units])
        found.update(zip(units, digests, strict=True))

    def register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)


async def serve(num_units: int, unit_bytes: int, host: str, plane: str, place: str) -> None:
    async with Background() as background:
        name = socket_name("bench", make_epoch())
        lender = MemoryLender(SHARED_MEMORY, name, background)
        async with alongside(lender.run()):
            await lender.listens()
            site = ReceiverSite(num_units, unit_bytes, lender)
            await _serve(site, host, plane, lender.grant(WRITER, MemoryOffer(place)))


async def _serve(site: ReceiverSite, host: str, plane: str, lent: MemoryGrant | GrpcOnly) -> None:
    where = {"metadata": "", "socket": "", "ticket": ""}
    if isinstance(lent, MemoryGrant):
        where.update(socket=lent.socket, ticket=lent.ticket.hex())
    base = int(site.slab.ctypes.data)
    with ExitStack() as stack:
        jobs = []
        if plane == NIXL:
            region = MemoryRegion(base, site.slab.nbytes)
            agent = stack.enter_context(nixl_agent("bench-site", [region], agent_options(host)))
            where["metadata"] = agent.metadata.hex()
            jobs.append(site.receive_notifications(agent))
        async with listening(f"{host}:0", site.register, grace=0) as server, alongside(*jobs):
            said = {**where, "address": f"{host}:{server.port}", "base": base}
            print(json.dumps(said), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
