"""HostCacheService over gRPC: messages in, the host-cache's values out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict

from ferryman.cache.manifest import StateManifest, manifest_from_json
from ferryman.errors import FerrymanError, InvalidRequest, ManifestMismatch, PermissionDenied
from ferryman.handoff.values import ranges_of
from ferryman.ids import check_request_id
from ferryman.runtime.spans.process_spans import Tracing
from ferryman.security.credentials import ClusterRole
from ferryman.tiers.layout import budget_of
from ferryman.tiers.prefetch_values import PrefetchRequest
from ferryman.tiers.values import (
    AcquireRequest,
    ReserveRequest,
    Residency,
    StoreStatistics,
    UnitName,
    WorkerLife,
)
from ferryman.wire.codec.caches import (
    host_unit_to_wire,
    pages_from_ranges,
    policy_from_wire,
    prefetched_to_wire,
    traffic_to_wire,
)
from ferryman.wire.codec.handoff import range_to_wire
from ferryman.wire.codec.scalars import (
    digest_from_bytes,
    key_from_bytes,
    keys_from_bytes,
    kind_from_wire,
    kind_to_wire,
    milliseconds,
    seconds,
)
from ferryman.wire.grpc.role_tokens import is_called_by, refuse_call
from ferryman.wire.grpc.rpc import CallTags, Context, remaining_seconds
from ferryman.wire.hostcache.arena import liveness_byte
from ferryman.wire.hostcache.attachment import MAX_DROPPED_CHAINS
from ferryman.wire.hostcache.unit_seals import NamedUnit
from ferryman.wire.signed_orders import DEPOSIT, FETCH, LOOKUP, SignatureCheck
from ferryman.wire.v1 import hostcache_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.v1.hostcache_pb2_grpc import HostCacheServiceServicer
from ferryman_hostcache.deposits import UnitPiece
from ferryman_hostcache.fetches import check_kinds, frames_of
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.index_publisher import IndexPublisher
from ferryman_hostcache.lower_tiers import LowerTiers
from ferryman_hostcache.peers import CHALLENGE_BYTES
from ferryman_hostcache.prefetch_runner import PrefetchRunner
from ferryman_hostcache.prefetch_stats import PrefetchCounts

MAX_LEASE_ID_LEN = 96
MAX_MANIFEST_BYTES = 1 << 20
MAX_PREFETCH_SECONDS = 60.0
MAX_PATIENCE_SECONDS = 0.25  # of a reader that waits for a writer

# Counts that Stats tells, by their names in the message.
STORE_COUNTS = "leases reservations quarantined hits misses stored evicted corrupt".split()
PREFETCH_COUNTS = "running begun complete truncated fruitless corrupt failed_reads".split()


class HostCacheServicer(HostCacheServiceServicer):
    """Every rpc except Attach and Stats names the epoch that it is meant for. Those of workers
    show that the caller maps the arena; Prefetch is for routers, too, and takes nobody's bytes."""

    def __init__(
        self,
        host: HostCache,
        publisher: IndexPublisher,
        lower_tiers: LowerTiers,
        signatures: SignatureCheck,
        tracing: Tracing,
    ) -> None:
        self._signatures, self._tracing = signatures, tracing
        self._host, self._publisher, self._seals = host, publisher, lower_tiers.seals
        self._prefetching, self._fetches = lower_tiers.prefetching, lower_tiers.fetches
        self._deposits = lower_tiers.deposits

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
            liveness_offset=liveness_byte(index),
        )

    def _check_maps(self, context: Context) -> None:
        """Raises PermissionDenied for a caller that cannot open the arena, and counts it: it could
        neither read nor write a unit, but give a name to bytes that others wrote.

        After the epoch, whose error has a worker of an earlier arena attach again.
        """
        if not self._host.arena.is_mapped_by(context.invocation_metadata() or ()):
            refuse_call(PermissionDenied("the caller does not map the arena; attach first"))

    @property
    def _lease_ms(self) -> int:
        return milliseconds(self._host.limits.lease_seconds)

    def _check_signed(
        self, call: str, request: pb.LookupRequest | pb.FetchRequest | pb.DepositOrder
    ) -> None:
        """Raises PermissionDenied for a router's token without a router's signature: each worker
        that a router calls sees its token."""
        if is_called_by(ClusterRole.ROUTER):
            self._signatures.check_units(call, request.page_keys, request.signature)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        self._host.check_epoch(request.epoch)
        self._check_signed(LOOKUP, request)
        keys = keys_from_bytes(request.page_keys)
        resident, stored = self._host.store.lookup(keys), self._host.storage.lookup(keys)
        answer = pb.LookupResponse(
            usable_pages=resident.usable_pages,
            resident=_ranges(resident),
            in_storage=_ranges(stored),
        )
        if request.challenge:
            if len(request.challenge) != CHALLENGE_BYTES:
                raise InvalidRequest(f"a challenge has {CHALLENGE_BYTES} bytes", "challenge")
            self._seals.seal_answer(answer, request, self._host.identity)
        return answer

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        self._host.check_epoch(request.epoch)
        self._check_maps(context)
        keys = keys_from_bytes(request.page_keys)
        ask = AcquireRequest(
            lease_id=_lease_id(request.lease_id),
            worker=self._host.workers.living(request.worker_id),
            keys=keys,
            have_pages=min(request.have_pages, len(keys)),
            min_pages=request.min_pages,
            max_pages=min(request.max_pages, len(keys)),
        )
        patience = min(seconds(request.context.deadline_ms), MAX_PATIENCE_SECONDS)
        tags, about = _tags(request.context), {"ferryman.pages": len(keys)}
        with self._tracing.timed("hostcache.acquire", tags.traceparent, about):
            if patience and self._host.is_laid_out:
                await self._host.settle(ask, remaining_seconds(context, patience))
            grant = self._host.acquire(ask, tags)
        return pb.AcquireResponse(
            lease_ms=self._lease_ms if grant.units else 0,
            usable_pages=grant.usable_pages,
            units=[host_unit_to_wire(unit) for unit in grant.units],
        )

    async def Renew(
        self, request: pb.HostCacheServiceRenewRequest, context: Context
    ) -> pb.HostCacheServiceRenewResponse:
        self._host.check_epoch(request.epoch)
        self._check_maps(context)
        lost = self._host.renew(request.lease_ids)
        return pb.HostCacheServiceRenewResponse(lease_ms=self._lease_ms, lost=lost)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._host.check_epoch(request.epoch)
        self._check_maps(context)
        corrupt = [(kind_from_wire(u.kind), key_from_bytes(u.key)) for u in request.corrupt]
        check_kinds((kind for kind, _ in corrupt), self._host.store.manifest)
        dropped = keys_from_bytes(request.dropped_chains)
        if len(dropped) > MAX_DROPPED_CHAINS:
            raise InvalidRequest(f"at most {MAX_DROPPED_CHAINS} chains at once", "dropped_chains")
        tags = self._host.release(_lease_id(name) for name in request.lease_ids)
        for first in dropped:
            self._host.drop_chain(first)
        for kind, key in corrupt:
            await self._host.check_reported_corrupt(kind, key, tags)
        return pb.ReleaseResponse()

    async def Reserve(
        self, request: pb.HostCacheServiceReserveRequest, context: Context
    ) -> pb.HostCacheServiceReserveResponse:
        self._host.check_epoch(request.epoch)
        self._check_maps(context)
        keys = keys_from_bytes(request.page_keys)
        units = pages_from_ranges(request.units, len(keys))
        check_kinds(units, self._host.store.manifest)
        ask = ReserveRequest(
            lease_id=_lease_id(request.lease_id),
            worker=self._host.workers.living(request.worker_id),
            keys=keys,
            units=units,
        )
        room = self._host.reserve(ask, _tags(request.context))
        reserved = [
            pb.ReservedUnit(
                kind=kind_to_wire(unit.kind),
                page_index=unit.page_index,
                offset=unit.offset,
                num_bytes=unit.num_bytes,
            )
            for unit in room
        ]
        lease_ms = self._lease_ms if reserved else 0
        return pb.HostCacheServiceReserveResponse(lease_ms=lease_ms, units=reserved)

    async def Commit(
        self, request: pb.HostCacheServiceCommitRequest, context: Context
    ) -> pb.HostCacheServiceCommitResponse:
        self._host.check_epoch(request.epoch)
        self._check_maps(context)
        digests = {
            (kind_from_wire(unit.kind), unit.page_index): digest_from_bytes(unit.digest)
            for unit in request.digests
        }
        stored = self._host.commit(_lease_id(request.lease_id), digests)
        return pb.HostCacheServiceCommitResponse(stored=stored)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        self._host.check_epoch(request.epoch)
        keys = keys_from_bytes(request.page_keys)
        ask = PrefetchRequest(
            keys=keys,
            have_pages=min(request.have_pages, len(keys)),
            max_pages=min(request.max_pages, len(keys)),
            threshold_tokens=(
                request.threshold_tokens
                if request.HasField("threshold_tokens")
                else self._prefetching.wish.threshold_tokens
            ),
        )
        tags, patience = _tags(request.context), _patience(request)
        if request.phase != pb.PREFETCH_PHASE_FINISH:
            return prefetched_to_wire(
                self._prefetching.start(ask, tags, patience).progress.result()
            )
        policy = policy_from_wire(request.policy, self._prefetching.wish.policy)
        left = remaining_seconds(context, patience)
        finished = self._prefetching.finish(ask, tags, policy, patience=patience, left=left)
        with self._tracing.timed(
            "hostcache.prefetch", tags.traceparent, {"ferryman.pages": len(keys)}
        ):
            return prefetched_to_wire(await finished)

    async def Fetch(
        self, request: pb.FetchRequest, context: Context
    ) -> AsyncIterator[pb.FetchResponse]:
        self._host.check_epoch(request.epoch)
        self._check_signed(FETCH, request)
        keys = keys_from_bytes(request.page_keys)
        names = list(_names(request.units, len(keys)))
        async with aclosing(self._fetches.units(request.manifest_digest, keys, names)) as units:
            async for unit in units:
                kind, page = unit.name
                size = len(unit.content)
                named = NamedUnit(request.manifest_digest, kind, keys[page], size, unit.digest)
                seal = self._seals.seal_of(named)
                for offset, data in frames_of(unit.content):
                    yield pb.FetchResponse(
                        kind=kind_to_wire(kind),
                        page_index=page,
                        num_bytes=size,
                        digest=unit.digest,
                        seal=seal,
                        offset=offset,
                        data=data,
                    )

    async def Deposit(
        self, requests: AsyncIterator[pb.DepositRequest], context: Context
    ) -> AsyncIterator[pb.DepositResponse]:
        first = await anext(requests, pb.DepositRequest())
        if first.WhichOneof("part") != "order":
            raise InvalidRequest("a deposit begins with its order", "order")
        order = first.order
        self._host.check_epoch(order.epoch)
        self._check_signed(DEPOSIT, order)
        keys = keys_from_bytes(order.page_keys)
        names = list(_names(order.units, len(keys)))
        with self._deposits.begun(order.manifest_digest, keys, names) as deposit:
            yield pb.DepositResponse()
            try:
                pieces = (UnitPiece(r.piece.data, r.piece.digest) async for r in requests)
                taken = await deposit.take(pieces)
            except FerrymanError:
                # gRPC loses a status that meets a write on its way.
                async for _ in requests:
                    pass
                raise
        yield pb.DepositResponse(usable_pages=taken.usable_pages, stored_units=taken.stored_units)

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        identity = self._host.identity
        stats = pb.StatsResponse(
            arena_bytes=self._host.arena.num_bytes,
            is_index_away=self._publisher.is_away,
            epoch=identity.epoch,
            node_id=identity.node_id,
        )
        if self._host.is_laid_out:
            _count(stats, self._host)
            _split(stats, self._host)
        _count_prefetches(stats, self._prefetching)
        return stats


def _split(stats: pb.StatsResponse, host: HostCache) -> None:
    """The total budget, and the slots of each kind."""
    budget = budget_of(host.store.manifest, host.store.layout)
    stats.budget.tokens, stats.budget.snapshots = budget.num_tokens, budget.num_snapshots
    for pool in budget.pools:
        stats.budget.pools.add(
            kind=kind_to_wire(pool.kind), num_bytes=pool.num_bytes, slots=pool.num_slots
        )


def _count_prefetches(stats: pb.StatsResponse, prefetching: PrefetchRunner) -> None:
    _copy(prefetching.statistics(), stats.prefetch, PREFETCH_COUNTS)
    stats.tiers.extend(traffic_to_wire(prefetching.tally.traffic))


def _count(stats: pb.StatsResponse, host: HostCache) -> None:
    counts, layout = host.store.statistics(), host.store.layout
    _copy(counts, stats, STORE_COUNTS)
    for kind, pool in counts.kinds.items():
        stats.used_bytes += (pool.total - pool.free) * layout.slot_bytes(kind)
        stats.kinds.add(kind=kind_to_wire(kind), **asdict(pool))


def _copy(
    counts: StoreStatistics | PrefetchCounts,
    message: pb.StatsResponse | pb.PrefetchStats,
    names: Iterable[str],
) -> None:
    for name in names:
        setattr(message, name, getattr(counts, f"num_{name}"))


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
    if context.request_id:  # events are published under it
        check_request_id(context.request_id)
    return CallTags(context.request_id, context.attempt, context.traceparent)


def _ranges(units: Residency) -> list[types_pb2.PageRange]:
    names = ((kind, page) for kind, pages in units.pages.items() for page in pages)
    return [range_to_wire(span) for span in ranges_of(names)]


def _names(ranges: Iterable[types_pb2.PageRange], num_pages: int) -> Iterator[UnitName]:
    """Units in the order of the request."""
    for span in ranges:
        for kind, pages in pages_from_ranges([span], num_pages).items():
            yield from ((kind, page) for page in pages)


def _patience(request: pb.PrefetchRequest) -> float:
    """The time that a prefetch may go on without a caller."""
    left = seconds(request.context.deadline_ms)
    return min(left, MAX_PREFETCH_SECONDS) if left else MAX_PREFETCH_SECONDS
