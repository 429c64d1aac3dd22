"""Units that a router brings, from a state file: reserve → write → verify → commit, as a worker
stores its own.

All units become visible at once, after the last one was verified. A call that breaks, is late or
brings other bytes leaves nothing behind: its room is given back, since nobody else writes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import xxhash

from ferryman.cache.keys import PageKey
from ferryman.errors import CorruptState, InvalidRequest, ManifestMismatch, QueueFull, Unavailable
from ferryman.tiers.unit_group import by_kind
from ferryman.tiers.values import ReserveRequest, UnitName
from ferryman.wire.grpc.rpc import NO_TAGS
from ferryman_hostcache.fetches import check_kinds
from ferryman_hostcache.host import HostCache

MAX_DEPOSITS = 2


@dataclass(frozen=True, slots=True)
class UnitPiece:
    """The next bytes of the current unit; `digest` is the whole unit's, with its last piece."""

    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Deposited:
    """The prefix, in pages, that the host tier can give now, and the units that were stored."""

    usable_pages: int
    stored_units: int


class Deposit:
    """Room for the units of one chain that are not here; `names` are all that will come."""

    def __init__(
        self,
        host: HostCache,
        lease_id: str,
        keys: Sequence[PageKey],
        names: Sequence[UnitName],
        rooms: Mapping[UnitName, memoryview],
    ) -> None:
        self._host, self._lease_id = host, lease_id
        self._keys, self._names, self._rooms = keys, names, rooms

    async def take(self, pieces: AsyncIterator[UnitPiece]) -> Deposited:
        """Reads all units, in the order of their names; writes and commits those with room.

        Raises InvalidRequest for pieces that do not fit, CorruptState for other bytes than the
        digest's, and LeaseLost.
        """
        slot_bytes, num_stored = self._host.store.layout.slot_bytes, 0
        digests: dict[UnitName, bytes] = {}
        for name in self._names:
            room = self._rooms.get(name)
            digest = await _taken(slot_bytes(name[0]), room, pieces)
            if room is not None:
                digests[name] = digest
        if digests:
            num_stored = self._host.commit(self._lease_id, digests)
        return Deposited(self._host.store.usable_pages(self._keys), num_stored)


async def _taken(
    num_bytes: int, room: memoryview | None, pieces: AsyncIterator[UnitPiece]
) -> bytes:
    """Copies one unit to its room, if it has any; its digest, which the copy has."""
    filled = 0
    async for piece in pieces:
        end = filled + len(piece.data)
        if not piece.data or end > num_bytes or bool(piece.digest) != (end == num_bytes):
            raise InvalidRequest(f"a unit has {num_bytes} bytes, not {end}", "piece")
        if room is not None:
            # numpy releases the GIL while it copies; a memoryview does not.
            copied = np.frombuffer(room[filled:end], np.uint8)
            np.copyto(copied, np.frombuffer(piece.data, np.uint8))
        filled = end
        if filled == num_bytes:
            if room is not None and await _digest(room) != piece.digest:
                raise CorruptState("a deposited unit does not have its digest")
            return piece.digest
    raise InvalidRequest("the stream ended before all units had come", "piece")


async def _digest(room: memoryview) -> bytes:
    return await asyncio.to_thread(xxhash.xxh3_128_digest, room)


class Deposits:
    """Takes units from routers, at most `max_running` chains at once."""

    def __init__(
        self, host: HostCache, *, max_running: int = MAX_DEPOSITS, clock: Callable[[], float]
    ) -> None:
        self._host, self._max_running, self._clock = host, max_running, clock
        self._numbers = count(1)
        self._leases: set[str] = set()

    def __len__(self) -> int:
        return len(self._leases)

    @contextmanager
    def begun(
        self, manifest_digest: str, keys: Sequence[PageKey], names: Sequence[UnitName]
    ) -> Iterator[Deposit]:
        """A deposit for the length of a block; room that was not committed is free after it.

        Raises ManifestMismatch, Stale before a worker has attached, QueueFull, InvalidRequest for
        a kind that the model does not have, and Unavailable for a chain whose state gave no finite
        numbers here a while ago.
        """
        host, store = self._host, self._host.store
        if store.manifest.digest != manifest_digest:
            lines = (f"digest: {store.manifest.digest} here, {manifest_digest} there",)
            raise ManifestMismatch(lines)
        check_kinds((kind for kind, _ in names), store.manifest)
        if not keys:
            raise InvalidRequest("a deposit names the keys of its pages", "page_keys")
        if host.is_distrusted(keys[0]):
            raise Unavailable("state of this beginning gave no finite numbers here a while ago")
        if len(self) >= self._max_running:
            raise QueueFull(f"{self._max_running} deposits are under way")
        lease_id = f"deposit.{host.identity.epoch:x}.{next(self._numbers)}"
        self._leases.add(lease_id)
        try:
            ask = ReserveRequest(lease_id, host.life, keys, by_kind(names))
            view = host.arena.view
            room = {
                (unit.kind, unit.page_index): view(unit.offset, unit.num_bytes)
                for unit in host.reserve(ask, NO_TAGS)
            }
            yield Deposit(host, lease_id, keys, names, room)
        finally:
            self._leases.discard(lease_id)
            host.release((lease_id,))

    def tick(self) -> None:
        """Prolongs the leases of running deposits."""
        self._host.store.renew(self._leases, self._clock())
