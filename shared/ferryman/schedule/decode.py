"""Continuous-batching decode: tokens of every running request a step, pages on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.schedule import windows
from ferryman.schedule.batch import DecodeStep, Draw, Ints
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.opening import OpsDraft, open_received
from ferryman.schedule.residence import Residence
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Phase, Running
from ferryman.schedule.verification import Verification

Run = tuple[Running, Sequence[int]]
"""A request and the drafts behind its known token."""


class DecodeSteps:
    """Plans steps over all that decode."""

    def __init__(
        self,
        residence: Residence,
        roster: Roster,
        retraction: Retraction,
        verification: Verification,
        limits: SchedulerLimits,
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._retraction = retraction
        self._verification = verification
        self._drafting = limits.drafting

    def ready(self, now: float) -> list[Running]:
        """Requests that may draw and have a page for it; the newest pay when none is left."""
        ready = [sequence for sequence in self._roster.decoding if sequence.may_draw]
        if self._drafting.num_tokens:
            ready = self._known(ready)
        stalled = {id(s) for s in self._at_page(ready, offset=0) if not self._grow(s, now)}
        return [s for s in ready if id(s) not in stalled and s.phase is Phase.DECODING]

    def _known(self, sequences: list[Running]) -> list[Running]:
        """Without those that draft and whose last token is on its way. They go together: else two
        halves would take turns for ever."""
        is_verifying = any(sequence.verifying for sequence in self._roster.decoding)
        return [s for s in sequences if not s.drafts or not (is_verifying or s.in_flight)]

    def plan(self, step_id: int, ready: list[Running]) -> tuple[DecodeStep, list[Running]]:
        """One step over `ready`, and them in the order in which it has them."""
        draft = OpsDraft()
        for sequence in self._roster.newly_adopted:
            open_received(sequence, draft)
        self._roster.newly_adopted.clear()
        if self._verification.max_tracks:
            self._plan_tracks(ready, draft)
        runs: list[Run] = [(sequence, ()) for sequence in ready]
        if self._drafting.num_tokens:
            runs = [(s, self._drafts_of(s) if s.drafts else ()) for s in ready]
            runs.sort(key=lambda run: -len(run[1]))
            for sequence in ready:
                sequence.verifying = sequence.drafts
        step = build_step(self._residence, step_id, runs, draft)
        return step, [sequence for sequence, _ in runs]

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
        """States at page ends: ahead where a step takes one token, else when the run is known."""
        for sequence in self._at_page(ready, offset=1):
            if not sequence.drafts:
                position = int(self._residence.rows.positions[sequence.row]) + 1
                draft.snapshots += self._verification.track(sequence, position)
        for sequence in self._at_page(ready, offset=0) if self._drafting.num_tokens else ():
            if sequence.drafts:
                draft.saves += self._verification.saves(sequence)

    def _drafts_of(self, sequence: Running) -> Sequence[int]:
        """What is proposed, as far as there are slots for it: nobody is retracted for a guess."""
        undrawn = sequence.request.sampling.max_tokens - sequence.num_generated
        most = min(self._drafting.num_tokens, undrawn - 1)  # one token is drawn behind the last
        drafts = sequence.proposals.propose(sequence.drawn, most)
        residence, page_size = self._residence, self._residence.manifest.page_size
        position = int(residence.rows.positions[sequence.row])
        for page in range(position // page_size + 1, (position + len(drafts)) // page_size + 1):
            if not try_full_page(residence, sequence, page):
                drafts = drafts[: page * page_size - 1 - position]
                break
        windows.slide(residence, sequence, position)
        windows.cover(residence, sequence, position, position + 1 + len(drafts))
        return drafts


def try_grow(residence: Residence, sequence: Running, position: int) -> bool:
    """Makes sure that `position` has a page of every kind; False when no full page is left.

    Window pages never lack: the request has the slots of all that it will hold at once.
    """
    if not try_full_page(residence, sequence, position // residence.manifest.page_size):
        return False
    windows.slide(residence, sequence, position)
    windows.cover(residence, sequence, position, position + 1)
    return True


def try_full_page(residence: Residence, sequence: Running, page: int) -> bool:
    """Makes sure that the request has a full page `page`; False when none is left."""
    if page not in sequence.own.get(Kind.FULL, (page,)):
        taken = residence.try_take({Kind.FULL: 1}, sequence.holder)
        if taken is None:
            return False
        handle = sequence.own[Kind.FULL][page] = taken[Kind.FULL][0]
        residence.rows.set_page(Kind.FULL, sequence.row, page, handle.slot)
    return True


def build_step(
    residence: Residence, step_id: int, runs: Sequence[Run], draft: OpsDraft
) -> DecodeStep:
    """One step over `runs`, the longest first, whose pages exist. Positions advance by one."""
    table, page_size = residence.rows, residence.manifest.page_size
    sequences = [sequence for sequence, _ in runs]
    first: Ints = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
    waves = _waves(runs)
    rows, behind = _tokens(first, waves)
    positions = table.positions[rows] + behind
    reads, writes = table.states_of(rows, behind)
    step = DecodeStep(
        step_id=step_id,
        ops=draft.finish(),
        request_ids=tuple([s.request.request_id for s in sequences]),
        rows=rows,
        positions=positions,
        read_slots=reads,
        write_slots=writes,
        waves=waves,
        page_tables=table.page_tables(rows, int(positions.max()) // page_size + 1),
        draws=_draws(_by_token(sequences, waves), positions),
        drafts=tuple([d[j] for j, size in enumerate(waves[1:]) for _, d in runs[:size]]),
    )
    table.positions[first] += 1  # what a run adds to that is known when it commits
    for sequence in sequences:
        sequence.in_flight += 1
        sequence.draws_submitted += 1
        sequence.scheduled += 1
    return step


def _waves(runs: Sequence[Run]) -> tuple[int, ...]:
    """How many of `runs`, the longest first, have a first token, a second one, and so on."""
    longest = len(runs[0][1])
    return tuple([len(runs)] + [sum(len(d) > j for _, d in runs) for j in range(longest)])


def _tokens(first: Ints, waves: tuple[int, ...]) -> tuple[Ints, Ints | int]:
    """The row of each token, and how many of its request come before it in the step."""
    if len(waves) == 1:
        return first, 0
    rows = np.concatenate([first[:size] for size in waves])
    return rows, np.repeat(np.arange(len(waves)), waves)


def _by_token(sequences: list[Running], waves: tuple[int, ...]) -> list[Running]:
    """Whose each token is."""
    return sequences + [s for size in waves[1:] for s in sequences[:size]]


def _draws(sequences: Sequence[Running], positions: Ints) -> tuple[Draw, ...]:
    return tuple(
        [
            Draw(s.row, position + 1, s.first_output, s.request.sampling)
            for s, position in zip(sequences, positions.tolist(), strict=True)
        ]
    )
