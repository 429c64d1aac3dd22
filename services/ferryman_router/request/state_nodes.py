"""The host-caches as a router reads state from them and gives state to them, for state files.

Each call is signed for one life of one host-cache. Units that are read are proved by their seals,
units that are given are verified before they are sent on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

import xxhash

from ferryman.cache.candidates import is_resume_point, point_units
from ferryman.cache.keys import PageKey, TokenIds, page_keys, root_key
from ferryman.cache.manifest import Kind, ResumeShape
from ferryman.errors import CorruptState, FerrymanError, Unavailable
from ferryman.handoff.values import UnitName, ranges_of
from ferryman.tiers.values import WorkerLife
from ferryman.wire.codec.caches import pages_from_ranges
from ferryman.wire.codec.handoff import range_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes, kind_from_wire
from ferryman.wire.codec.state_statement import DIGEST_BYTES
from ferryman.wire.grpc.rpc import Channels, ending, next_message
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.hostcache.unit_seals import NamedUnit, UnitSeals
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.signed_orders import DEPOSIT, FETCH, LOOKUP, RouterSignatures
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceStub
from ferryman_router.routing.fleet import Fleet

LOOKUP_SECONDS = 2.0
TRANSFER_SECONDS = 600.0
# The deepest resume points of a conversation that are saved; each may have a snapshot.
MAX_POINTS = 64


@dataclass(frozen=True, slots=True)
class HeldState:
    """State of the first `depth` pages of a chain that a host-cache holds, in either tier: all
    units of its deepest resume points; of 0 pages, if nobody can resume from what it holds."""

    cache: Heartbeat
    keys: Sequence[PageKey]
    depth: int
    names: Sequence[UnitName]

    @property
    def num_tokens(self) -> int:
        return self.depth * self.cache.state.page_size


def resumable_units(
    shape: ResumeShape, pages: Mapping[Kind, Set[int]], num_pages: int
) -> tuple[int, tuple[UnitName, ...]]:
    """The deepest page end whose resume set is among `pages`, 0 if there is none, and the units of
    the MAX_POINTS deepest ones, kind by kind."""
    held = {kind: pages.get(kind, frozenset[int]()) for kind in shape.kinds}
    full = held.get(Kind.FULL, range(num_pages))
    matched = next((page for page in range(num_pages) if page not in full), num_pages)
    depths = (
        depth
        for depth in range(matched, 0, -1)
        if is_resume_point(shape, depth, lambda kind, page: page in held[kind])
    )
    points = list(islice(depths, MAX_POINTS))
    units: set[UnitName] = {unit for depth in points for unit in point_units(shape, depth)}
    deepest = max(points, default=0)
    if Kind.FULL in shape.kinds:
        units |= {(Kind.FULL, page) for page in range(deepest)}
    return deepest, tuple(sorted(units))


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Bytes of one unit of so many. With the last ones come its digests: blake2b, and xxh3-128 as
    host-caches have it; both are empty before."""

    kind: Kind
    num_bytes: int
    data: bytes
    digest: bytes = b""
    xxh3: bytes = b""


@dataclass(slots=True)
class UnitHash:
    """Both digests of one unit, as its bytes come."""

    num_bytes: int
    filled: int = 0
    _blake: Any = field(default_factory=lambda: blake2b(digest_size=DIGEST_BYTES))
    _xxh3: Any = field(default_factory=xxhash.xxh3_128)

    async def add(self, kind: Kind, data: bytes) -> StatePiece:
        """The bytes as a piece, with the digests if the unit is whole. Raises CorruptState for more
        bytes than the unit has."""
        self.filled += len(data)
        if self.filled > self.num_bytes or not data:
            raise CorruptState(f"a unit of {self.num_bytes} bytes came with {self.filled}")
        # A piece of 1 MiB takes a millisecond, without the interpreter's lock.
        await asyncio.to_thread(self._blake.update, data)
        self._xxh3.update(data)
        if self.filled < self.num_bytes:
            return StatePiece(kind, self.num_bytes, data)
        digests = self._blake.digest(), self._xxh3.digest()
        return StatePiece(kind, self.num_bytes, data, *digests)


class StateNodes:
    """Calls of host-caches. Failures are FerrymanErrors."""

    def __init__(
        self, fleet: Fleet, channels: Channels, seals: UnitSeals, signatures: RouterSignatures
    ) -> None:
        self._fleet, self._channels = fleet, channels
        self._seals, self._signatures = seals, signatures

    def _stub(self, cache: Heartbeat) -> HostCacheServiceStub:
        return HostCacheServiceStub(self._channels.to(cache.address))

    async def deepest(self, token_ids: TokenIds, salt: bytes, adapter: str) -> HeldState | None:
        """The host-cache that holds most of a conversation; None if nobody can resume from any.

        Raises Unavailable if no host-cache answers: nobody knows then.
        """
        caches = [cache for cache in self._fleet.host_caches().values() if cache.state.page_size]
        asked = (self._looked_up(cache, token_ids, salt, adapter) for cache in caches)
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        if not answers:
            raise Unavailable(
                "no host-cache that keeps this model's state answers; after a start the router"
                " hears of one a moment later"
            )
        held = [state for state in answers if state.depth]
        return max(held, key=lambda state: (state.num_tokens, state.cache.node), default=None)

    async def _looked_up(
        self, cache: Heartbeat, token_ids: TokenIds, salt: bytes, adapter: str
    ) -> HeldState | None:
        """None if the host-cache does not answer."""
        keys = page_keys(root_key(cache.state, salt, adapter), token_ids, cache.state.page_size)
        asked = keys_to_bytes(keys)
        signature = self._signatures.units(LOOKUP, asked, _life(cache))
        request = pb.LookupRequest(epoch=cache.epoch, page_keys=asked, signature=signature)
        try:
            with typed_errors():
                answer = await self._stub(cache).Lookup(request, timeout=LOOKUP_SECONDS)
        except FerrymanError:  # away, or another life by now
            return None
        pages = pages_from_ranges((*answer.resident, *answer.in_storage), len(keys))
        held = {kind: frozenset(some) for kind, some in pages.items()}
        depth, names = resumable_units(cache.state.resume_shape, held, len(keys))
        return HeldState(cache, keys[:depth], depth, names)

    async def fetch(self, held: HeldState) -> AsyncGenerator[StatePiece]:
        """The units in order, each verified. They are leased there while they come. Raises
        Unavailable if some were evicted before, and CorruptState."""
        asked = keys_to_bytes(held.keys)
        request = pb.FetchRequest(
            epoch=held.cache.epoch,
            manifest_digest=held.cache.state.digest,
            page_keys=asked,
            units=[range_to_wire(span) for span in ranges_of(held.names)],
            signature=self._signatures.units(FETCH, asked, _life(held.cache)),
        )
        names, name, unit = iter(held.names), None, UnitHash(0)
        stub = self._stub(held.cache)
        with typed_errors(), ending(stub.Fetch(request, timeout=TRANSFER_SECONDS)) as frames:
            async for frame in frames:
                if unit.filled == unit.num_bytes:
                    name, unit = next(names, None), UnitHash(frame.num_bytes)
                if name != (kind_from_wire(frame.kind), frame.page_index):
                    raise Unavailable("a part of the state was evicted just now; save it again")
                self._check_seal(held, name, frame)
                piece = await unit.add(name[0], frame.data)
                if piece.xxh3 not in (b"", frame.digest):
                    raise CorruptState(f"a {name[0]} unit of {held.cache.node} is not what it was")
                yield piece
        if next(names, None) is not None or unit.filled < unit.num_bytes:
            raise Unavailable("a part of the state was evicted just now; save it again")

    def _check_seal(self, held: HeldState, name: UnitName, frame: pb.FetchResponse) -> None:
        kind, page = name
        digest, key = held.cache.state.digest, held.keys[page]
        named = NamedUnit(digest, kind, key, frame.num_bytes, frame.digest)
        self._seals.check_unit(named, frame.seal)

    async def deposit(
        self,
        cache: Heartbeat,
        keys: Sequence[PageKey],
        names: Sequence[UnitName],
        pieces: AsyncIterator[StatePiece],
    ) -> pb.DepositResponse:
        """Gives a host-cache the units of a chain; all of them count once this has returned."""
        chain = keys_to_bytes(keys)
        order = pb.DepositOrder(
            epoch=cache.epoch,
            manifest_digest=cache.state.digest,
            page_keys=chain,
            units=[range_to_wire(span) for span in ranges_of(names)],
            signature=self._signatures.units(DEPOSIT, chain, _life(cache)),
        )
        stub = self._stub(cache)
        with typed_errors(), ending(stub.Deposit(timeout=TRANSFER_SECONDS)) as call:
            await call.write(pb.DepositRequest(order=order))
            await next_message(call)
            # It reads all before it refuses any, so only one that dies ends the call early.
            with suppress(asyncio.InvalidStateError):
                async for piece in pieces:
                    part = pb.DepositPiece(data=piece.data, digest=piece.xxh3)
                    await call.write(pb.DepositRequest(piece=part))
                await call.done_writing()
            answer: pb.DepositResponse = await next_message(call)
            return answer


def _life(cache: Heartbeat) -> WorkerLife:
    return WorkerLife(cache.worker_id, cache.epoch)
