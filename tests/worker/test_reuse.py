"""The tier that reused tokens are counted for, and the reasons for tokens from no tier."""

from __future__ import annotations

import pytest
from tests.doubles.stamps import fake_manifest

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import ClearState, CopyState, LoadState, Reason, ResumePlan, Uncached
from ferryman.cache.units import HostUnit, Tier
from ferryman.handoff.usage import CachedTokens
from ferryman.runtime.metrics import Metrics
from ferryman.tiers.prefetch_values import Prefetched, Traffic
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.summary import cached_tokens, plan_facts, tier_of

PAGE = 4
HYBRID = fake_manifest(PAGE)
KEY = PageKey(bytes(16))


def unit(kind: Kind, page: int, origin: Tier) -> HostUnit:
    return HostUnit(kind, page, KEY, 0, 100, bytes(16), origin)


def plan_of(position: int, anchor: int, *loads: HostUnit, prompt_len: int = 30) -> ResumePlan:
    state = [each for each in loads if each.kind is Kind.RECURRENT]
    start = LoadState(state[0]) if state else CopyState(KEY) if position else ClearState()
    return ResumePlan(
        position=position,
        prompt_len=prompt_len,
        anchor_pages=anchor,
        window_pages=(),
        loads=loads,
        initialiser=start,
        snapshots=(),
        uncached=(Uncached(Reason.NEVER_SEEN, position // PAGE, -(-prompt_len // PAGE)),),
        demand={Kind.FULL: 3, Kind.RECURRENT: 1},
        seconds=0.0,
        final_len=prompt_len,
        chunk_len=PAGE,
        load_bytes=sum(each.num_bytes for each in loads),
    )


MIXED = plan_of(
    20,
    1,
    unit(Kind.FULL, 1, Tier.HOST),
    unit(Kind.FULL, 2, Tier.STORAGE),
    unit(Kind.FULL, 3, Tier.PEER),
    unit(Kind.FULL, 4, Tier.PEER),
    unit(Kind.RECURRENT, 4, Tier.PEER),
)


@pytest.mark.parametrize(
    ("plan", "cached", "tier"),
    [
        pytest.param(plan_of(0, 0), CachedTokens(), "none", id="cold"),
        pytest.param(plan_of(8, 2), CachedTokens(device=8), "device", id="device"),
        pytest.param(MIXED, CachedTokens(4, 4, 4, 8), "peer", id="every tier a part"),
        pytest.param(
            plan_of(8, 2, unit(Kind.RECURRENT, 1, Tier.STORAGE)),
            CachedTokens(device=8),
            "storage",
            id="pages here, only the state from storage",
        ),
    ],
)
def test_tokens_count_for_the_tier_that_their_pages_came_from(
    plan: ResumePlan, cached: CachedTokens, tier: str
) -> None:
    found = cached_tokens(HYBRID, plan)
    assert found == cached
    assert found.total == plan.position <= plan.prompt_len
    assert tier_of(plan) == tier
    facts = plan_facts(HYBRID, plan)
    assert facts["load_bytes"] == plan.load_bytes
    assert facts["cached"] == {name: n for name, n in cached.by_tier.items() if n}


def metric(metrics: Metrics, name: str) -> float:
    for line in metrics.render().decode().splitlines():
        if line.startswith(f"ferryman_prefill_{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


def test_plans_are_counted_by_tier_kind_and_reason() -> None:
    cache_metrics = CacheMetrics(HYBRID, metrics := Metrics("prefill"))
    cache_metrics.planned(MIXED)
    assert metric(metrics, 'cached_tokens_total{tier="peer"}') == 8
    assert metric(metrics, 'uncached_tokens_total{reason="never_seen"}') == 10
    assert metric(metrics, 'loaded_bytes_total{kind="full",tier="peer"}') == 200
    assert metric(metrics, 'loaded_units_total{kind="recurrent",tier="peer"}') == 1
    assert metric(metrics, 'plans_total{tier="peer"}') == 1


def test_what_a_prefetch_lacks_is_counted_by_reason() -> None:
    cache_metrics = CacheMetrics(HYBRID, metrics := Metrics("prefill"))
    traffic = {Tier.STORAGE: Traffic(3, 300, 0.1)}
    cache_metrics.prefetched(Prefetched(1, 8, 4, 4, True, "host_full", traffic))
    cache_metrics.prefetched(Prefetched(1, 1, 1, 1))
    assert metric(metrics, 'prefetches_total{outcome="brought"}') == 1
    assert metric(metrics, 'prefetches_total{outcome="nothing"}') == 1
    assert metric(metrics, 'prefetch_truncations_total{reason="host_full"}') == 1
    assert metric(metrics, 'prefetch_lacking_tokens_total{reason="host_full"}') == 16
    assert metric(metrics, 'prefetched_bytes_total{tier="storage"}') == 300


def test_units_of_the_device_tier_count_by_kind_when_reused_and_when_they_leave() -> None:
    cache_metrics = CacheMetrics(HYBRID, metrics := Metrics("prefill"))
    cache_metrics.planned(plan_of(8, 2))
    cache_metrics.planned(plan_of(0, 0))
    cache_metrics.changed(
        [TreeChange(Kind.FULL, (KEY,), True), TreeChange(Kind.FULL, (KEY, KEY), False)]
    )
    said = metrics.render().decode()
    assert 'ferryman_prefill_reused_units_total{kind="full"} 2.0' in said
    assert 'ferryman_prefill_reused_units_total{kind="recurrent"} 1.0' in said
    assert 'ferryman_prefill_evicted_units_total{kind="full"} 2.0' in said
