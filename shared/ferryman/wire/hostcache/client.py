"""The workers' client of their node's host-cache: prefetches, loads and stores units.

No failure here fails a request. An absent, restarted or slow host-cache is a miss, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import StateManifest
from ferryman.cache.resume import EMPTY_HOST, HostView, max_resume_pages
from ferryman.errors import FerrymanError
from ferryman.handoff.values import UnitDigest, ranges_of
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.tiers.write_policy import UnitKey
from ferryman.wire.codec.caches import host_unit_from_wire, policy_to_wire, prefetched_from_wire
from ferryman.wire.codec.handoff import digest_to_wire, range_to_wire
from ferryman.wire.codec.scalars import keys_to_bytes, milliseconds
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.hostcache.arena_copy import ArenaCopier, UnitSource, check_room
from ferryman.wire.hostcache.attachment import (
    HostAttachment,
    HostCacheOptions,
    Link,
    OnAttach,
    context_of,
)
from ferryman.wire.hostcache.copy_pace import ALL_AT_ONCE, CopyPace
from ferryman.wire.v1 import hostcache_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostLease:
    """Units of the host tier, leased until `release`; `usable_pages` is 0 without resume point."""

    lease_id: str
    epoch: int
    usable_pages: int
    view: HostView


MISS = HostLease("", 0, 0, EMPTY_HOST)


@dataclass(slots=True)
class HostCacheStatistics:
    """Counts since the start. A store is skipped when none of its units was wanted."""

    is_attached: bool = False
    num_attaches: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_failures: int = 0
    num_lost_leases: int = 0
    num_stores: int = 0
    num_stored_units: int = 0
    num_stores_skipped: int = 0
    num_stores_dropped: int = 0
    num_stores_failed: int = 0
    num_corrupt: int = 0
    num_prefetches: int = 0
    num_prefetch_failures: int = 0


@asynccontextmanager
async def host_cache_client(
    options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
) -> AsyncIterator[HostCacheClient]:
    """A client for the length of a block; it attaches whenever it can.

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
    """Logs a bug, or a device that takes no arena: from now on every lookup misses, and no request
    fails."""
    if not running.cancelled() and (error := running.exception()):
        log.error("no host-cache any more", exc_info=error)


class HostCacheClient:
    """Use it from one event loop. Calls use the attachment's link, while there is one."""

    def __init__(
        self, options: HostCacheOptions, manifest: StateManifest, on_attach: OnAttach
    ) -> None:
        self._options, self._page_size = options, manifest.page_size
        self.attachment = HostAttachment(options, manifest, on_attach)
        self._copier = ArenaCopier()
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._counts = HostCacheStatistics()

    @property
    def node_id(self) -> str:
        """The node's name in the index, or empty while not attached."""
        link = self.attachment.link
        return link.node_id if link else ""

    @property
    def num_attaches(self) -> int:
        """Grows with each attachment: the host-cache may be another one then."""
        return self.attachment.num_attaches

    @property
    def num_times_usable(self) -> int:
        """Grows with each attachment, and when the host-cache answers again."""
        return self.attachment.num_times_usable

    # Prefetching.

    async def prefetch(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        *,
        have_pages: int,
        tags: CallTags,
        patience: float,
    ) -> Prefetched:
        """The units that storage and peers brought into the host tier, for an `acquire` right
        after.

        `have_pages` is the prefix that the device can resume from. Waits as the options say, at
        most `patience` seconds, and starts a prefetch that is not running. After any failure the
        result is empty.
        """
        link = self.attachment.link
        if link is None or not keys:
            return NOTHING_BROUGHT
        self._counts.num_prefetches += 1
        wish, context = self._options.prefetch, context_of(tags)
        context.deadline_ms = milliseconds(patience)
        request = pb.PrefetchRequest(
            epoch=link.epoch,
            context=context,
            page_keys=keys_to_bytes(keys),
            have_pages=have_pages,
            max_pages=max_resume_pages(prompt_len, self._page_size),
            policy=policy_to_wire(wish.policy),
            threshold_tokens=wish.threshold_tokens,
            phase=pb.PREFETCH_PHASE_FINISH,
        )
        method = self.attachment.stub.Prefetch
        try:
            answer = await self.attachment.call(method, request, link, patience=patience)
        except FerrymanError:
            self._counts.num_prefetch_failures += 1
            return NOTHING_BROUGHT
        return prefetched_from_wire(answer)

    # Loading.

    async def acquire(
        self,
        keys: Sequence[PageKey],
        prompt_len: int,
        have_pages: int,
        *,
        min_pages: int = 0,
        tags: CallTags = NO_TAGS,
        patience: float = 0.0,
    ) -> HostLease:
        """Leases the host tier's units beyond `have_pages` full pages on the device, for a resume
        beyond `min_pages`. Release it once the loads are done, even when nothing was loaded. Waits
        `patience` seconds at most for what another worker is writing just now."""
        link = self.attachment.link
        if link is None or not keys:
            self._counts.num_misses += 1
            return MISS
        lease_id = self.attachment.new_lease_id()
        context = context_of(tags)
        context.deadline_ms = milliseconds(patience)
        request = pb.AcquireRequest(
            epoch=link.epoch,
            worker_id=self._options.worker_id,
            context=context,
            page_keys=keys_to_bytes(keys),
            have_pages=have_pages,
            min_pages=min_pages,
            max_pages=max_resume_pages(prompt_len, self._page_size),
            lease_id=lease_id,
        )
        try:
            method = self.attachment.stub.Acquire
            answer = await self.attachment.call(method, request, link, patience=patience)
        except FerrymanError:
            # The lease may exist although its answer was lost: the name was chosen here, so it can
            # be released without the answer.
            self._counts.num_misses += 1
            self.attachment.release(lease_id, link.epoch)
            return MISS
        except asyncio.CancelledError:
            self.attachment.release(lease_id, link.epoch)
            raise
        return self._granted(lease_id, link, answer)

    def _granted(self, lease_id: str, link: Link, answer: pb.AcquireResponse) -> HostLease:
        if not answer.units:
            self._counts.num_misses += 1
            return MISS
        self.attachment.hold(lease_id, link)
        self._counts.num_hits += answer.usable_pages > 0
        self._counts.num_misses += answer.usable_pages == 0
        units = [host_unit_from_wire(unit) for unit in answer.units]
        view = HostView({(unit.kind, unit.page_index): unit for unit in units})
        return HostLease(lease_id, link.epoch, answer.usable_pages, view)

    def release(self, lease: HostLease, corrupt: Iterable[UnitKey] = ()) -> None:
        """Ends a lease, and reports units (kind, key) whose bytes did not have their digest.

        Never waits; does nothing for a miss.
        """
        if lease.lease_id:
            names = tuple(corrupt)
            self._counts.num_corrupt += len(names)
            self.attachment.release(lease.lease_id, lease.epoch, names)

    def drop_chain(self, first: PageKey) -> None:
        """Makes all tiers of the host-cache drop the chains that begin with page `first`: their
        numbers are not finite, though the bytes are those written. Never waits."""
        self._counts.num_corrupt += 1
        self.attachment.drop_chain(first)

    # Storing.

    async def store(
        self,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        *,
        tags: CallTags = NO_TAGS,
        pace: CopyPace = ALL_AT_ONCE,
    ) -> int | None:
        """Writes the units of the chain `keys` that the host tier lacks, in runs as `pace` says;
        returns how many became visible, or None when the store failed or was not tried.

        Stores run one after the other, in the order of the calls: a later one may need the pages of
        an earlier one. Offer whole chains if possible; units that are there already cost
        nothing. Once this has ended, also by an error, no source is read any more.
        """
        if self.attachment.link is None or self._num_waiting >= self._options.max_stores:
            self._counts.num_stores_dropped += 1
            return None
        self._num_waiting += 1
        try:
            async with self._turn:
                if link := self.attachment.link:
                    return await self._store(link, keys, units, tags, pace)
                self._counts.num_stores_dropped += 1
                return None
        finally:
            self._num_waiting -= 1

    async def _store(
        self,
        link: Link,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        tags: CallTags,
        pace: CopyPace,
    ) -> int | None:
        """Reserve → copy with digest → Commit."""
        lease_id = self.attachment.new_lease_id()
        is_over = False
        try:
            room = await self._reserve(link, lease_id, keys, units, tags)
            if not room:
                is_over = True
                self._counts.num_stores_skipped += 1
                return 0
            self.attachment.hold(lease_id, link)
            digests = await self._copier.copied(link.arena.memory[:], units, room, pace)
            stored = await self._commit(link, lease_id, digests)
            is_over = True
        except FerrymanError:
            self._counts.num_stores_failed += 1
            return None
        finally:
            if is_over:
                self.attachment.forget(lease_id)
            else:
                # The copy has ended: the copier has waited for its thread.
                self.attachment.release(lease_id, link.epoch)
        self._counts.num_stores += 1
        self._counts.num_stored_units += stored
        return stored

    async def _reserve(
        self,
        link: Link,
        lease_id: str,
        keys: Sequence[PageKey],
        units: Sequence[UnitSource],
        tags: CallTags,
    ) -> Sequence[pb.ReservedUnit]:
        names = ((unit.kind, unit.page_index) for unit in units)
        request = pb.HostCacheServiceReserveRequest(
            epoch=link.epoch,
            worker_id=self._options.worker_id,
            context=context_of(tags),
            page_keys=keys_to_bytes(keys),
            units=[range_to_wire(span) for span in ranges_of(names)],
            lease_id=lease_id,
        )
        answer = await self.attachment.call(self.attachment.stub.Reserve, request, link)
        check_room(answer.units, units, arena_bytes=link.arena.memory.nbytes)
        return tuple(answer.units)

    async def _commit(self, link: Link, lease_id: str, digests: Sequence[UnitDigest]) -> int:
        request = pb.HostCacheServiceCommitRequest(
            epoch=link.epoch,
            lease_id=lease_id,
            digests=map(digest_to_wire, digests),
        )
        answer = await self.attachment.call(self.attachment.stub.Commit, request, link)
        return int(answer.stored)

    def statistics(self) -> HostCacheStatistics:
        return replace(
            self._counts,
            is_attached=self.attachment.link is not None,
            num_attaches=self.attachment.num_attaches,
            num_failures=self.attachment.num_failures,
            num_lost_leases=self.attachment.num_lost_leases,
        )

    async def close(self) -> None:
        """Stops copying, gives leases back, unmaps."""
        await self._copier.close()
        await self.attachment.close()
