"""The workers' client of their node's host-cache: load what it has, store what it lacks.

Nothing here fails a request. The host-cache away, restarted or slow is a miss, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView
from ferryman.errors import FerrymanError
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched, PrefetchPolicy, PrefetchWish
from ferryman.wire.codec.caches import host_unit_from_wire
from ferryman.wire.codec.scalars import keys_to_bytes
from ferryman.wire.host_attachment import (
    HostAttachment,
    HostCacheOptions,
    Link,
    OnAttach,
    UnitName,
    context_of,
)
from ferryman.wire.host_prefetcher import HostPrefetcher
from ferryman.wire.host_writer import HostWriter, UnitSource, source_of
from ferryman.wire.rpc import NO_TAGS, CallTags
from ferryman.wire.v1 import hostcache_pb2 as pb

__all__ = [
    "MISS",
    "NOTHING_BROUGHT",
    "HostCacheClient",
    "HostCacheOptions",
    "HostCacheStatistics",
    "HostLease",
    "PrefetchPolicy",
    "PrefetchWish",
    "Prefetched",
    "UnitSource",
    "host_cache_client",
    "source_of",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostLease:
    """Units of the host tier, leased until `release`; `usable_pages` is 0 without resume point."""

    lease_id: str
    epoch: int
    usable_pages: int
    view: HostView


MISS = HostLease("", 0, 0, EMPTY_HOST)


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
    num_prefetches: int = 0
    num_prefetch_failures: int = 0


@asynccontextmanager
async def host_cache_client(
    options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
) -> AsyncIterator[HostCacheClient]:
    """A client for the length of a block; it attaches when and as often as it can.

    `on_attach` is awaited with each new arena before anything in it is granted.
    """
    client = HostCacheClient(options, manifest, on_attach)
    running = asyncio.create_task(client.attachment.run(), name="host-cache attachment")
    running.add_done_callback(_log_failure)
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await client.close()


def _log_failure(running: asyncio.Task[None]) -> None:
    """A bug, or a device that takes no arena: from now on all is a miss, and no request fails."""
    if not running.cancelled() and (error := running.exception()):
        log.error("no host-cache any more", exc_info=error)


class HostCacheClient:
    """Use it from one event loop."""

    def __init__(
        self, options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
    ) -> None:
        self._options, self._manifest = options, manifest
        self.attachment = HostAttachment(options, manifest, on_attach)
        self._writer = HostWriter(self.attachment, options)
        self._hits = self._misses = self._corrupt = 0
        self._prefetcher = HostPrefetcher(self.attachment, options, manifest.page_size)

    @property
    def node_id(self) -> str:
        """The node's name in the index, or empty while not attached."""
        link = self.attachment.link
        return link.node_id if link else ""

    @property
    def num_attaches(self) -> int:
        """Grows with each attachment: the host-cache may be another one since."""
        return self.attachment.num_attaches

    # Bringing.

    async def prefetch(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        *,
        have_pages: int,
        tags: CallTags,
        patience: float,
    ) -> Prefetched:
        """What storage and peers brought into the host tier, for an `acquire` right after.

        `have_pages` is the prefix that the device can resume from. Waits as the options say, at
        most `patience` seconds, and begins what nobody began. When anything fails, nothing came.
        """
        return await self._prefetcher.prefetch(
            keys, prompt_len, have_pages=have_pages, tags=tags, patience=patience
        )

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
        lease_id = self.attachment.new_lease_id()
        request = pb.AcquireRequest(
            epoch=link.epoch,
            worker_id=self._options.worker_id,
            context=context_of(tags),
            page_keys=keys_to_bytes(keys),
            have_pages=have_pages,
            min_pages=min_pages,
            max_pages=(prompt_len - 1) // self._manifest.page_size,
            lease_id=lease_id,
        )
        try:
            answer = await self.attachment.call(self.attachment.stub.Acquire, request, link)
        except FerrymanError:
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
        self, keys: Sequence[PageKey], units: Sequence[UnitSource], *, tags: CallTags = NO_TAGS
    ) -> int | None:
        """Writes those units of the chain `keys` that the host tier lacks; how many became visible.
        None when it failed or was not tried.

        Stores run one after the other, in the order of the calls: a later one may stand on an
        earlier. Offer whole chains where they are at hand; what is there already costs nothing.
        """
        return await self._writer.store(keys, units, tags=tags)

    # Both.

    def statistics(self) -> HostCacheStatistics:
        stores = self._writer.counts()
        return HostCacheStatistics(
            is_attached=self.attachment.link is not None,
            num_attaches=self.attachment.num_attaches,
            num_hits=self._hits,
            num_misses=self._misses,
            num_failures=self.attachment.num_failures,
            num_lost_leases=self.attachment.num_lost_leases,
            num_stores=stores.num_stores,
            num_stored_units=stores.num_stored_units,
            num_stores_skipped=stores.num_skipped,
            num_stores_dropped=stores.num_dropped,
            num_stores_failed=stores.num_failed,
            num_corrupt=self._corrupt,
            num_prefetches=self._prefetcher.num_prefetches,
            num_prefetch_failures=self._prefetcher.num_failures,
        )

    async def close(self) -> None:
        """Stops copying, gives leases back, unmaps."""
        await self._writer.close()
        await self.attachment.close()
