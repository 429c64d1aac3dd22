"""Continuous-batching decode: one token of every running request a step, pages on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.schedule import windows
from ferryman.schedule.batch import DecodeStep, Draw, Ints, Snapshot
from ferryman.schedule.opening import OpsDraft
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Running, Track


def try_grow(residence: Residence, sequence: Running, position: int) -> bool:
    """Makes sure that `position` has a page of every kind; False when a pool has no slot left."""
    page = position // residence.manifest.page_size
    windows.slide(residence, sequence, position)
    demand = {
        kind: 1
        for kind, pages in sequence.own.items()
        if page not in pages and not (kind is Kind.WINDOW and sequence.spare)
    }
    taken = residence.try_take(demand, sequence.holder)
    if taken is None:
        return False
    sequence.spare += taken.get(Kind.WINDOW, ())
    windows.cover(residence, sequence, position, position + 1)
    for handle in taken.get(Kind.FULL, ()):
        sequence.own[Kind.FULL][page] = handle
        residence.rows.set_page(Kind.FULL, sequence.row, page, handle.slot)
    return True


def track(
    residence: Residence, sequence: Running, position: int, max_tracks: int
) -> tuple[Snapshot, ...]:
    """Freezes the state at `position`, a page's end, into a track slot, if there is one.

    The older of the track slots is overwritten; its name goes before the write is launched, so a
    state can never be found under the position of the one before it.
    """
    if len(sequence.tracks) < max_tracks:
        taken = residence.try_take({Kind.RECURRENT: 1}, sequence.holder)
        if taken is not None:
            sequence.tracks.append(Track(taken[Kind.RECURRENT][0], position))
            return (Snapshot(sequence.working_slot, sequence.tracks[-1].handle.slot, position),)
    if not sequence.tracks:
        return ()
    oldest = sequence.tracks.pop(0)
    sequence.tracks.append(Track(oldest.handle, position))
    return (Snapshot(sequence.working_slot, oldest.handle.slot, position),)


def build_step(
    residence: Residence, step_id: int, sequences: Sequence[Running], draft: OpsDraft
) -> DecodeStep:
    """One step over `sequences`, whose pages exist. Positions advance by one."""
    table, page_size = residence.rows, residence.manifest.page_size
    rows: Ints = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
    positions = table.positions[rows]
    num_pages = int(positions.max()) // page_size + 1
    step = DecodeStep(
        step_id=step_id,
        ops=draft.finish(),
        request_ids=tuple([s.request.request_id for s in sequences]),
        rows=rows,
        positions=positions,
        working_slots=table.working[rows],
        page_tables=table.page_tables(rows, num_pages),
        draws=_draws(sequences, positions),
    )
    table.positions[rows] += 1
    for sequence in sequences:
        sequence.in_flight += 1
        sequence.draws_submitted += 1
        sequence.scheduled += 1
    return step


def _draws(sequences: Sequence[Running], positions: Ints) -> tuple[Draw, ...]:
    return tuple(
        [
            Draw(s.row, position + 1, s.first_output, s.request.sampling)
            for s, position in zip(sequences, positions.tolist(), strict=True)
        ]
    )
