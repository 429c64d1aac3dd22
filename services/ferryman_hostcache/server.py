"""HostCacheService over gRPC: messages in, the host-cache's values out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest, manifest_from_json
from ferryman.errors import InvalidRequest, ManifestMismatch
from ferryman.tiers.values import AcquireAsk, ReserveAsk, WorkerLife
from ferryman.wire.codec.caches import host_unit_to_wire
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    key_from_bytes,
    keys_from_bytes,
    kind_from_wire,
    kind_to_wire,
    milliseconds,
)
from ferryman.wire.host_arena import liveness_byte
from ferryman.wire.rpc import CallTags, Context
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceServicer
from ferryman_hostcache.host import HostCache

MAX_LEASE_ID_LEN = 96
MAX_MANIFEST_BYTES = 1 << 20


class IndexState(Protocol):
    """Whether Redis answers."""

    @property
    def is_away(self) -> bool: ...


class HostCacheServicer(HostCacheServiceServicer):
    """Every rpc but Attach and Stats names the epoch it speaks to."""

    def __init__(self, host: HostCache, index: IndexState) -> None:
        self._host, self._index = host, index

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        manifest = _manifest(request)
        index = self._host.attach(WorkerLife(request.worker_id, request.worker_epoch), manifest)
        arena, identity = self._host.arena, self._host.identity
        return pb.AttachResponse(
            arena_path=str(arena.path),
            arena_bytes=arena.num_bytes,
            epoch=identity.epoch,
            node_id=identity.node_id,
            lease_ms=self._lease_ms,
            unit_sizes=[
                pb.UnitSize(kind=kind_to_wire(layout.kind), num_bytes=layout.slot_bytes)
                for layout in manifest.layouts
            ],
            liveness_offset=liveness_byte(index),
        )

    @property
    def _lease_ms(self) -> int:
        return milliseconds(self._host.limits.lease_seconds)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        self._host.check_epoch(request.epoch)
        found = self._host.store.lookup(keys_from_bytes(request.page_keys))
        ranges = [each for kind, pages in found.pages.items() for each in _ranges(kind, pages)]
        return pb.LookupResponse(usable_pages=found.usable_pages, resident=ranges)

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        self._host.check_epoch(request.epoch)
        keys = keys_from_bytes(request.page_keys)
        ask = AcquireAsk(
            lease_id=_lease_id(request.lease_id),
            worker=self._host.workers.living(request.worker_id),
            keys=keys,
            have_pages=min(request.have_pages, len(keys)),
            min_pages=request.min_pages,
            max_pages=min(request.max_pages, len(keys)),
        )
        grant = self._host.acquire(ask, _tags(request.context))
        return pb.AcquireResponse(
            lease_ms=self._lease_ms if grant.units else 0,
            usable_pages=grant.usable_pages,
            units=[host_unit_to_wire(unit) for unit in grant.units],
        )

    async def Renew(
        self, request: pb.HostCacheServiceRenewRequest, context: Context
    ) -> pb.HostCacheServiceRenewResponse:
        self._host.check_epoch(request.epoch)
        lost = self._host.renew(request.lease_ids)
        return pb.HostCacheServiceRenewResponse(lease_ms=self._lease_ms, lost=lost)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._host.check_epoch(request.epoch)
        corrupt = [(kind_from_wire(u.kind), key_from_bytes(u.key)) for u in request.corrupt]
        tags = self._host.release(_lease_id(name) for name in request.lease_ids)
        for kind, key in corrupt:
            await self._host.reported_corrupt(kind, key, tags)
        return pb.ReleaseResponse()

    async def Reserve(
        self, request: pb.HostCacheServiceReserveRequest, context: Context
    ) -> pb.HostCacheServiceReserveResponse:
        self._host.check_epoch(request.epoch)
        keys = keys_from_bytes(request.page_keys)
        ask = ReserveAsk(
            lease_id=_lease_id(request.lease_id),
            worker=self._host.workers.living(request.worker_id),
            keys=keys,
            units=_pages(request.units, keys),
        )
        room = self._host.reserve(ask, _tags(request.context))
        units = [
            pb.ReservedUnit(
                kind=kind_to_wire(unit.kind),
                page_index=unit.page_index,
                offset=unit.offset,
                num_bytes=unit.num_bytes,
            )
            for unit in room
        ]
        lease_ms = self._lease_ms if units else 0
        return pb.HostCacheServiceReserveResponse(lease_ms=lease_ms, units=units)

    async def Commit(
        self, request: pb.HostCacheServiceCommitRequest, context: Context
    ) -> pb.HostCacheServiceCommitResponse:
        self._host.check_epoch(request.epoch)
        digests = {
            (kind_from_wire(each.kind), each.page_index): digest_from_bytes(each.digest)
            for each in request.digests
        }
        stored = self._host.commit(_lease_id(request.lease_id), digests)
        return pb.HostCacheServiceCommitResponse(stored=stored)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        self._host.check_epoch(request.epoch)
        return pb.PrefetchResponse()  # no slower tier is joined to this process yet

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        identity = self._host.identity
        said = pb.StatsResponse(
            arena_bytes=self._host.arena.num_bytes,
            is_index_away=self._index.is_away,
            epoch=identity.epoch,
            node_id=identity.node_id,
        )
        if self._host.is_laid_out:
            _count(said, self._host)
        return said


def _count(said: pb.StatsResponse, host: HostCache) -> None:
    counts, layout = host.store.statistics(), host.store.layout
    said.leases, said.reservations = counts.num_leases, counts.num_reservations
    said.quarantined, said.hits, said.misses = (
        counts.num_quarantined,
        counts.num_hits,
        counts.num_misses,
    )
    said.stored, said.evicted, said.corrupt = (
        counts.num_stored,
        counts.num_evicted,
        counts.num_corrupt,
    )
    for kind, each in counts.kinds.items():
        said.used_bytes += (each.total - each.free) * layout.slot_bytes(kind)
        said.kinds.add(
            kind=kind_to_wire(kind),
            total=each.total,
            free=each.free,
            resident=each.resident,
            reserved=each.reserved,
            leased=each.leased,
            leaving=each.leaving,
        )


def _manifest(request: pb.AttachRequest) -> StateManifest:
    if not request.worker_id or len(request.manifest_json) > MAX_MANIFEST_BYTES:
        raise InvalidRequest("a worker id and a manifest are needed to attach", "manifest_json")
    try:
        manifest = manifest_from_json(request.manifest_json)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"this is no manifest: {error!r}", "manifest_json") from error
    if manifest.digest != request.manifest_digest:
        raise ManifestMismatch(
            (f"digest: {manifest.digest} here, {request.manifest_digest} there",)
        )
    return manifest


def _lease_id(text: str) -> str:
    if not 1 <= len(text.encode()) <= MAX_LEASE_ID_LEN:
        raise InvalidRequest(f"a lease id has 1 to {MAX_LEASE_ID_LEN} bytes", "lease_id")
    return text


def _tags(context: types_pb2.RequestContext) -> CallTags:
    return CallTags(context.request_id, context.attempt, context.traceparent)


def _pages(
    ranges: Iterable[types_pb2.PageRange], keys: tuple[PageKey, ...]
) -> dict[Kind, list[int]]:
    pages: dict[Kind, list[int]] = {}
    for each in ranges:
        if not each.first_page < each.end_page <= len(keys):
            raise InvalidRequest(
                f"pages [{each.first_page}, {each.end_page}) are none of {len(keys)}", "units"
            )
        pages.setdefault(kind_from_wire(each.kind), []).extend(
            range(each.first_page, each.end_page)
        )
    return pages


def _ranges(kind: Kind, pages: Iterable[int]) -> list[types_pb2.PageRange]:
    """Runs of consecutive pages."""
    runs = [list(run) for _, run in groupby(enumerate(pages), lambda pair: pair[1] - pair[0])]
    return [
        types_pb2.PageRange(kind=kind_to_wire(kind), first_page=run[0][1], end_page=run[-1][1] + 1)
        for run in runs
    ]
