"""Continuous-batching decode: one token of every running request a step, pages on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.schedule import windows
from ferryman.schedule.batch import DecodeStep, Draw, Ints, Snapshot
from ferryman.schedule.opening import OpsDraft, open_received
from ferryman.schedule.residence import Residence
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Phase, Running, Track


class DecodeSteps:
    """Plans steps over all that decode; a request has up to `max_tracks` slots for snapshots."""

    def __init__(
        self, residence: Residence, roster: Roster, retraction: Retraction, max_tracks: int
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._retraction = retraction
        has_snapshots = Kind.RECURRENT in residence.manifest.kinds
        self._max_tracks = max_tracks if has_snapshots else 0

    def ready(self, now: float) -> list[Running]:
        """Requests that may draw and have a page for it; the newest pay when none is left."""
        ready = [sequence for sequence in self._roster.decoding if sequence.may_draw]
        stalled = {id(s) for s in self._at_page(ready, offset=0) if not self._grow(s, now)}
        return [s for s in ready if id(s) not in stalled and s.phase is Phase.DECODING]

    def plan(self, step_id: int, ready: list[Running]) -> DecodeStep:
        """One step over `ready`, with what those newly adopted must first be told."""
        draft = OpsDraft()
        for sequence in self._roster.newly_adopted:
            open_received(sequence, draft)
        self._roster.newly_adopted.clear()
        if self._max_tracks:
            self._plan_tracks(ready, draft)
        return build_step(self._residence, step_id, ready, draft)

    def _at_page(self, sequences: list[Running], offset: int) -> list[Running]:
        """Those whose position + offset is a multiple of the page size."""
        rows = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
        positions = self._residence.rows.positions[rows] + offset
        page_size = self._residence.manifest.page_size
        return [sequences[i] for i in np.flatnonzero(positions % page_size == 0)]

    def _grow(self, sequence: Running, now: float) -> bool:
        if sequence.phase is not Phase.DECODING:
            return False
        position = int(self._residence.rows.positions[sequence.row])
        while not try_grow(self._residence, sequence, position):
            if self._retraction.is_keeping:
                return False  # what is being copied comes free when the copy ends
            victim = max(self._roster.decoding, key=lambda sequence: sequence.order)
            self._retraction.retract(victim, now)
            if victim is sequence or victim.phase is Phase.RETRACTING:
                return False
        return True

    def _plan_tracks(self, ready: list[Running], draft: OpsDraft) -> None:
        for sequence in self._at_page(ready, offset=1):
            position = int(self._residence.rows.positions[sequence.row]) + 1
            draft.snapshots += track(self._residence, sequence, position, self._max_tracks)


def try_grow(residence: Residence, sequence: Running, position: int) -> bool:
    """Makes sure that `position` has a page of every kind; False when no full page is left.

    Window pages never lack: the request has the slots of all that it will hold at once.
    """
    page = position // residence.manifest.page_size
    if page not in sequence.own.get(Kind.FULL, (page,)):
        taken = residence.try_take({Kind.FULL: 1}, sequence.holder)
        if taken is None:
            return False
        handle = sequence.own[Kind.FULL][page] = taken[Kind.FULL][0]
        residence.rows.set_page(Kind.FULL, sequence.row, page, handle.slot)
    windows.slide(residence, sequence, position)
    windows.cover(residence, sequence, position, position + 1)
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
    working = table.working[rows]
    step = DecodeStep(
        step_id=step_id,
        ops=draft.finish(),
        request_ids=tuple([s.request.request_id for s in sequences]),
        rows=rows,
        positions=positions,
        read_slots=working,
        write_slots=working,
        waves=(len(sequences),),
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
