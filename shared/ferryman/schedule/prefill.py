"""Chunked prefill: which parts of which prompts one step computes.

Chunks are cut on the absolute scan grid, counted from position 0 and never from a request's own
start, so that states of different requests coincide bit for bit. Only a prompt's end is ragged.
"""

from __future__ import annotations

import numpy as np

from ferryman.cache.window_budget import chunk_end
from ferryman.schedule import windows
from ferryman.schedule.batch import Chunk, Draw, PrefillStep, Snapshot
from ferryman.schedule.opening import OpsDraft, open_prompt
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Goal, Phase, Running


def next_end(sequence: Running, budget: int, grid: int) -> int:
    """Where the next chunk ends, if the step has room for `budget` tokens more."""
    length = min(budget, sequence.plan.chunk_len)
    return chunk_end(sequence.scheduled, length, sequence.prompt_len, grid)


def cut_chunk(residence: Residence, sequence: Running, end: int, draft: OpsDraft) -> Chunk:
    """Schedules [scheduled, end) of a prompt; the first chunk carries the opening operations."""
    start = sequence.scheduled
    if start == sequence.plan.position:
        open_prompt(sequence, draft)
    windows.slide(residence, sequence, start)
    windows.cover(residence, sequence, start, end)
    chunk = Chunk(
        request_id=sequence.request_id,
        row=sequence.row,
        start=start,
        end=end,
        token_ids=sequence.request.token_ids[start:end],
        working_slot=sequence.working_slot,
        snapshots=_snapshots(sequence, start, end),
        draws=_last_draw(sequence) if end == sequence.prompt_len else (),
    )
    _advance(residence, sequence, end)
    return chunk


def _snapshots(sequence: Running, start: int, end: int) -> tuple[Snapshot, ...]:
    return tuple(
        Snapshot(sequence.working_slot, handle.slot, position)
        for position, handle in sorted(sequence.snapshots.items())
        if start < position <= end
    )


def _last_draw(sequence: Running) -> tuple[Draw, ...]:
    request = sequence.request
    return (Draw(sequence.row, request.prompt_len, sequence.first_output, request.sampling),)


def _advance(residence: Residence, sequence: Running, end: int) -> None:
    sequence.scheduled = end
    sequence.in_flight += 1
    residence.rows.positions[sequence.row] = end
    if end == sequence.prompt_len:
        sequence.draws_submitted = 1
        if sequence.goal is Goal.DECODE:
            sequence.phase = Phase.DECODING


def build_step(
    residence: Residence, step_id: int, chunks: list[Chunk], draft: OpsDraft
) -> PrefillStep:
    """The page tables are copied as of now; nothing in the step changes afterwards."""
    num_pages = -(-max(chunk.end for chunk in chunks) // residence.manifest.page_size)
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    return PrefillStep(
        step_id, draft.finish(), tuple(chunks), residence.rows.page_tables(rows, num_pages)
    )
