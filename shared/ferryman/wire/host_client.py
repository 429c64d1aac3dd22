"""The workers' client of their node's host-cache: load what it has, store what it lacks.

Nothing here fails a request. The host-cache away, restarted or slow is a miss, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import xxhash

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.errors import FerrymanError
from ferryman.wire.codec.caches import host_unit_from_wire
from ferryman.wire.codec.scalars import keys_to_bytes, kind_from_wire, kind_to_wire
from ferryman.wire.host_attachment import HostAttachment, HostCacheOptions, Link, OnAttach, UnitName
from ferryman.wire.rpc import CallTags
from ferryman.wire.status import typed_errors
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2

log = logging.getLogger(__name__)

NO_TAGS = CallTags()


@dataclass(frozen=True, slots=True)
class HostLease:
    """Units of the host tier, leased until `release`; `usable_pages` is 0 without resume point."""

    lease_id: str
    epoch: int
    usable_pages: int
    view: HostView


MISS = HostLease("", 0, 0, EMPTY_HOST)


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
class HostCacheStatistics:
    """Counts since the start. A store is skipped when nothing of it was wanted."""

    is_attached: bool
    num_attaches: int
    num_hits: int
    num_misses: int
    num_failures: int
    num_lost_leases: int
    num_stores: int
    num_stored_units: int
    num_stores_skipped: int
    num_stores_dropped: int
    num_stores_failed: int
    num_corrupt: int


@asynccontextmanager
async def host_cache_client(
    options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
) -> AsyncIterator[HostCacheClient]:
    """A client for the length of a block; it attaches when and as often as it can.

    `on_attach` is awaited with each new arena before anything in it is granted.
    """
    client = HostCacheClient(options, manifest, on_attach)
    running = asyncio.create_task(client.attachment.run(), name="host-cache attachment")
    try:
        yield client
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await client.close()


class HostCacheClient:
    """Use it from one event loop."""

    def __init__(
        self, options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
    ) -> None:
        self._options, self._manifest = options, manifest
        self.attachment = HostAttachment(options, manifest, on_attach)
        self._numbers = count(1)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="host-store")
        self._closing = threading.Event()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._hits = self._misses = self._failures = self._corrupt = 0
        self._stores = self._stored_units = 0
        self._skipped = self._dropped = self._failed = 0

    @property
    def node_id(self) -> str:
        """The node's name in the index, or empty while not attached."""
        link = self.attachment.link
        return link.node_id if link else ""

    # Loading.

    async def acquire(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        have_pages: int,
        *,
        min_pages: int = 0,
        tags: CallTags = NO_TAGS,
    ) -> HostLease:
        """Leases what the host tier has beyond `have_pages` full pages on the device, for a resume
        beyond `min_pages`. Release it once the loads are done, even when nothing was loaded.
        """
        link = self.attachment.link
        if link is None or not keys:
            self._misses += 1
            return MISS
        lease_id = self._new_name()
        request = pb.AcquireRequest(
            epoch=link.epoch,
            worker_id=self._options.worker_id,
            context=_context(tags),
            page_keys=keys_to_bytes(keys),
            have_pages=have_pages,
            min_pages=min_pages,
            max_pages=(prompt_len - 1) // self._manifest.page_size,
            lease_id=lease_id,
        )
        try:
            answer = await self._call(self.attachment.stub.Acquire, request)
        except FerrymanError as error:
            self._report(error, link)
            self._misses += 1
            self.attachment.release(lease_id, link.epoch)
            return MISS
        except asyncio.CancelledError:
            self.attachment.release(lease_id, link.epoch)
            raise
        return self._granted(lease_id, link, answer)

    def _granted(self, lease_id: str, link: Link, answer: pb.AcquireResponse) -> HostLease:
        if not answer.units:
            self._misses += 1
            return MISS
        self.attachment.hold(lease_id, link)
        self._hits += answer.usable_pages > 0
        self._misses += answer.usable_pages == 0
        units = [host_unit_from_wire(unit) for unit in answer.units]
        view = HostView({(unit.kind, unit.page_index): unit for unit in units})
        return HostLease(lease_id, link.epoch, answer.usable_pages, view)

    def release(self, lease: HostLease, corrupt: Iterable[UnitName] = ()) -> None:
        """Ends a lease, and reports units (kind, key) whose bytes did not have their digest.

        Never waits; of a miss it does nothing.
        """
        if lease.lease_id:
            names = tuple(corrupt)
            self._corrupt += len(names)
            self.attachment.release(lease.lease_id, lease.epoch, names)

    # Storing.

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
    ) -> int:
        """Writes those units of the chain `keys` that the host tier lacks; how many became visible.

        Stores run one after the other, in the order of the calls: a later one may stand on an
        earlier. Offer whole chains where they are at hand; what is there already costs nothing.
        """
        if self.attachment.link is None or self._num_waiting >= self._options.max_stores:
            self._dropped += 1
            return 0
        self._num_waiting += 1
        try:
            async with self._turn:
                if link := self.attachment.link:
                    return await self._store(link, keys, units, tags)
                self._dropped += 1
                return 0
        finally:
            self._num_waiting -= 1

    async def _store(
        self, link: Link, keys: Sequence[PageKey], units: Sequence[UnitSource], tags: CallTags
    ) -> int:
        lease_id = self._new_name()
        copying: list[Future[None]] = []
        is_over = False
        try:
            room = await self._reserve(link, lease_id, keys, units, tags)
            if not room:
                is_over, self._skipped = True, self._skipped + 1
                return 0
            self.attachment.hold(lease_id, link)
            digests = await self._copied(link, units, room, copying)
            stored = await self._commit(link, lease_id, digests)
            is_over = True
        except FerrymanError as error:
            self._failed += 1
            self._report(error, link)
            return 0
        finally:
            if is_over:
                self.attachment.forget(lease_id)
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
            context=_context(tags),
            page_keys=keys_to_bytes(keys),
            units=_ranges(units),
            lease_id=lease_id,
        )
        answer = await self._call(self.attachment.stub.Reserve, request)
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
        answer = await self._call(self.attachment.stub.Commit, request)
        return int(answer.stored)

    def _abandon(self, lease_id: str, link: Link, copying: Sequence[Future[None]]) -> None:
        """Gives the room back, but not while a thread may still write there."""
        loop = asyncio.get_running_loop()
        give_back = partial(self.attachment.release, lease_id, link.epoch)

        def written(_done: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the lock goes with the process
                loop.call_soon_threadsafe(give_back)

        if copying:
            copying[0].add_done_callback(written)
        else:
            give_back()

    # Both.

    async def _call(self, method: Callable[..., Any], request: object) -> Any:
        with typed_errors():
            return await method(request, timeout=self._options.call_seconds)

    def _new_name(self) -> str:
        options = self._options
        return f"{options.worker_id}.{options.worker_epoch:x}.{next(self._numbers)}"

    def _report(self, error: FerrymanError, link: Link) -> None:
        self._failures += 1
        self.attachment.failed(error, link)

    def statistics(self) -> HostCacheStatistics:
        return HostCacheStatistics(
            is_attached=self.attachment.link is not None,
            num_attaches=self.attachment.num_attaches,
            num_hits=self._hits,
            num_misses=self._misses,
            num_failures=self._failures,
            num_lost_leases=self.attachment.num_lost_leases,
            num_stores=self._stores,
            num_stored_units=self._stored_units,
            num_stores_skipped=self._skipped,
            num_stores_dropped=self._dropped,
            num_stores_failed=self._failed,
            num_corrupt=self._corrupt,
        )

    async def close(self) -> None:
        """Stops copying, gives leases back, unmaps."""
        self._closing.set()
        await asyncio.to_thread(self._copier.shutdown)
        await self.attachment.close()


def _context(tags: CallTags) -> types_pb2.RequestContext:
    return types_pb2.RequestContext(
        request_id=tags.request_id, attempt=tags.attempt, traceparent=tags.traceparent
    )


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
