"""Continuous-batching decode: one token of every running request per step, pages taken on the
way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferryman.cache.manifest import Kind
from ferryman.schedule import windows
from ferryman.schedule.batch import DecodeStep, Ints, RowSeed, SampleRequest, SlotOpsBuilder
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request_table import FaultIsolation, SequenceTable
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.sequence import Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator
from ferryman.schedule.verification import Verification

Run = tuple[RunningSequence, Sequence[int]]
"""A request and the drafts after its known token."""


class DecodeSteps:
    """Plans steps over all requests that decode."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequence_table: SequenceTable,
        retraction: Retraction,
        verification: Verification,
        isolation: FaultIsolation,
        limits: SchedulerLimits,
    ) -> None:
        self._allocator = allocator
        self._sequences = sequence_table
        self._retraction = retraction
        self._verification = verification
        self._isolation = isolation
        self._drafting = limits.drafting

    def ready(self, now: float) -> list[RunningSequence]:
        """Requests that may draw and have a page for it. When no page is left, the newest are
        retracted."""
        ready = [sequence for sequence in self._sequences.decoding if sequence.may_draw]
        if self._drafting.num_tokens:
            ready = self._known(ready)
        run, at_page = self._isolation.run, self._at_page(ready, offset=0)
        stalled = {id(s) for s in at_page if not run(s.request_id, self._grow, s, now)}
        return [s for s in ready if id(s) not in stalled and s.phase is Phase.DECODING]

    def _known(self, sequences: list[RunningSequence]) -> list[RunningSequence]:
        """Drops drafting sequences whose last token is still in flight. All drafting sequences step
        together; otherwise two groups would alternate forever."""
        is_verifying = any(sequence.verifying for sequence in self._sequences.decoding)
        return [s for s in sequences if not s.drafts or not (is_verifying or s.in_flight)]

    def plan(
        self, step_id: int, ready: list[RunningSequence]
    ) -> tuple[DecodeStep, list[RunningSequence]] | None:
        """One step over `ready`, and its requests in the step's order; None when planning failed
        for each."""
        draft = SlotOpsBuilder()
        for sequence in self._sequences.newly_adopted.copy():
            self._isolation.run(sequence.request_id, received_prompt_ops, sequence, draft)
            if sequence.phase is Phase.DONE:
                ready = [other for other in ready if other is not sequence]
        if self._verification.max_tracks:
            self._plan_tracks(ready, draft)
        runs = self._runs(ready)
        if not runs:
            return None
        step = build_step(self._allocator, step_id, runs, draft)
        # Only now: without a step, the next one has to make these changes.
        for sequence in self._sequences.newly_adopted:
            sequence.opening = ()
        self._sequences.newly_adopted.clear()
        return step, [sequence for sequence, _ in runs]

    def _runs(self, ready: list[RunningSequence]) -> list[Run]:
        """The requests still here, each with its drafts, the longest run first."""
        if not self._drafting.num_tokens:
            return [(s, ()) for s in ready if s.phase is not Phase.DONE]
        drafted = [(s, self._isolated_drafts(s) if s.drafts else ()) for s in ready]
        runs = [(s, drafts) for s, drafts in drafted if s.phase is not Phase.DONE]
        runs.sort(key=lambda run: -len(run[1]))
        for sequence, _ in runs:
            sequence.verifying = sequence.drafts
        return runs

    def _isolated_drafts(self, sequence: RunningSequence) -> Sequence[int]:
        if sequence.phase is Phase.DONE:
            return ()
        return self._isolation.run(sequence.request_id, self._drafts_of, sequence) or ()

    def _at_page(self, sequences: list[RunningSequence], offset: int) -> list[RunningSequence]:
        """The sequences whose position + offset is a multiple of the page size."""
        rows = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
        positions = self._allocator.rows.positions[rows] + offset
        page_size = self._allocator.manifest.page_size
        return [sequences[i] for i in np.flatnonzero(positions % page_size == 0)]

    def _grow(self, sequence: RunningSequence, now: float) -> bool:
        if sequence.phase is not Phase.DECODING:
            return False
        position = int(self._allocator.rows.positions[sequence.row])
        while not try_grow(self._allocator, sequence, position):
            if self._retraction.is_keeping:
                return False  # slots being copied come free when the copy ends
            victim = max(self._sequences.decoding, key=lambda sequence: sequence.order)
            self._isolation.run(victim.request_id, self._retraction.retract, victim, now)
            if victim is sequence or victim.in_flight:
                return False  # slots that a step still reads come free after it
        return True

    def _plan_tracks(self, ready: list[RunningSequence], draft: SlotOpsBuilder) -> None:
        """Plans snapshots at page ends: ahead for a step of one token, else once the run is
        known."""
        run, verification = self._isolation.run, self._verification
        for sequence in self._at_page(ready, offset=1):
            if not sequence.drafts:
                position = int(self._allocator.rows.positions[sequence.row]) + 1
                name = sequence.request_id
                draft.snapshots += run(name, verification.track, sequence, position) or ()
        for sequence in self._at_page(ready, offset=0) if self._drafting.num_tokens else ():
            if sequence.drafts:
                draft.saves += run(sequence.request_id, verification.saves, sequence) or ()

    def _drafts_of(self, sequence: RunningSequence) -> Sequence[int]:
        """The proposed drafts that find slots. No request is retracted to make room for drafts."""
        undrawn = sequence.request.sampling.max_tokens - sequence.num_generated
        # one token is drawn after the last draft
        most = min(self._drafting.num_tokens, undrawn - 1)
        most = self._verification.num_verifiable(sequence, most)
        drafts = sequence.proposals.propose(sequence.drawn, most)
        allocator, page_size = self._allocator, self._allocator.manifest.page_size
        position = int(allocator.rows.positions[sequence.row])
        for page in range(position // page_size + 1, (position + len(drafts)) // page_size + 1):
            if not try_full_page(allocator, sequence, page):
                drafts = drafts[: page * page_size - 1 - position]
                break
        windows.slide(allocator, sequence, position)
        windows.cover(allocator, sequence, position, position + 1 + len(drafts))
        return drafts


def try_grow(allocator: SlotAllocator, sequence: RunningSequence, position: int) -> bool:
    """Makes sure that `position` has a page of every kind; False when no full page is left.

    Window pages are never short: the request took all their slots when it was admitted.
    """
    if not try_full_page(allocator, sequence, position // allocator.manifest.page_size):
        return False
    windows.slide(allocator, sequence, position)
    windows.cover(allocator, sequence, position, position + 1)
    return True


def try_full_page(allocator: SlotAllocator, sequence: RunningSequence, page: int) -> bool:
    """Makes sure that the request has a full page `page`; False when none is left."""
    if page not in sequence.own.get(Kind.FULL, (page,)):
        taken = allocator.try_take({Kind.FULL: 1}, sequence.holder)
        if taken is None:
            return False
        handle = sequence.own[Kind.FULL][page] = taken[Kind.FULL][0]
        allocator.rows.set_page(Kind.FULL, sequence.row, page, handle.slot)
    return True


def received_prompt_ops(sequence: RunningSequence, draft: SlotOpsBuilder) -> None:
    """Seeds the row of a request that a hand-off brought: all its tokens are known, the first drawn
    token too. Copies what it shares with other requests of the same prompt."""
    draft.seeds.append(RowSeed(sequence.row, sequence.token_ids()))
    draft.copies += sequence.opening


def build_step(
    allocator: SlotAllocator, step_id: int, runs: Sequence[Run], draft: SlotOpsBuilder
) -> DecodeStep:
    """One step over `runs`, the longest first, whose pages exist. Positions advance by one."""
    table, page_size = allocator.rows, allocator.manifest.page_size
    sequences = [sequence for sequence, _ in runs]
    first: Ints = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
    waves = _waves(runs)
    rows, depths = _tokens(first, waves)
    positions = table.positions[rows] + depths
    reads, writes = table.states_of(rows, depths)
    step = DecodeStep(
        step_id=step_id,
        ops=draft.finish(),
        request_ids=tuple([s.request.request_id for s in sequences]),
        rows=rows,
        positions=positions,
        read_slots=reads,
        write_slots=writes,
        verify_depths=waves,
        page_tables=table.page_tables(rows, int(positions.max()) // page_size + 1),
        draws=_draws(_by_token(sequences, waves), positions),
        drafts=tuple([d[j] for j, size in enumerate(waves[1:]) for _, d in runs[:size]]),
        adapters=table.adapters[rows],
    )
    table.positions[first] += 1  # the commit adds the accepted drafts
    for sequence in sequences:
        sequence.in_flight += 1
        sequence.draws_submitted += 1
        sequence.scheduled += 1
    return step


def _waves(runs: Sequence[Run]) -> tuple[int, ...]:
    """The number of `runs`, the longest first, that have a first token, a second, and so on."""
    longest = len(runs[0][1])
    return tuple([len(runs)] + [sum(len(d) > j for _, d in runs) for j in range(longest)])


def _tokens(first: Ints, waves: tuple[int, ...]) -> tuple[Ints, Ints | int]:
    """The row of each token, and its depth: the tokens of its request before it in the step."""
    if len(waves) == 1:
        return first, 0
    rows = np.concatenate([first[:size] for size in waves])
    return rows, np.repeat(np.arange(len(waves)), waves)


def _by_token(sequences: list[RunningSequence], waves: tuple[int, ...]) -> list[RunningSequence]:
    """The sequence of each token."""
    return sequences + [s for size in waves[1:] for s in sequences[:size]]


def _draws(sequences: Sequence[RunningSequence], positions: Ints) -> tuple[SampleRequest, ...]:
    return tuple(
        [
            SampleRequest(
                s.row,
                position + 1,
                s.first_output,
                s.request.sampling,
                s.request.stop_token_ids,
                s.order,
            )
            for s, position in zip(sequences, positions.tolist(), strict=True)
        ]
    )
