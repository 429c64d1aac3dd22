"""Faults of reuse, planted in a running engine. Each says how often it struck.

Most are other integers in a plan: the device then does what it is told. The plans of audits
are left as they are, because a fault of reuse cannot strike where nothing is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.engine.audited_engine import AuditedEngine

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.batch import (
    AuditStep,
    DecodeStep,
    PrefillStep,
    Sampled,
    SlotSnapshot,
    StepOutcome,
    StepPlan,
)
from ferryman.schedule.scheduler import Scheduler
from ferryman.schedule.sequence import RunningSequence


@dataclass
class Strikes:
    """How often a fault struck."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class ReuseFault:
    """A fault, and the tiny model and the drafts of the engine that it is planted in."""

    plant: Callable[[AuditedEngine, Strikes], None]
    model: str = "lfm2"
    draft: str = ""


Spoil = Callable[[Scheduler, StepPlan], StepPlan]


def in_plans(spoil: Spoil) -> Callable[[AuditedEngine, Strikes], None]:
    """A fault that changes the plans of requests."""

    def plant(engine: AuditedEngine, strikes: Strikes) -> None:
        scheduler = engine._engine.scheduler
        plan = scheduler.plan

        def spoilt(now: float) -> StepPlan | None:
            made = plan(now)
            if made is None or isinstance(made, AuditStep):
                return made
            other = spoil(scheduler, made)
            strikes.number += other is not made
            return other

        scheduler.plan = spoilt  # type: ignore[method-assign]

    return plant


def of_prompt(scheduler: Scheduler, plan: StepPlan) -> RunningSequence | None:
    """The one request of a prefill step."""
    if isinstance(plan, PrefillStep) and len(plan.chunks) == 1:
        return scheduler.sequences.by_id.get(plan.chunks[0].request_id)
    return None


def cached(scheduler: Scheduler, kind: Kind) -> Mapping[PageKey, SlotHandle]:
    tree = scheduler.allocator.tree
    return {key: tree.slot(kind, key) for each, key in tree.units() if each is kind}


def copied_from(plan: StepPlan, src: int) -> StepPlan:
    """The plan with another source of its one copy of a state."""
    assert isinstance(plan, PrefillStep), "of a prompt"
    (copy,) = plan.ops.copies
    return replace(plan, ops=replace(plan.ops, copies=(replace(copy, src=src),)))


def state_of_another_prefix(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    sequence = of_prompt(scheduler, plan)
    if sequence is None or not plan.ops.copies:
        return plan
    snapshots = cached(scheduler, Kind.RECURRENT)
    others = [h.slot for key, h in snapshots.items() if key not in sequence.keys]
    return copied_from(plan, others[0]) if others else plan


def stale_after_retraction(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    """A retracted request resumes with an earlier state of its own."""
    sequence = of_prompt(scheduler, plan)
    if sequence is None or not sequence.was_retracted or not plan.ops.copies:
        return plan
    snapshots = cached(scheduler, Kind.RECURRENT)
    own = [snapshots[key].slot for key in sequence.keys if key in snapshots]
    earlier = [slot for slot in own if slot != plan.ops.copies[0].src]
    return copied_from(plan, earlier[0]) if earlier else plan


@dataclass
class LateSnapshots:
    """A decode step freezes states one step late: they are a token older than their name."""

    waiting: list[SlotSnapshot] = field(default_factory=list)

    def __call__(self, scheduler: Scheduler, plan: StepPlan) -> StepPlan:
        if not isinstance(plan, DecodeStep):
            return plan
        late, self.waiting = tuple(self.waiting), list(plan.ops.snapshots)
        if not (late or self.waiting):
            return plan
        return replace(plan, ops=replace(plan.ops, snapshots=late))


def other_page(kind: Kind, index: int) -> Spoil:
    """A prompt that resumes reads another prefix's page: the one at `index` of those it reuses."""

    def spoil(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
        sequence = of_prompt(scheduler, plan)
        if sequence is None or not isinstance(plan, PrefillStep):
            return plan
        reused = sequence.plan.window_pages
        if kind is Kind.FULL:
            reused = tuple(range(sequence.plan.anchor_pages))
        pages = cached(scheduler, kind)
        others = [h.slot for key, h in pages.items() if key not in sequence.keys]
        if not reused or not others or plan.chunks[0].start != sequence.plan.position:
            return plan
        table = plan.page_tables[kind].copy()
        table[0, reused[index]] = others[0]
        return replace(plan, page_tables={**plan.page_tables, kind: table})

    return spoil


def wrong_unit_loaded(engine: AuditedEngine, strikes: Strikes) -> None:
    """The host's memory answers with another page's bytes, and their own digest."""

    def spoilt(keys: Sequence[PageKey]) -> HostView:
        units = dict(engine.host.view(keys).units)
        pages = [name for name in units if name[0] is Kind.FULL]
        if len(pages) > 1:
            first, second = units[pages[0]], units[pages[1]]
            units[pages[1]] = replace(second, offset=first.offset, digest=first.digest)
            strikes.number += 1
        return HostView(units)

    engine.view_of_host = spoilt  # type: ignore[method-assign]


def rejected_state_kept(engine: AuditedEngine, strikes: Strikes) -> None:
    """A request goes on with the state behind the first draft that was wrong."""
    scheduler = engine._engine.scheduler
    postprocessor = scheduler._postprocessor
    settled = postprocessor._settled

    def spoilt(
        sequence: RunningSequence, plan: DecodeStep, outcome: StepOutcome, index: int
    ) -> Sequence[Sampled]:
        kept = settled(sequence, plan, outcome, index)
        if sequence.working is not None and plan.num_drafts(index) >= len(kept):
            place = len(kept) - 1
            sequence.working, sequence.scratch[place] = sequence.scratch[place], sequence.working
            states = [sequence.working, *sequence.scratch]
            rows = scheduler.allocator.rows
            rows.states[sequence.row, : len(states)] = [handle.slot for handle in states]
            strikes.number += 1
        return kept

    postprocessor._settled = spoilt  # type: ignore[method-assign]


FAULTS: Mapping[str, ReuseFault] = {
    "the state of another prefix": ReuseFault(in_plans(state_of_another_prefix)),
    "a state aged by one token": ReuseFault(in_plans(LateSnapshots())),
    "a page of another prefix": ReuseFault(in_plans(other_page(Kind.FULL, 1))),
    "a window one page short": ReuseFault(in_plans(other_page(Kind.WINDOW, 0)), "gemma3"),
    "a wrong unit from the host": ReuseFault(wrong_unit_loaded),
    "a stale state after retraction": ReuseFault(in_plans(stale_after_retraction)),
    "the state of a rejected draft": ReuseFault(rejected_state_kept, draft="ngram"),
}
"""All that an engine alone can have; a hand-off without digests needs two workers."""
