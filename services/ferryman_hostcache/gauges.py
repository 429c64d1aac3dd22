"""A host-cache's reports of itself: gauges, the ledger, its heartbeat."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.runtime.http_server import HttpAnswer, json_answer
from ferryman.runtime.metrics import Metrics
from ferryman.tiers.prefetch_values import Traffic
from ferryman.tiers.values import StoreStatistics, UnitCounts
from ferryman.wire.nats.heartbeat import NO_STATE, Heartbeat, ServedState
from ferryman_hostcache.host import HostCache
from ferryman_hostcache.index_publisher import IndexPublisher
from ferryman_hostcache.lower_tiers import LowerTiers
from ferryman_hostcache.prefetch_runner import PrefetchRunner
from ferryman_hostcache.shared_folders import SharedStatistics

ROLE = "hostcache"
NO_STORE = StoreStatistics({}, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ArenaGauges:
    """The arena, summed over the kinds."""

    arena_bytes: int
    used_bytes: int
    num_units: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class KindGauges:
    """Units of one kind in the host tier, units that prefetches brought there, and counts since the
    start. Truncated units got no room in a prefetch."""

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


@dataclass(frozen=True, slots=True)
class FetchGauges:
    """Units and bytes sent to other nodes since the start."""

    units: int
    bytes: int


def watch(
    metrics: Metrics, host: HostCache, publisher: IndexPublisher, lower_tiers: LowerTiers
) -> None:
    """Registers all gauges, which each scrape reads."""
    metrics.watch("store", partial(_arena_gauges, host))
    metrics.watch("store", lambda: host.store.statistics() if host.is_laid_out else NO_STORE)
    metrics.watch("index", publisher.statistics)
    metrics.watch("prefetch", lower_tiers.prefetching.statistics)
    metrics.watch("backlog", lower_tiers.backlog.statistics)
    metrics.watch("storage", host.storage.statistics)
    folders = lower_tiers.folders
    metrics.watch("shared", folders.statistics if folders else SharedStatistics)
    metrics.watch(
        "fetch", lambda: FetchGauges(lower_tiers.fetches.num_units, lower_tiers.fetches.num_bytes)
    )
    for kind in Kind:
        metrics.watch(f"{kind}", partial(_kind_gauges, host, lower_tiers.prefetching, kind))
        metrics.watch(f"{kind}_storage", partial(_storage_counts, host, kind))
    for tier in (Tier.STORAGE, Tier.PEER):
        metrics.watch(f"from_{tier}", partial(_traffic, lower_tiers.prefetching, tier))


def _arena_gauges(host: HostCache) -> ArenaGauges:
    if not host.is_laid_out:
        return ArenaGauges(host.arena.num_bytes, 0, 0, len(host.workers))
    store = host.store
    used = {kind: count - store.num_free(kind) for kind, count in store.layout.num_slots.items()}
    return ArenaGauges(
        arena_bytes=host.arena.num_bytes,
        used_bytes=sum(store.layout.slot_bytes(kind) * count for kind, count in used.items()),
        num_units=sum(store.counts(kind).num_units for kind in used),
        num_workers=len(host.workers),
    )


def _storage_counts(host: HostCache, kind: Kind) -> UnitCounts:
    return host.storage.statistics().kinds.get(kind, UnitCounts())


def _kind_gauges(host: HostCache, prefetching: PrefetchRunner, kind: Kind) -> KindGauges:
    counts, num_free, slot_bytes = UnitCounts(), 0, 0
    if host.is_laid_out and kind in host.store.manifest.kinds:
        counts, num_free = host.store.counts(kind), host.store.num_free(kind)
        slot_bytes = host.store.layout.slot_bytes(kind)
    brought = prefetching.tally.brought_units
    return KindGauges(
        host_units=counts.num_units,
        host_free=num_free,
        host_bytes=counts.num_bytes,
        host_hits=counts.num_hits,
        host_stored=counts.num_stored,
        host_evicted=counts.num_evicted,
        host_corrupt=counts.num_corrupt,
        host_truncated=prefetching.tally.lacking_units[kind],
        from_storage_units=brought[Tier.STORAGE, kind],
        from_storage_bytes=brought[Tier.STORAGE, kind] * slot_bytes,
        from_peer_units=brought[Tier.PEER, kind],
        from_peer_bytes=brought[Tier.PEER, kind] * slot_bytes,
    )


def _traffic(prefetching: PrefetchRunner, tier: Tier) -> Traffic:
    return prefetching.tally.traffic.get(tier, Traffic())


def ledger(host: HostCache) -> HttpAnswer:
    """The slots of each pool by use, and whether they add up."""
    kinds = host.store.statistics().kinds if host.is_laid_out else {}
    pools = {kind.value: asdict(counts) for kind, counts in kinds.items()}
    balances = all(
        pool.total == pool.free + pool.resident + pool.reserved + pool.leaving
        for pool in kinds.values()
    )
    return json_answer(
        {"epoch": host.identity.epoch, "balances": balances, "pools": pools},
        200 if balances else 500,
    )


class Beats:
    """A host-cache's heartbeats for the router; each counts as a step."""

    def __init__(
        self, host: HostCache, prefetching: PrefetchRunner, worker_id: str, address: str
    ) -> None:
        self._host, self._prefetching = host, prefetching
        self._worker_id, self._address = worker_id, address
        self._num_beats = 0

    def next(self) -> Heartbeat:
        """The next heartbeat. The cost of a byte is 0 before the first transfer."""
        self._num_beats += 1
        host, tally = self._host, self._prefetching.tally
        state, page_bytes, snapshot_bytes = NO_STATE, 0, 0
        free, pools = dict[Kind, int](), dict[Kind, int]()
        if host.is_laid_out:
            state = ServedState.of(host.store.manifest)
            free = {kind: host.store.num_free(kind) for kind in host.store.manifest.kinds}
            pools = dict(host.store.layout.num_slots)
            sizes = {kind: host.store.layout.slot_bytes(kind) for kind in host.store.manifest.kinds}
            page_bytes = sum(sizes.get(kind, 0) for kind in (Kind.FULL, Kind.WINDOW))
            snapshot_bytes = sizes.get(Kind.RECURRENT, 0)
        return Heartbeat(
            role=ROLE,
            worker_id=self._worker_id,
            epoch=host.identity.epoch,
            address=self._address,
            is_ready=True,
            state=state,
            max_len=0,
            num_steps=self._num_beats,
            free_slots=free,
            pool_slots=pools,
            node=host.identity.node_id,
            storage_seconds_per_byte=tally.seconds_per_byte(Tier.STORAGE),
            peer_seconds_per_byte=tally.seconds_per_byte(Tier.PEER),
            page_bytes=page_bytes,
            snapshot_bytes=snapshot_bytes,
            prefetch_threshold=self._prefetching.wish.threshold_tokens,
        )
