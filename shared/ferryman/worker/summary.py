"""A resume plan as others are told of it: in messages, in usage, in lifecycle events."""

from __future__ import annotations

from collections import Counter

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Clear, CopyFrom, LoadFrom, Receive, ResumePlan
from ferryman.cache.units import Tier
from ferryman.handoff.usage import CachedTokens
from ferryman.runtime.lifecycle import Fact
from ferryman.tiers.prefetch_values import Prefetched
from ferryman.wire.values import KindPlan, PlanSummary, UncachedPages, Usage

_WORDS = {Clear: "clear", CopyFrom: "copy", LoadFrom: "load", Receive: "receive"}


def plan_summary(manifest: StateManifest, plan: ResumePlan) -> PlanSummary:
    """Counts per kind; reasons merged."""
    return PlanSummary(
        position=plan.position,
        prompt_len=plan.prompt_len,
        recurrent=_WORDS[type(plan.initialiser)],
        kinds=tuple(_kind_plan(kind, plan) for kind in manifest.kinds),
        uncached=uncached_pages(plan),
        snapshots=plan.snapshots,
        cached=cached_tokens(manifest, plan),
        load_bytes=plan.load_bytes,
        load_seconds=plan.load_seconds,
        compute_seconds=plan.compute_seconds,
        recompute_seconds=plan.recompute_seconds,
    )


def _kind_plan(kind: Kind, plan: ResumePlan) -> KindPlan:
    reused = {
        Kind.FULL: plan.anchor_pages,
        Kind.WINDOW: len(plan.window_pages),
        Kind.RECURRENT: int(isinstance(plan.initialiser, CopyFrom)),
    }
    loaded = sum(unit.kind is kind for unit in plan.loads)
    return KindPlan(kind, reused[kind], loaded, plan.demand[kind])


def uncached_pages(plan: ResumePlan) -> tuple[UncachedPages, ...]:
    pages: Counter[str] = Counter()
    for span in plan.uncached:
        pages[str(span.reason)] += span.end_page - span.first_page
    return tuple(UncachedPages(reason, count) for reason, count in pages.items())


def cached_tokens(manifest: StateManifest, plan: ResumePlan) -> CachedTokens:
    """Reused tokens by the tier their pages came from; together they are the plan's position."""
    page_size, found = manifest.page_size, Counter[str]()
    end_page = plan.position // page_size
    origins = {unit.page_index: unit.origin for unit in plan.loads if unit.kind is Kind.FULL}
    state = [unit.origin for unit in plan.loads if unit.kind is Kind.RECURRENT]
    otherwise = state[0] if state else Tier.HOST
    for page in range(plan.anchor_pages, end_page):
        found[origins.get(page, otherwise)] += page_size
    on_device = min(plan.position, plan.anchor_pages * page_size)
    return CachedTokens(on_device, found[Tier.HOST], found[Tier.STORAGE], found[Tier.PEER])


_SLOWEST_FIRST = (Tier.PEER, Tier.STORAGE, Tier.HOST)


def tier_of(plan: ResumePlan) -> str:
    """The slowest tier that a resume draws on: device without loads, none when all is computed."""
    origins = {unit.origin for unit in plan.loads}
    for tier in _SLOWEST_FIRST:
        if tier in origins:
            return str(tier)
    return "device" if plan.position else "none"


def prompt_usage(manifest: StateManifest, plan: ResumePlan) -> Usage:
    return Usage(
        prompt_tokens=plan.prompt_len,
        cached=cached_tokens(manifest, plan),
        uncached=uncached_pages(plan),
    )


def plan_facts(summary: PlanSummary) -> dict[str, Fact]:
    """The plan as named facts of the `admitted` event."""
    return {
        "position": summary.position,
        "prompt_len": summary.prompt_len,
        "recurrent": summary.recurrent,
        "reused": {str(each.kind): each.reused for each in summary.kinds},
        "loaded": {str(each.kind): each.loaded for each in summary.kinds},
        "allocated": {str(each.kind): each.allocated for each in summary.kinds},
        "uncached": {each.reason: each.pages for each in summary.uncached},
        "snapshots": list(summary.snapshots),
        "cached": {tier: tokens for tier, tokens in summary.cached.by_tier.items() if tokens},
        "load_bytes": summary.load_bytes,
        "load_seconds": round(summary.load_seconds, 6),
        "compute_seconds": round(summary.compute_seconds, 6),
        "recompute_seconds": round(summary.recompute_seconds, 6),
    }


def prefetch_facts(brought: Prefetched, page_size: int) -> dict[str, Fact]:
    """A prefetch as named facts of the `prefetched` event, in tokens from the prompt's start."""
    return {
        "before": brought.before_pages * page_size,
        "asked": brought.asked_pages * page_size,
        "granted": brought.granted_pages * page_size,
        "brought": brought.brought_pages * page_size,
        "truncated": brought.is_truncated,
        "reason": brought.reason,
        "bytes": {str(tier): each.num_bytes for tier, each in brought.traffic.items()},
    }
