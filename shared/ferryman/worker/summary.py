"""A resume plan for other components: in messages, in usage, in lifecycle events."""

from __future__ import annotations

from collections import Counter

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import (
    ClearState,
    CopyState,
    LoadState,
    Reason,
    ReceiveState,
    ResumePlan,
)
from ferryman.cache.units import Tier
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.runtime.lifecycle import Fact
from ferryman.tiers.prefetch_values import Prefetched
from ferryman.wire.values import UncachedPages, Usage

# Reasons of plans that keep nothing.
_NOTHING_KEPT = (Reason.CACHE_OFF, Reason.QUARANTINED)
_WORDS = {ClearState: "clear", CopyState: "copy", LoadState: "load", ReceiveState: "receive"}


def uncached_pages(plan: ResumePlan) -> tuple[UncachedPages, ...]:
    pages: Counter[str] = Counter()
    for span in plan.uncached:
        pages[str(span.reason)] += span.end_page - span.first_page
    return tuple(UncachedPages(reason, count) for reason, count in pages.items())


def cached_tokens(manifest: StateManifest, plan: ResumePlan) -> CachedTokens:
    """Reused tokens by the tier their pages came from; together they are the plan's position."""
    page_size, tokens = manifest.page_size, Counter[str]()
    end_page = plan.position // page_size
    origins = {unit.page_index: unit.origin for unit in plan.loads if unit.kind is Kind.FULL}
    state = [unit.origin for unit in plan.loads if unit.kind is Kind.RECURRENT]
    otherwise = state[0] if state else Tier.HOST
    for page in range(plan.anchor_pages, end_page):
        tokens[origins.get(page, otherwise)] += page_size
    on_device = min(plan.position, plan.anchor_pages * page_size)
    return CachedTokens(on_device, tokens[Tier.HOST], tokens[Tier.STORAGE], tokens[Tier.PEER])


def held_tokens(manifest: StateManifest, plan: ResumePlan) -> CachedTokens:
    """Tokens whose pages a decode worker has or loads itself, by the plan of a hand-off to it. A
    recurrent state is always sent, and a window is no beginning of a prompt."""
    if Kind.FULL not in manifest.kinds:
        return NONE_CACHED
    pages = Counter(unit.origin for unit in plan.loads if unit.kind is Kind.FULL)
    counts = (plan.anchor_pages, pages[Tier.HOST], pages[Tier.STORAGE], pages[Tier.PEER])
    return CachedTokens(*(count * manifest.page_size for count in counts))


_SLOWEST_FIRST = (Tier.PEER, Tier.STORAGE, Tier.HOST)


def tier_of(plan: ResumePlan) -> str:
    """The slowest tier that a resume loads from: device without loads, none when all is
    computed."""
    origins = {unit.origin for unit in plan.loads}
    for tier in _SLOWEST_FIRST:
        if tier in origins:
            return str(tier)
    return "device" if plan.position else "none"


def kept_tokens(manifest: StateManifest, plan: ResumePlan) -> int:
    """The deepest position of a prompt at which its state is kept for later requests."""
    reasons = [gap.reason for gap in plan.uncached]
    if reasons == [Reason.NO_ROOM] and not plan.position:
        return 0
    if any(reason in _NOTHING_KEPT for reason in reasons):
        return 0
    if {Kind.RECURRENT, Kind.WINDOW} & set(manifest.kinds):
        return max(plan.snapshots, default=plan.position)
    return plan.prompt_len // manifest.page_size * manifest.page_size


def prompt_usage(manifest: StateManifest, plan: ResumePlan) -> Usage:
    return Usage(
        prompt_tokens=plan.prompt_len,
        cached=cached_tokens(manifest, plan),
        uncached=uncached_pages(plan),
        kept_tokens=kept_tokens(manifest, plan),
    )


def plan_facts(manifest: StateManifest, plan: ResumePlan) -> dict[str, Fact]:
    """The plan as named facts of the `admitted` event."""
    cached = cached_tokens(manifest, plan).by_tier
    reused = {
        Kind.FULL: plan.anchor_pages,
        Kind.WINDOW: len(plan.window_pages),
        Kind.RECURRENT: int(isinstance(plan.initialiser, CopyState)),
    }
    loaded = Counter(unit.kind for unit in plan.loads)
    return {
        "exactness": manifest.exactness.value,
        "position": plan.position,
        "prompt_len": plan.prompt_len,
        "recurrent": _WORDS[type(plan.initialiser)],
        "reused": {str(kind): reused[kind] for kind in manifest.kinds},
        "loaded": {str(kind): loaded[kind] for kind in manifest.kinds},
        "allocated": {str(kind): plan.demand[kind] for kind in manifest.kinds},
        "uncached": {gap.reason: gap.pages for gap in uncached_pages(plan)},
        "snapshots": list(plan.snapshots),
        "cached": {tier: tokens for tier, tokens in cached.items() if tokens},
        "load_bytes": plan.load_bytes,
        "load_seconds": round(plan.load_seconds, 6),
        "compute_seconds": round(plan.compute_seconds, 6),
        "recompute_seconds": round(plan.recompute_seconds, 6),
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
        "bytes": {str(tier): moved.num_bytes for tier, moved in brought.traffic.items()},
    }
