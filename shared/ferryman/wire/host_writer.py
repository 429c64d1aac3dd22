"""Storing: what a worker has computed goes into the arena, off the event loop, group by group.

Reserve → copy with digest → Commit. Room is given back only when no thread may still write there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.errors import FerrymanError, Unavailable
from ferryman.wire.codec.scalars import keys_to_bytes, kind_from_wire, kind_to_wire
from ferryman.wire.host_attachment import HostAttachment, HostCacheOptions, Link, context_of
from ferryman.wire.rpc import CallTags
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class UnitSource:
    """One unit to be stored. `copy` brings its bytes into a view of just its size and says their
    xxh3-128; it runs on a thread of its own and may be called never or once."""

    kind: Kind
    page_index: int
    copy: Callable[[memoryview], bytes]


def source_of(kind: Kind, page_index: int, content: bytes | memoryview) -> UnitSource:
    """A unit whose bytes are at hand."""
    return UnitSource(kind, page_index, partial(_copy_bytes, content))


def _copy_bytes(content: bytes | memoryview, room: memoryview) -> bytes:
    # numpy lets other threads run while it copies; a memoryview does not.
    np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(content, np.uint8))
    return xxhash.xxh3_128_digest(room)


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counts since the start. A store is skipped when nothing of it was wanted."""

    num_stores: int
    num_stored_units: int
    num_skipped: int
    num_dropped: int
    num_failed: int


class HostWriter:
    """The storing half of a client."""

    def __init__(self, attachment: HostAttachment, options: HostCacheOptions) -> None:
        self._attachment, self._options = attachment, options
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="host-store")
        self._closing = threading.Event()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._stores = self._stored_units = 0
        self._skipped = self._dropped = self._failed = 0

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags,
    ) -> int | None:
        """Writes those units of the chain `keys` that the host tier lacks; how many became visible.
        None when it failed or was not tried.

        Stores run one after the other, in the order of the calls: a later one may stand on an
        earlier. Offer whole chains where they are at hand; what is there already costs nothing.
        """
        if self._attachment.link is None or self._num_waiting >= self._options.max_stores:
            self._dropped += 1
            return None
        self._num_waiting += 1
        try:
            async with self._turn:
                if link := self._attachment.link:
                    return await self._store(link, keys, units, tags)
                self._dropped += 1
                return None
        finally:
            self._num_waiting -= 1

    async def _store(
        self, link: Link, keys: Sequence[PageKey], units: Sequence[UnitSource], tags: CallTags
    ) -> int | None:
        lease_id = self._attachment.new_lease_id()
        copying: list[Future[None]] = []
        is_over = False
        try:
            room = await self._reserve(link, lease_id, keys, units, tags)
            if not room:
                is_over, self._skipped = True, self._skipped + 1
                return 0
            self._attachment.hold(lease_id, link)
            digests = await self._copied(link, units, room, copying)
            stored = await self._commit(link, lease_id, digests)
            is_over = True
        except FerrymanError:
            self._failed += 1
            return None
        finally:
            if is_over:
                self._attachment.forget(lease_id)
            else:
                self._abandon(lease_id, link, copying)
        self._stores, self._stored_units = self._stores + 1, self._stored_units + stored
        return stored

    async def _reserve(
        self,
        link: Link,
        lease_id: str,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        tags: CallTags,
    ) -> Sequence[pb.ReservedUnit]:
        request = pb.HostCacheServiceReserveRequest(
            epoch=link.epoch,
            worker_id=self._options.worker_id,
            context=context_of(tags),
            page_keys=keys_to_bytes(keys),
            units=_ranges(units),
            lease_id=lease_id,
        )
        answer = await self._attachment.call(self._attachment.stub.Reserve, request, link)
        check_room(answer.units, units, arena_bytes=link.arena.memory.nbytes)
        return tuple(answer.units)

    async def _copied(
        self,
        link: Link,
        units: Sequence[UnitSource],
        room: Sequence[pb.ReservedUnit],
        copying: list[Future[None]],
    ) -> Mapping[tuple[Kind, int], bytes]:
        """Copies off the loop. `copying` tells whoever cleans up when nobody writes any more."""
        digests: dict[tuple[Kind, int], bytes] = {}
        stop = threading.Event()
        job = partial(self._copy_all, link.arena.memory[:], units, room, digests, stop)
        copying.append(self._copier.submit(job))
        try:
            await asyncio.shield(asyncio.wrap_future(copying[0]))
        finally:
            stop.set()
        return digests

    def _copy_all(
        self,
        arena: memoryview,
        units: Sequence[UnitSource],
        room: Sequence[pb.ReservedUnit],
        digests: dict[tuple[Kind, int], bytes],
        stop: threading.Event,
    ) -> None:
        sources = {(unit.kind, unit.page_index): unit for unit in units}
        for unit in room:
            if stop.is_set() or self._closing.is_set():
                return
            name = kind_from_wire(unit.kind), unit.page_index
            digests[name] = sources[name].copy(arena[unit.offset : unit.offset + unit.num_bytes])

    async def _commit(
        self, link: Link, lease_id: str, digests: Mapping[tuple[Kind, int], bytes]
    ) -> int:
        request = pb.HostCacheServiceCommitRequest(
            epoch=link.epoch,
            lease_id=lease_id,
            digests=[
                types_pb2.UnitDigest(kind=kind_to_wire(kind), page_index=page, digest=digest)
                for (kind, page), digest in digests.items()
            ],
        )
        answer = await self._attachment.call(self._attachment.stub.Commit, request, link)
        return int(answer.stored)

    def _abandon(self, lease_id: str, link: Link, copying: Sequence[Future[None]]) -> None:
        """Gives the room back, but not while a thread may still write there."""
        loop = asyncio.get_running_loop()
        give_back = partial(self._attachment.release, lease_id, link.epoch)

        def written(_done: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the lock goes with the process
                loop.call_soon_threadsafe(give_back)

        if copying:
            copying[0].add_done_callback(written)
        else:
            give_back()

    def counts(self) -> StoreCounts:
        return StoreCounts(
            self._stores, self._stored_units, self._skipped, self._dropped, self._failed
        )

    async def close(self) -> None:
        """Stop copying; the unit that is being copied is finished."""
        self._closing.set()
        await asyncio.to_thread(self._copier.shutdown)


def check_room(
    room: Sequence[pb.ReservedUnit], units: Sequence[UnitSource], *, arena_bytes: int
) -> None:
    """Raises Unavailable for room that was not asked for, or that lies outside the arena."""
    asked = {(unit.kind, unit.page_index) for unit in units}
    for unit in room:
        name = kind_from_wire(unit.kind), unit.page_index
        if name not in asked or unit.offset + unit.num_bytes > arena_bytes:
            raise Unavailable(f"the host-cache reserved {name[0].value} {name[1]} amiss")


def _ranges(units: Sequence[UnitSource]) -> list[types_pb2.PageRange]:
    """Runs of consecutive pages per kind."""
    ranges: list[types_pb2.PageRange] = []
    for kind, page in sorted({(unit.kind, unit.page_index) for unit in units}):
        wire_kind = kind_to_wire(kind)
        if ranges and (ranges[-1].kind, ranges[-1].end_page) == (wire_kind, page):
            ranges[-1].end_page += 1
        else:
            ranges.append(types_pb2.PageRange(kind=wire_kind, first_page=page, end_page=page + 1))
    return ranges
