"""What a host-cache shows of itself: gauges, the ledger, its heartbeat."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import partial

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.runtime.listening import Answer, json_answer
from ferryman.runtime.metrics import Metrics
from ferryman.tiers.prefetch_values import Traffic
from ferryman.tiers.storage_values import StorageKindStatistics
from ferryman.tiers.values import KindCounts, KindStatistics
from ferryman.wire.beats import Beat, ServedState
from ferryman_hostcache.announcer import IndexAnnouncer
from ferryman_hostcache.behind import Behind
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.prefetching import Prefetching

ROLE = "hostcache"
NO_STATE = ServedState("", 0, "", ())
NO_UNITS = KindStatistics(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class HostGauges:
    """What the gauges show, summed over the kinds."""

    arena_bytes: int
    used_bytes: int
    num_units: int
    num_leases: int
    num_reservations: int
    num_quarantined: int
    num_hits: int
    num_misses: int
    num_stored: int
    num_evicted: int
    num_corrupt: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class KindGauges:
    """One kind's units, by tier, and what happened to them since the start. Truncated are units for
    which a prefetch, or a group on its way to storage, found no room."""

    host_units: int
    host_free: int
    host_bytes: int
    host_hits: int
    host_stored: int
    host_evicted: int
    host_corrupt: int
    host_truncated: int
    from_storage_units: int
    from_storage_bytes: int
    from_peer_units: int
    from_peer_bytes: int
    storage_units: int
    storage_bytes: int
    storage_hits: int
    storage_misses: int
    storage_stored: int
    storage_evicted: int
    storage_corrupt: int
    storage_truncated: int


@dataclass(frozen=True, slots=True)
class TrafficGauges:
    """What prefetches brought from a tier since the start, verified, and what that took."""

    units: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StorageGauges:
    """The folder. Evictions, hits and flaws are counted by kind."""

    capacity_bytes: int
    used_bytes: int
    foreign_bytes: int
    num_extents: int
    num_leases: int
    num_truncated: int
    num_failures: int
    num_removed_at_start: int
    num_in_flight: int
    read_bytes: int
    read_seconds: float
    written_bytes: int
    written_seconds: float
    is_resting: bool


@dataclass(frozen=True, slots=True)
class FetchGauges:
    """What other nodes were sent since the start."""

    units: int
    bytes: int


def watch(metrics: Metrics, host: HostCache, announcer: IndexAnnouncer, behind: Behind) -> None:
    """Has all of it shown at each scrape."""
    metrics.watch("store", partial(_gauges, host))
    metrics.watch("index", announcer.statistics)
    metrics.watch("prefetch", behind.prefetching.statistics)
    metrics.watch("backlog", behind.backlog.statistics)
    metrics.watch("storage", partial(_storage_gauges, host))
    metrics.watch("fetch", lambda: FetchGauges(behind.fetches.num_units, behind.fetches.num_bytes))
    for kind in Kind:
        metrics.watch(f"{kind}", partial(_kind_gauges, host, behind.prefetching, kind))
    for tier in (Tier.STORAGE, Tier.PEER):
        metrics.watch(f"from_{tier}", partial(_traffic_gauges, behind.prefetching, tier))


def _gauges(host: HostCache) -> HostGauges:
    if not host.is_laid_out:
        return HostGauges(host.arena.num_bytes, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(host.workers))
    store, counts = host.store, host.store.statistics()
    used = {kind: each.total - each.free for kind, each in counts.kinds.items()}
    return HostGauges(
        arena_bytes=host.arena.num_bytes,
        used_bytes=sum(store.layout.slot_bytes(kind) * count for kind, count in used.items()),
        num_units=sum(each.resident for each in counts.kinds.values()),
        num_leases=counts.num_leases,
        num_reservations=counts.num_reservations,
        num_quarantined=counts.num_quarantined,
        num_hits=counts.num_hits,
        num_misses=counts.num_misses,
        num_stored=counts.num_stored,
        num_evicted=counts.num_evicted,
        num_corrupt=counts.num_corrupt,
        num_workers=len(host.workers),
    )


def _storage_gauges(host: HostCache) -> StorageGauges:
    counts = host.storage.statistics()
    return StorageGauges(
        **{field.name: getattr(counts, field.name) for field in fields(StorageGauges)}
    )


def _kind_gauges(host: HostCache, prefetching: Prefetching, kind: Kind) -> KindGauges:
    here, counts, slot_bytes = NO_UNITS, KindCounts(), 0
    if host.is_laid_out and kind in host.store.manifest.kinds:
        here, counts = host.store.kind_statistics(kind), host.store.counts(kind)
        slot_bytes = host.store.layout.slot_bytes(kind)
    brought = prefetching.tally.brought_units
    there = host.storage.statistics().kinds.get(kind, StorageKindStatistics())
    return KindGauges(
        host_units=here.resident,
        host_free=here.free,
        host_bytes=here.resident * slot_bytes,
        host_hits=counts.num_hits,
        host_stored=counts.num_stored,
        host_evicted=counts.num_evicted,
        host_corrupt=counts.num_corrupt,
        host_truncated=prefetching.tally.lacking_units[kind],
        from_storage_units=brought[Tier.STORAGE, kind],
        from_storage_bytes=brought[Tier.STORAGE, kind] * slot_bytes,
        from_peer_units=brought[Tier.PEER, kind],
        from_peer_bytes=brought[Tier.PEER, kind] * slot_bytes,
        storage_units=there.num_units,
        storage_bytes=there.num_bytes,
        storage_hits=there.num_hits,
        storage_misses=there.num_misses,
        storage_stored=there.num_stored,
        storage_evicted=there.num_evicted,
        storage_corrupt=there.num_corrupt,
        storage_truncated=there.num_truncated,
    )


def _traffic_gauges(prefetching: Prefetching, tier: Tier) -> TrafficGauges:
    traffic = prefetching.tally.traffic.get(tier, Traffic())
    return TrafficGauges(traffic.num_units, traffic.num_bytes, traffic.seconds)


def ledger(host: HostCache) -> Answer:
    """Who holds what, per pool, and whether it adds up."""
    kinds = host.store.statistics().kinds if host.is_laid_out else {}
    pools = {kind.value: asdict(each) for kind, each in kinds.items()}
    balances = all(
        each.total == each.free + each.resident + each.reserved + each.leaving
        for each in kinds.values()
    )
    return json_answer(
        {"epoch": host.identity.epoch, "balances": balances, "pools": pools},
        200 if balances else 500,
    )


def make_beat(
    host: HostCache, prefetching: Prefetching, *, worker_id: str, address: str, beats: int
) -> Beat:
    """What the router learns once a second. A byte's cost is 0 before any was brought."""
    state, free, page_bytes, snapshot_bytes = NO_STATE, {}, 0, 0
    if host.is_laid_out:
        state = ServedState.of(host.store.manifest)
        free = {kind: host.store.num_free(kind) for kind in host.store.manifest.kinds}
        sizes = {kind: host.store.layout.slot_bytes(kind) for kind in host.store.manifest.kinds}
        page_bytes = sum(sizes.get(kind, 0) for kind in (Kind.FULL, Kind.WINDOW))
        snapshot_bytes = sizes.get(Kind.RECURRENT, 0)
    return Beat(
        role=ROLE,
        worker_id=worker_id,
        epoch=host.identity.epoch,
        address=address,
        is_ready=True,
        state=state,
        max_len=0,
        num_steps=beats,
        free_slots=free,
        node=host.identity.node_id,
        storage_seconds_per_byte=prefetching.tally.seconds_per_byte(Tier.STORAGE),
        peer_seconds_per_byte=prefetching.tally.seconds_per_byte(Tier.PEER),
        page_bytes=page_bytes,
        snapshot_bytes=snapshot_bytes,
        prefetch_threshold=prefetching.wish.threshold_tokens,
    )
