"""Audits: a request that reused state is computed again, cold, and its slots are compared.

    a chosen request ends ──► its last resume set stays leased ──► the same tokens are computed in
    fresh slots, chunk by chunk ──► AuditReady: the worker compares both, and calls `close`

The answer's tokens are compared, too: each is drawn again, by the request's own parameters, its
seed and its place. A read that went wrong in the last layer shows in them alone, because no state
comes after it.

One audit at a time. It never stands in the way of a request: its chunks come when no request is
here, or after a share of their steps, and it is dropped at once when its slots or its row are
needed. Nothing of it is published, drawn or resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, Reason, ResumePlan
from ferryman.cache.slots import Holder, SlotHandle
from ferryman.schedule import prefill
from ferryman.schedule.audit.budget import AuditBudget, is_chosen
from ferryman.schedule.audit.held_units import held_units, is_certain, reuse_of, slots_of
from ferryman.schedule.audit.open_audit import OpenAudit, audit_of
from ferryman.schedule.batch import (
    NO_DRAW,
    NO_TOKEN,
    AuditStep,
    SlotOpsBuilder,
    StepOutcome,
)
from ferryman.schedule.events import (
    AuditDone,
    AuditOpened,
    AuditPair,
    AuditReady,
    AuditResult,
    Event,
)
from ferryman.schedule.request_table import SequenceTable
from ferryman.schedule.sequence import Goal, PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator


class Audits:
    """The audits of one schedule; a share of 0 makes none."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequences: SequenceTable,
        planner: Planner,
        share: float,
        events: list[Event],
    ) -> None:
        self.budget = AuditBudget(share)
        self._allocator, self._sequences, self._planner = allocator, sequences, planner
        self._events = events
        self._open: OpenAudit | None = None
        allocator.give_way = self.drop

    # A request ends.

    def ended(self, sequence: RunningSequence) -> None:
        """A request has its last token. Called before its state is published and its slots go."""
        if not self.budget.share:
            return
        self.budget.earn(sequence.plan.position)
        name, reuse = sequence.request_id, reuse_of(sequence)
        if not reuse or not is_chosen(name, self.budget.share):
            return
        can_begin = self._open is None and self.budget.is_left and is_certain(sequence)
        position = min(sequence.scheduled, sequence.prompt_len + len(sequence.drawn))
        units = held_units(self._allocator, sequence, position) if can_begin else ()
        if not units:
            self._events.append(AuditDone(name, AuditResult.SKIPPED))
            return
        audit = audit_of(sequence, position, units, reuse)
        self._allocator.pools.lease((unit.handle for unit in units), audit.holder)
        self._open = audit
        if fresh := self._allocator.pools.last_fresh(self._plan(audit).demand):
            audit.awaits_memory = True
            self._events.append(AuditOpened(name, fresh))

    def prepared(self, request_id: str) -> None:
        """The memory of the audit's slots was written to; the audit may have ended meanwhile."""
        if self._open is not None and self._open.name == request_id:
            self._open.awaits_memory = False

    # Computing it again.

    @property
    def is_due(self) -> bool:
        """Whether a chunk comes next: no request is here, or it is the turn of one."""
        sequences, audit = self._sequences, self._open
        if audit is None or sequences.waiting or sequences.prefilling:
            return False
        if audit.awaits_memory:
            return False
        if audit.cold is not None and audit.cold.scheduled == audit.position:
            return False
        return not sequences.decoding or self.budget.may_step_in

    @property
    def name(self) -> str:
        """The name of the open audit; empty if there is none."""
        return self._open.request.request_id if self._open else ""

    def plan(self, step_id: int, now: float) -> AuditStep | None:
        """The next chunk of an audit that is due; None if it finds no slots."""
        audit = self._open
        assert audit is not None, "an audit is due"
        if audit.cold is None and not self._begin(audit, now):
            return None
        cold = audit.cold
        assert cold is not None, "an audit that has begun has slots"
        grid, ops = self._allocator.manifest.scan_chunk, SlotOpsBuilder()
        start, end = cold.scheduled, prefill.next_end(cold, max(grid, audit.chunk_tokens), grid)
        chunk = prefill.cut_chunk(self._allocator, cold, end, ops)
        chunk = replace(chunk, draws=audit.draws(cold, start, end) or chunk.draws)
        self.budget.spend(end - start)
        step = prefill.build_step(self._allocator, step_id, [chunk], ops)
        return AuditStep(step_id, step.ops, step.chunks, step.page_tables, step.adapters)

    def _begin(self, audit: OpenAudit, now: float) -> bool:
        order = self._sequences.next_order()
        waiting = PendingRequest(
            order, audit.request, Goal.HAND_OFF, EMPTY_HOST, was_retracted=False
        )
        plan, headroom = self._plan(audit), len(self._sequences.decoding)
        audit.cold = self._allocator.try_admit(waiting, plan, audit.holder, headroom, now)
        return audit.cold is not None

    def _plan(self, audit: OpenAudit) -> ResumePlan:
        return self._planner.plan_cold(audit.position, Reason.CACHE_OFF)

    def computing(self) -> list[RunningSequence]:
        """The sequence that is computed again, while it has slots."""
        return [self._open.cold] if self._open and self._open.cold else []

    def leases(self) -> Iterator[tuple[SlotHandle, Holder]]:
        """All its leases: on the units that are compared, and on the slots of the cold ones."""
        if self._open is not None:
            for unit in self._open.units:
                yield unit.handle, self._open.holder
        for sequence in self.computing():
            for handle in sequence.slots():
                yield handle, sequence.holder

    def committed(self, plan: AuditStep, outcome: StepOutcome, sequence: RunningSequence) -> bool:
        """A chunk is computed. After the last one the worker compares. False if the state has no
        numbers, so that there is nothing to compare."""
        audit = self._open
        if audit is None or audit.cold is not sequence:
            return True  # it was dropped while the chunk ran
        tokens = [drawn.token_id for drawn in outcome.sampled]
        if outcome.failed or NO_TOKEN in tokens or NO_DRAW in tokens:
            return False
        audit.check(plan.draws, tokens)
        if sequence.scheduled == audit.position and not sequence.in_flight:
            cold = dict(slots_of(self._allocator, sequence, audit.position))
            pairs = (AuditPair(unit, cold[unit.kind, unit.index]) for unit in audit.units)
            self._events.append(
                AuditReady(
                    audit.name,
                    audit.first,
                    audit.position,
                    tuple(pairs),
                    audit.reuse,
                    audit.wrong_token,
                )
            )
        return True

    # Its end.

    def close(self, request_id: str) -> bool:
        """Gives the slots back after they were compared; False if that came to nothing because
        they were needed, and others may have written to them."""
        if self._open is None or self._open.name != request_id:
            return False
        self._give_back()
        return True

    def drop(self) -> bool:
        """Gives up the open audit, if there is one: its slots are needed."""
        if self._open is None:
            return False
        self._events.append(AuditDone(self._open.name, AuditResult.DROPPED))
        self._give_back()
        return True

    def _give_back(self) -> None:
        """The slots come back once no step in flight uses them."""
        assert self._open is not None, "there is an audit to end"
        audit, self._open = self._open, None
        self._allocator.retire((unit.handle for unit in audit.units), audit.holder)
        if audit.cold is not None:
            audit.cold.phase = Phase.DONE
            self._allocator.leave(audit.cold)
