"""The part of each request in a step of either kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import (
    AuditStep,
    DecodeStep,
    Ints,
    PrefillStep,
    SampleRequest,
    SlotSnapshot,
    StepPlan,
    halves_of,
)

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StepPart:
    """One request's share of a step: it consumes the tokens [start, end) of its row.

    The recurrent state at `start` is read at `read_slot`, the one at `end` written at `write_slot`.
    An audit may draw the token behind any of them, others behind the last one.
    """

    request_id: str
    row: int
    start: int
    end: int
    read_slot: int
    write_slot: int
    tables: Mapping[Kind, Ints]
    snapshots: tuple[SlotSnapshot, ...]
    draws: tuple[SampleRequest, ...]
    is_audit: bool = False


def parts_of(plan: StepPlan) -> Iterator[StepPart]:
    for half in halves_of(plan):
        yield from _chunk_parts(half) if isinstance(half, PrefillStep) else _decode_parts(half)


def _chunk_parts(plan: PrefillStep) -> Iterator[StepPart]:
    for index, chunk in enumerate(plan.chunks):
        tables = {kind: table[index] for kind, table in plan.page_tables.items()}
        yield StepPart(
            chunk.request_id,
            chunk.row,
            chunk.start,
            chunk.end,
            chunk.working_slot,
            chunk.working_slot,
            tables,
            chunk.snapshots,
            chunk.draws,
            isinstance(plan, AuditStep),
        )


def _decode_parts(plan: DecodeStep) -> Iterator[StepPart]:
    """One part a token, wave after wave."""
    rows, positions = plan.rows.tolist(), plan.positions.tolist()
    reads, writes = plan.read_slots.tolist(), plan.write_slots.tolist()
    request_ids = [name for size in plan.verify_depths for name in plan.request_ids[:size]]
    for index, request_id in enumerate(request_ids):
        tables = {kind: table[index] for kind, table in plan.page_tables.items()}
        at, slots = positions[index], (reads[index], writes[index])
        draws = (plan.draws[index],)
        yield StepPart(request_id, rows[index], at, at + 1, *slots, tables, (), draws)
