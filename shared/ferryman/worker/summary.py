"""A resume plan as others are told of it: in messages, in usage, in lifecycle events."""

from __future__ import annotations

from collections import Counter

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import Clear, CopyFrom, LoadFrom, Receive, ResumePlan
from ferryman.handoff.usage import CachedTokens
from ferryman.runtime.lifecycle import Fact
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
    on_device = min(plan.position, plan.anchor_pages * manifest.page_size)
    return CachedTokens(device=on_device, host=plan.position - on_device)


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
    }
