"""Other nodes' host-caches: what they hold of a chain, and how its bytes come over here.

A peer that is away, slow, or in another life is a miss. What came is checked against its digest
before it counts; a unit comes as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState
from ferryman.tiers.room import by_kind
from ferryman.tiers.values import UnitName
from ferryman.wire.codec.ranges import pages_from_ranges, ranges_of
from ferryman.wire.codec.scalars import keys_to_bytes, kind_from_wire
from ferryman.wire.host_attachment import context_of
from ferryman.wire.index import NodeLife
from ferryman.wire.rpc import CallTags, Channels, ending
from ferryman.wire.status import typed_errors
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub


class Arrivals(Protocol):
    """Hears of units that came over here."""

    def arrived(self, name: UnitName, digest: bytes) -> None:
        """All bytes are where they belong, and have this digest."""
        ...

    def corrupt(self, name: UnitName) -> None:
        """What came is not what was stored; the room holds nothing of worth."""
        ...


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Units of one chain, and where the bytes of each go: a view of just its size."""

    manifest_digest: str
    keys: Sequence[PageKey]
    rooms: Mapping[UnitName, memoryview]


class PeerPlane(Protocol):
    """A way to other host-caches. All of it raises FerrymanError where the peer does not answer."""

    async def lookup(self, node: NodeLife, keys: Sequence[PageKey]) -> Mapping[Kind, list[int]]:
        """Pages of the chain that the peer holds in any tier, by kind."""
        ...

    async def fetch(
        self, node: NodeLife, order: FetchOrder, arrivals: Arrivals, *, tags: CallTags
    ) -> None:
        """Brings what the peer holds of the order; `arrivals` hears of each unit.

        Nothing writes into the rooms any more once this has ended, however it ended.
        """
        ...


class GrpcPeers:
    """The portable plane: frames of a stream, copied by the event loop."""

    def __init__(self, channels: Channels, *, lookup_seconds: float) -> None:
        self._channels, self._lookup_seconds = channels, lookup_seconds

    def _stub(self, node: NodeLife) -> HostCacheServiceStub:
        return HostCacheServiceStub(self._channels.to(node.address))

    async def lookup(self, node: NodeLife, keys: Sequence[PageKey]) -> Mapping[Kind, list[int]]:
        request = pb.LookupRequest(epoch=node.epoch, page_keys=keys_to_bytes(keys))
        with typed_errors():
            answer = await self._stub(node).Lookup(request, timeout=self._lookup_seconds)
        held = (*answer.resident, *answer.in_storage)
        return pages_from_ranges(held, len(keys))

    async def fetch(
        self, node: NodeLife, order: FetchOrder, arrivals: Arrivals, *, tags: CallTags
    ) -> None:
        request = pb.FetchRequest(
            epoch=node.epoch,
            context=context_of(tags),
            manifest_digest=order.manifest_digest,
            page_keys=keys_to_bytes(order.keys),
            units=[
                each
                for kind, pages in by_kind(order.rooms).items()
                for each in ranges_of(kind, pages)
            ],
        )
        intake = _Intake(order.rooms, arrivals)
        with typed_errors(), ending(self._stub(node).Fetch(request)) as frames:
            async for frame in frames:
                await intake.take(frame)


class _Intake:
    """Puts frames where they belong. The frames of a unit come in order and follow each other."""

    def __init__(self, rooms: Mapping[UnitName, memoryview], arrivals: Arrivals) -> None:
        self._rooms, self._arrivals = rooms, arrivals
        self._filled: dict[UnitName, int] = {}

    async def take(self, frame: pb.FetchResponse) -> None:
        name = kind_from_wire(frame.kind), frame.page_index
        room, filled = self._rooms.get(name), self._filled.get(name, 0)
        end = frame.offset + len(frame.data)
        if (
            room is None
            or frame.num_bytes != len(room)
            or frame.offset != filled
            or end > len(room)
        ):
            raise CorruptState(
                f"a peer sent a frame that nobody asked for: {name} at {frame.offset}"
            )
        # numpy lets other threads run while it copies; a memoryview does not.
        np.copyto(np.frombuffer(room[filled:end], np.uint8), np.frombuffer(frame.data, np.uint8))
        self._filled[name] = end
        if end < len(room):
            return
        if await asyncio.to_thread(xxhash.xxh3_128_digest, room) != frame.digest:
            self._arrivals.corrupt(name)
        else:
            self._arrivals.arrived(name, frame.digest)
