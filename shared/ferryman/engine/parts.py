"""What each request does in a step, whichever kind of step it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import DecodeStep, Draw, Ints, PrefillStep, Snapshot, StepPlan

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a step: it consumes the tokens [start, end) of its row."""

    request_id: str
    row: int
    start: int
    end: int
    working_slot: int
    tables: Mapping[Kind, Ints]
    snapshots: tuple[Snapshot, ...]
    draws: tuple[Draw, ...]


def parts_of(plan: StepPlan) -> Iterator[Part]:
    if isinstance(plan, PrefillStep):
        for index, chunk in enumerate(plan.chunks):
            tables = {kind: table[index] for kind, table in plan.page_tables.items()}
            yield Part(
                chunk.request_id,
                chunk.row,
                chunk.start,
                chunk.end,
                chunk.working_slot,
                tables,
                chunk.snapshots,
                chunk.draws,
            )
        return
    yield from _decode_parts(plan)


def _decode_parts(plan: DecodeStep) -> Iterator[Part]:
    rows, positions = plan.rows.tolist(), plan.positions.tolist()
    slots = plan.working_slots.tolist()
    for index, request_id in enumerate(plan.request_ids):
        tables = {kind: table[index] for kind, table in plan.page_tables.items()}
        at = positions[index]
        draws = (plan.draws[index],)
        yield Part(request_id, rows[index], at, at + 1, slots[index], tables, (), draws)
