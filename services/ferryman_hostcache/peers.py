"""Other nodes' host-caches: looks up their units of a chain and fetches them.

A peer that is away, slow, or in another life is a miss, and so is one without the cluster's key,
which cannot seal its answers. A unit's seal is checked before its first byte is taken, and its
bytes are checked against the sealed digest before it counts; a unit arrives as a whole or not at
all.

An answer's tag covers the caller's random challenge, because another process may listen at the
address in the index. A unit's tag covers the unit's identity.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import CorruptState
from ferryman.handoff.values import ranges_of
from ferryman.security.cluster_key import ClusterKey, Purpose
from ferryman.tiers.values import UnitName
from ferryman.wire.codec.caches import pages_from_ranges
from ferryman.wire.codec.handoff import range_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes, kind_from_wire
from ferryman.wire.grpc.rpc import CallTags, Channels, ending
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.hostcache.attachment import context_of
from ferryman.wire.hostcache.unit_seals import NamedUnit, NotOfThisCluster, UnitSeals
from ferryman.wire.redis.index import NodeLife
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub

CHALLENGE_BYTES = 16


class PeerSeals(UnitSeals):
    """Makes tags for other nodes, and checks theirs, of answers too."""

    def __init__(self, key: ClusterKey) -> None:
        super().__init__(key)
        self._answers = key.subkey(Purpose.PEER_ANSWER)

    def seal_answer(
        self, answer: pb.LookupResponse, request: pb.LookupRequest, node: NodeLife
    ) -> None:
        """Adds the proof that `node` gives this answer to this request."""
        answer.proof = self._answers.tag(*_said(answer, request, node))

    def check_answer(
        self, answer: pb.LookupResponse, request: pb.LookupRequest, node: NodeLife
    ) -> None:
        """Raises NotOfThisCluster unless `node` gave this answer to this request."""
        if not self._answers.verifies(answer.proof, *_said(answer, request, node)):
            raise NotOfThisCluster(f"who answers for {node.node_id} is not of this cluster")


def _said(
    answer: pb.LookupResponse, request: pb.LookupRequest, node: NodeLife
) -> tuple[bytes, ...]:
    """The tagged parts of an answer. The last key stands for the whole chain of the request."""
    ranges = (
        " ".join(f"{span.kind}:{span.first_page}:{span.end_page}" for span in held)
        for held in (answer.resident, answer.in_storage)
    )
    words = f"{node.owner}|{answer.usable_pages}|{'|'.join(ranges)}"
    return request.challenge, request.page_keys[-16:], words.encode()


class FetchSink(Protocol):
    """Receives the results of a fetch, unit by unit."""

    def on_unit(self, name: UnitName, digest: bytes) -> None:
        """All bytes are in their place, and have this digest."""
        ...

    def on_corrupt(self, name: UnitName) -> None:
        """The received bytes are not the stored ones; the contents of the room are invalid."""
        ...


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Units of one chain, and the memory for the bytes of each: a view of exactly its size."""

    manifest_digest: str
    keys: Sequence[PageKey]
    rooms: Mapping[UnitName, memoryview]


class PeerClient:
    """Asks other host-caches, and copies the frames that they stream. Every call raises
    FerrymanError if the peer does not answer."""

    def __init__(self, channels: Channels, seals: PeerSeals, *, lookup_seconds: float) -> None:
        self._channels, self._seals, self._lookup_seconds = channels, seals, lookup_seconds

    def _stub(self, node: NodeLife) -> HostCacheServiceStub:
        return HostCacheServiceStub(self._channels.to(node.address))

    async def lookup(self, node: NodeLife, keys: Sequence[PageKey]) -> Mapping[Kind, list[int]]:
        """Pages of the chain that the peer holds in any tier, by kind."""
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        asked = keys_to_bytes(keys)
        request = pb.LookupRequest(epoch=node.epoch, page_keys=asked, challenge=challenge)
        with typed_errors():
            answer = await self._stub(node).Lookup(request, timeout=self._lookup_seconds)
        self._seals.check_answer(answer, request, node)
        held = (*answer.resident, *answer.in_storage)
        return pages_from_ranges(held, len(keys))

    async def fetch(
        self, node: NodeLife, order: FetchOrder, arrivals: FetchSink, *, tags: CallTags
    ) -> None:
        """Fetches the units of the order that the peer holds; `arrivals` gets each unit.

        Once this has ended, also by an error, nothing writes into the rooms any more.
        """
        request = pb.FetchRequest(
            epoch=node.epoch,
            context=context_of(tags),
            manifest_digest=order.manifest_digest,
            page_keys=keys_to_bytes(order.keys),
            units=[range_to_wire(span) for span in ranges_of(order.rooms)],
        )
        intake = _Intake(order, self._seals, arrivals)
        with typed_errors(), ending(self._stub(node).Fetch(request)) as frames:
            async for frame in frames:
                await intake.take(frame)


class _Intake:
    """Copies frames to their places. The frames of a unit come in order and without others between
    them."""

    def __init__(self, order: FetchOrder, seals: PeerSeals, arrivals: FetchSink) -> None:
        self._order, self._seals, self._arrivals = order, seals, arrivals
        self._filled: dict[UnitName, int] = {}

    async def take(self, frame: pb.FetchResponse) -> None:
        """Raises NotOfThisCluster, or CorruptState for a frame that was not ordered."""
        name = kind_from_wire(frame.kind), frame.page_index
        room, filled = self._order.rooms.get(name), self._filled.get(name, 0)
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
        # Each frame repeats the digest, so the seal must match each of them.
        kind, page = name
        digest = self._order.manifest_digest
        named = NamedUnit(digest, kind, self._order.keys[page], len(room), frame.digest)
        self._seals.check_unit(named, frame.seal)
        # numpy releases the GIL while it copies; a memoryview does not.
        np.copyto(np.frombuffer(room[filled:end], np.uint8), np.frombuffer(frame.data, np.uint8))
        self._filled[name] = end
        if end < len(room):
            return
        if await asyncio.to_thread(xxhash.xxh3_128_digest, room) != frame.digest:
            self._arrivals.on_corrupt(name)
        else:
            self._arrivals.on_unit(name, frame.digest)
