"""Every counter of a worker's reuse, by its exact figure.

Each sum below differs from all others, so a figure that is left out, counted twice, in another unit
or under another label shows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tests.doubles.stamps import fake_manifest

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import ClearState, CopyState, Reason, ResumePlan, Uncached
from ferryman.cache.units import HostUnit, Tier
from ferryman.runtime.metrics import Metrics
from ferryman.schedule.batch import LoadReport
from ferryman.tiers.prefetch_values import Prefetched, Traffic
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.loop import StepTimings

PAGE = 4
MANIFEST = fake_manifest(PAGE, kinds=tuple(Kind), window_len=8)
KEY = PageKey(bytes(16))
PREFIX = "ferryman_prefill_"


def _unit(kind: Kind, page: int, num_bytes: int, origin: Tier) -> HostUnit:
    return HostUnit(kind, page, KEY, 0, num_bytes, bytes(16), origin)


# 10 pages: 2 here, 1 from the host, 3 from storage, 4 from another node; then 8 tokens that nobody
# had, and 2 in a page that is not full.
PLAN = ResumePlan(
    position=10 * PAGE,
    prompt_len=10 * PAGE + 10,
    anchor_pages=2,
    window_pages=(1, 2, 3),
    loads=(
        _unit(Kind.FULL, 2, 100, Tier.HOST),
        *(_unit(Kind.FULL, page, 107, Tier.STORAGE) for page in range(3, 6)),
        *(_unit(Kind.FULL, page, 109, Tier.PEER) for page in range(6, 10)),
        _unit(Kind.WINDOW, 9, 31, Tier.STORAGE),
    ),
    initialiser=CopyState(KEY),
    snapshots=(),
    uncached=(Uncached(Reason.NEVER_SEEN, 10, 12), Uncached(Reason.PAGE_ALIGNMENT, 12, 13)),
    demand={},
    seconds=0.0,
    final_len=10 * PAGE + 10,
    chunk_len=PAGE,
)


def _samples(registry: CollectorRegistry) -> dict[str, float]:
    """Counters that have counted something, by their name and labels."""
    return {
        " ".join((sample.name.removeprefix(PREFIX), *sample.labels.values())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.value and not sample.name.endswith("_created")
    }


def test_a_plan_counts_each_token_and_unit_once_under_its_tier_and_kind() -> None:
    metrics = Metrics("prefill")
    CacheMetrics(MANIFEST, metrics).planned(PLAN)
    assert _samples(metrics.registry) == {
        "plans_total peer": 1,
        "cached_tokens_total device": 8,
        "cached_tokens_total host": 4,
        "cached_tokens_total storage": 12,
        "cached_tokens_total peer": 16,
        "uncached_tokens_total never_seen": 8,
        "uncached_tokens_total page_alignment": 2,
        "reused_units_total full": 2,
        "reused_units_total window": 3,
        "reused_units_total recurrent": 1,
        "loaded_units_total host full": 1,
        "loaded_units_total storage full": 3,
        "loaded_units_total peer full": 4,
        "loaded_units_total storage window": 1,
        "loaded_bytes_total host full": 100,
        "loaded_bytes_total storage full": 321,
        "loaded_bytes_total peer full": 436,
        "loaded_bytes_total storage window": 31,
    }


def test_a_plan_that_reuses_nothing_counts_as_such() -> None:
    metrics = Metrics("prefill")
    cold = PLAN._replace(
        position=0,
        anchor_pages=0,
        window_pages=(),
        loads=(),
        initialiser=ClearState(),
        uncached=(Uncached(Reason.NEVER_SEEN, 0, 13),),
    )
    CacheMetrics(MANIFEST, metrics).planned(cold)
    assert _samples(metrics.registry) == {
        "plans_total none": 1,
        "uncached_tokens_total never_seen": 50,
    }


def test_units_that_leave_the_device_count_by_kind_and_those_that_come_do_not() -> None:
    metrics = Metrics("prefill")
    CacheMetrics(MANIFEST, metrics).changed(
        [
            TreeChange(Kind.FULL, (KEY, KEY, KEY), False),
            TreeChange(Kind.WINDOW, (KEY, KEY), False),
            TreeChange(Kind.FULL, (KEY, KEY), False),
            TreeChange(Kind.RECURRENT, (KEY,), True),
        ]
    )
    assert _samples(metrics.registry) == {
        "evicted_units_total full": 5,
        "evicted_units_total window": 2,
    }


def test_a_prefetch_counts_its_bytes_by_tier_and_the_tokens_that_it_lacks_by_reason() -> None:
    """Page 1 of 8 was here, 5 came; a second one that brought all has no reason."""
    metrics = Metrics("prefill")
    counted = CacheMetrics(MANIFEST, metrics)
    traffic = {Tier.STORAGE: Traffic(3, 300, 0.5), Tier.PEER: Traffic(2, 70, 7.0)}
    counted.prefetched(Prefetched(1, 8, 6, 5, True, "host_full", traffic))
    counted.prefetched(Prefetched(1, 2, 2, 2, traffic={Tier.PEER: Traffic(1, 11, 1.0)}))
    assert _samples(metrics.registry) == {
        "prefetches_total brought": 2,
        "prefetch_truncations_total host_full": 1,
        "prefetch_lacking_tokens_total host_full": 12,
        "prefetched_bytes_total storage": 300,
        "prefetched_bytes_total peer": 81,
    }


def test_loads_from_the_host_add_up_their_bytes_and_seconds() -> None:
    metrics, pace = Metrics("prefill"), StepTimings()
    metrics.watch("loads", pace.statistics)
    pace.loaded(LoadReport(num_bytes=1000, seconds=0.25))
    pace.loaded(LoadReport(num_bytes=500, seconds=0.5))
    assert _samples(metrics.registry) == {"loads_bytes": 1500, "loads_seconds": 0.75}
