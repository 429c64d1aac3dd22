"""The things that happened to a worker on its way, counted by name, so that a test can insist."""

from __future__ import annotations

from collections import Counter

from tests.harness.schedule.watch import WatchedWorker

from ferryman.cache.resume import ClearState, Reason
from ferryman.schedule.events import Finished, LoadCorrupt, Retracted, SequenceAdmitted
from ferryman.schedule.request import FinishReason


def counts_of(worker: WatchedWorker) -> Counter[str]:
    """Of its requests, drafts and resume plans."""
    counts: Counter[str] = Counter()
    for event in worker.seen(SequenceAdmitted):
        counts += _counts_of_plan(worker, event)
    counts["retracted"] += len(worker.seen(Retracted))
    drafts = worker.scheduler.statistics().drafts
    counts["drafts accepted"] += drafts.accepted
    counts["drafts rejected"] += drafts.drafted - drafts.accepted
    counts["corrupt"] += len(worker.seen(LoadCorrupt))
    reasons = [event.reason for event in worker.seen(Finished)]
    counts["answered"] += sum(reason is not FinishReason.CANCELLED for reason in reasons)
    return counts


def _counts_of_plan(worker: WatchedWorker, event: SequenceAdmitted) -> Counter[str]:
    counts: Counter[str] = Counter()
    plan = event.plan
    counts["admitted"] += 1
    counts["resumed"] += event.is_resumed
    counts["hit"] += 0 < plan.position < plan.prompt_len
    counts["copied"] += not isinstance(plan.initialiser, ClearState) and not plan.loads
    counts["windows reused"] += bool(plan.window_pages)
    loaded = {unit.kind for unit in plan.loads}
    for kind in loaded:
        counts[f"loaded {kind}"] += 1
    counts["loaded one kind"] += len(loaded) == 1
    counts["reused and loaded"] += bool(loaded) and plan.anchor_pages > 0
    counts["shorter chunks"] += (
        plan.chunk_len < worker.scheduler.limits.chunk_tokens and plan.chunk_len > 0
    )
    reasons = {span.reason for span in plan.uncached}
    counts["declined"] += Reason.NO_ROOM in reasons
    counts["window lost"] += Reason.WINDOW_EVICTED in reasons
    return counts
