"""Slot operations of a step: checked for conflicts, and handed out once.

Each slot has one initialiser (load, copy or clear) and each destination one writer in a step. Two
are an error that names both, because otherwise the last one to run would silently win.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    MixedStep,
    PrefillStep,
    SlotCopy,
    SlotLoad,
    SlotOps,
    SlotSnapshot,
    StepPlan,
    halves_of,
)

NO_OPS = SlotOps()


@dataclass(frozen=True, slots=True)
class ClearSlot:
    """The clearing of a slot, as a party to a conflict."""


@dataclass(frozen=True, slots=True)
class AdvanceSlot:
    """The forward over one token or chunk, as a party to a conflict."""

    index: int


Party = SlotLoad | SlotCopy | ClearSlot | SlotSnapshot | AdvanceSlot
Claim = tuple[Kind, int, Party]


class SlotConflict(Exception):
    """Two operations of one step want the same slot."""

    def __init__(self, step_id: int, kind: Kind, slot: int, first: str, second: str) -> None:
        super().__init__(f"step {step_id}: {kind} slot {slot} is wanted by {first} and by {second}")
        self.kind = kind
        self.slot = slot
        self.operations = (first, second)


BEFORE_ALL = -4
"""Below all step ids: those of real steps count from 1, those of the warm-up end with -1."""


class OnceOnly:
    """Hands out a step's slot operations the first time the step runs, and nothing after that.

    Step ids only grow on a forward stream, so it is enough to remember the highest one.
    """

    def __init__(self) -> None:
        self._highest = BEFORE_ALL
        self.num_consumed = 0

    def consume(self, plan: StepPlan) -> StepPlan:
        """The plan to run now. Raises SlotConflict; a replayed plan loses its slot operations."""
        if plan.step_id <= self._highest:
            return without_ops(plan)
        check_slots(plan)
        self._highest = plan.step_id
        self.num_consumed += num_ops(plan)
        return plan


def without_ops(plan: StepPlan) -> StepPlan:
    """The same forward without its slot operations."""
    if isinstance(plan, MixedStep):
        return MixedStep(_chunks_without_ops(plan.prompts), replace(plan.tokens, ops=NO_OPS))
    if isinstance(plan, PrefillStep):
        return _chunks_without_ops(plan)
    return replace(plan, ops=NO_OPS)


def _chunks_without_ops(plan: PrefillStep) -> PrefillStep:
    chunks = tuple(replace(chunk, snapshots=()) for chunk in plan.chunks)
    return replace(plan, ops=NO_OPS, chunks=chunks)


def _chunks_of(plan: StepPlan) -> list[Chunk]:
    prompts = [half.chunks for half in halves_of(plan) if isinstance(half, PrefillStep)]
    return [chunk for chunks in prompts for chunk in chunks]


def snapshots_of(plan: StepPlan) -> tuple[SlotSnapshot, ...]:
    """All snapshots of a step, in the order in which they are written."""
    scanned = tuple(snapshot for chunk in _chunks_of(plan) for snapshot in chunk.snapshots)
    return plan.ops.saves + scanned + plan.ops.snapshots


def advanced_slots_of(plan: StepPlan) -> tuple[int, ...]:
    """The recurrent slots that the forward writes; -1 if a model has none."""
    slots = [chunk.working_slot for chunk in _chunks_of(plan)]
    for half in halves_of(plan):
        if isinstance(half, DecodeStep):
            slots += half.write_slots.tolist()
    return tuple(slots)


def num_ops(plan: StepPlan) -> int:
    ops = plan.ops
    in_prologue = len(ops.loads) + len(ops.copies) + len(ops.clears) + len(ops.seeds)
    return in_prologue + len(snapshots_of(plan))


def check_slots(plan: StepPlan) -> None:
    """Raises SlotConflict unless every slot has at most one initialiser and one writer."""
    initialised = list(_initialised(plan.ops))
    frozen: list[Claim] = [(Kind.RECURRENT, s.dst, s) for s in snapshots_of(plan)]
    advanced: list[Claim] = [
        (Kind.RECURRENT, slot, AdvanceSlot(index))
        for index, slot in enumerate(advanced_slots_of(plan))
        if slot >= 0
    ]
    _check_distinct(plan.step_id, initialised + frozen)
    _check_distinct(plan.step_id, advanced + frozen)
    _check_copy_sources(plan)


def _initialised(ops: SlotOps) -> Iterator[Claim]:
    for load in ops.loads:
        yield load.unit.kind, load.dst, load
    for copy in ops.copies:
        yield copy.kind, copy.dst, copy
    for slot in ops.clears:
        yield Kind.RECURRENT, slot, ClearSlot()


def _check_distinct(step_id: int, claims: Iterable[Claim]) -> None:
    first: dict[tuple[Kind, int], Party] = {}
    for kind, slot, party in claims:
        if (kind, slot) in first:
            before = first[kind, slot]
            raise SlotConflict(step_id, kind, slot, _described(before), _described(party))
        first[kind, slot] = party


def _check_copy_sources(plan: StepPlan) -> None:
    """Copies of a step run in no order, so no copy may read a slot that another one writes."""
    destinations = {(copy.kind, copy.dst): copy for copy in plan.ops.copies}
    for copy in plan.ops.copies:
        other = destinations.get((copy.kind, copy.src), copy)
        if other is not copy:
            writer = _described(other)
            reader = f"the copy to slot {copy.dst}, which reads it"
            raise SlotConflict(plan.step_id, copy.kind, copy.src, writer, reader)


def _described(party: Party) -> str:
    match party:
        case SlotLoad():
            return f"the load of page {party.unit.page_index} for {party.request_id}"
        case SlotCopy():
            return f"the copy from slot {party.src}"
        case ClearSlot():
            return "the clear"
        case SlotSnapshot():
            return f"the snapshot of slot {party.src} at {party.position}"
        case AdvanceSlot():
            return f"the forward of part {party.index}"
