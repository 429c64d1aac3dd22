"""Chunked prefill: cuts prompts into the chunks that one step computes.

Chunks are cut on the absolute scan grid, counted from position 0 and never from a request's own
start, so that states of different requests coincide bit for bit. Only a prompt's end is ragged.
"""

from __future__ import annotations

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.cache.resume import ClearState, CopyState, LoadState, ReceiveState
from ferryman.cache.units import HostUnit
from ferryman.cache.window_budget import chunk_end
from ferryman.schedule import windows
from ferryman.schedule.batch import (
    Chunk,
    PrefillStep,
    RowSeed,
    SampleRequest,
    SlotCopy,
    SlotLoad,
    SlotOpsBuilder,
    SlotSnapshot,
)
from ferryman.schedule.prompt_scores import ScoreRequest
from ferryman.schedule.sequence import Goal, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator


def next_end(sequence: RunningSequence, budget: int, grid: int) -> int:
    """The end of the next chunk, if the step has room for `budget` tokens more."""
    length = min(budget, sequence.plan.chunk_len)
    return chunk_end(sequence.scheduled, length, sequence.prompt_len, grid)


def cut_chunk(
    allocator: SlotAllocator, sequence: RunningSequence, end: int, draft: SlotOpsBuilder
) -> Chunk:
    """Schedules [scheduled, end) of a prompt; the first chunk carries the opening operations."""
    start = sequence.scheduled
    if start == sequence.plan.position:
        first_chunk_ops(sequence, draft)
    windows.slide(allocator, sequence, start)
    windows.cover(allocator, sequence, start, end)
    chunk = Chunk(
        request_id=sequence.request_id,
        row=sequence.row,
        start=start,
        end=end,
        token_ids=sequence.request.token_ids[start:end],
        working_slot=sequence.working_slot,
        snapshots=_snapshots(sequence, start, end),
        draws=_last_draw(sequence) if end == sequence.prompt_len else (),
        scores=_scores(sequence, start, end),
    )
    _advance(allocator, sequence, end)
    return chunk


def first_chunk_ops(sequence: RunningSequence, draft: SlotOpsBuilder) -> None:
    """Loads, the initialiser of the working slot, and the history of tokens that are not computed
    here."""
    plan = sequence.plan
    draft.loads += [
        SlotLoad(sequence.request_id, unit, _destination(sequence, unit)) for unit in plan.loads
    ]
    _initialise(sequence, draft)
    if plan.position:
        draft.seeds.append(RowSeed(sequence.row, sequence.request.token_ids[: plan.position]))


def _destination(sequence: RunningSequence, unit: HostUnit) -> int:
    if unit.kind is Kind.RECURRENT:
        return sequence.working_slot
    return sequence.own[unit.kind][unit.page_index].slot


def _initialise(sequence: RunningSequence, draft: SlotOpsBuilder) -> None:
    if sequence.working is None:
        return
    match sequence.plan.initialiser:
        case ClearState():
            draft.clears.append(sequence.working.slot)
        case CopyState():
            draft.copies.append(SlotCopy(sequence.copy_source[0].slot, sequence.working.slot))
        case LoadState() | ReceiveState():
            pass  # the load stands in `loads`; a hand-off has written the slot already


def _snapshots(sequence: RunningSequence, start: int, end: int) -> tuple[SlotSnapshot, ...]:
    return tuple(
        SlotSnapshot(sequence.working_slot, handle.slot, position)
        for position, handle in sorted(sequence.snapshots.items())
        if start < position <= end
    )


def _scores(sequence: RunningSequence, start: int, end: int) -> tuple[ScoreRequest, ...]:
    """A row scores the token after it, which is known even at the chunk's end: so no hidden state
    has to be carried to the next chunk."""
    num_best = sequence.request.prompt_logprobs
    targets = sequence.request.token_ids[start + 1 : end + 1]
    if num_best is None or not len(targets):
        return ()
    return (ScoreRequest(start + 1, targets, num_best),)


def _last_draw(sequence: RunningSequence) -> tuple[SampleRequest, ...]:
    request = sequence.request
    return (
        SampleRequest(
            sequence.row,
            request.prompt_len,
            sequence.first_output,
            request.sampling,
            request.stop_token_ids,
            sequence.order,
        ),
    )


def _advance(allocator: SlotAllocator, sequence: RunningSequence, end: int) -> None:
    sequence.scheduled = end
    sequence.in_flight += 1
    allocator.rows.positions[sequence.row] = end
    if end == sequence.prompt_len:
        sequence.draws_submitted = 1
        if sequence.goal is Goal.DECODE:
            sequence.phase = Phase.DECODING


def build_step(
    allocator: SlotAllocator, step_id: int, chunks: list[Chunk], draft: SlotOpsBuilder
) -> PrefillStep:
    """The page tables are copied as of now; nothing in the step changes afterwards."""
    num_pages = -(-max(chunk.end for chunk in chunks) // allocator.manifest.page_size)
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    return PrefillStep(
        step_id,
        draft.finish(),
        tuple(chunks),
        allocator.rows.page_tables(rows, num_pages),
        allocator.rows.adapters[rows],
    )
