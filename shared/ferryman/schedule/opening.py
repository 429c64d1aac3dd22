"""The slot operations with which a request enters its first step: exactly one initialiser."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import Clear, CopyFrom, LoadFrom, Receive
from ferryman.cache.units import HostUnit
from ferryman.schedule.batch import Copy, Load, RowSeed, SlotOps, Snapshot
from ferryman.schedule.sequence import Running


@dataclass(slots=True)
class OpsDraft:
    """Collects the operations of a step while it is planned."""

    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)
    seeds: list[RowSeed] = field(default_factory=list)
    saves: list[Snapshot] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def finish(self) -> SlotOps:
        return SlotOps(
            tuple(self.loads),
            tuple(self.copies),
            tuple(self.clears),
            tuple(self.seeds),
            tuple(self.saves),
            tuple(self.snapshots),
        )


def open_prompt(sequence: Running, draft: OpsDraft) -> None:
    """Loads, the initialiser of the working slot, and the history of what is not computed here."""
    plan = sequence.plan
    draft.loads += [
        Load(sequence.request_id, unit, _destination(sequence, unit)) for unit in plan.loads
    ]
    _initialise(sequence, draft)
    if plan.position:
        draft.seeds.append(RowSeed(sequence.row, sequence.request.token_ids[: plan.position]))


def open_received(sequence: Running, draft: OpsDraft) -> None:
    """A hand-off arrived: all its tokens, the first drawn one included, are known here."""
    draft.seeds.append(RowSeed(sequence.row, sequence.token_ids()))


def _destination(sequence: Running, unit: HostUnit) -> int:
    if unit.kind is Kind.RECURRENT:
        return sequence.working_slot
    return sequence.own[unit.kind][unit.page_index].slot


def _initialise(sequence: Running, draft: OpsDraft) -> None:
    if sequence.working is None:
        return
    match sequence.plan.initialiser:
        case Clear():
            draft.clears.append(sequence.working.slot)
        case CopyFrom():
            draft.copies.append(Copy(sequence.copy_source[0].slot, sequence.working.slot))
        case LoadFrom() | Receive():
            pass  # the load stands in `loads`; a hand-off has written the slot already
