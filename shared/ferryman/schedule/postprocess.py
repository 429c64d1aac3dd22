"""Applies the outcome of a step to its requests, and ends requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from ferryman.cache.resume import EMPTY_HOST
from ferryman.errors import GrammarDeadEnd, NonFiniteLogits, NonFiniteState
from ferryman.schedule.audit.audits import Audits
from ferryman.schedule.audit.open_audit import audit_name
from ferryman.schedule.batch import (
    NO_CHOICE,
    NO_TOKEN,
    Chunk,
    DecodeStep,
    FailedDraw,
    PrefillStep,
    Sampled,
    StepOutcome,
)
from ferryman.schedule.drafting import NOTHING_DRAFTED, DraftCounts
from ferryman.schedule.events import (
    ChainDropped,
    ChunkDone,
    Drawn,
    Event,
    Finished,
    LoadCorrupt,
    LoadsDone,
    PromptScored,
    SequenceAdmitted,
    SequenceDetached,
    SequenceHeld,
)
from ferryman.schedule.prompt_copies import drop_ends, freeze_end
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason
from ferryman.schedule.request_table import FaultIsolation, SequenceTable
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.sequence import Goal, PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator
from ferryman.schedule.tree_publisher import TreePublisher
from ferryman.schedule.verification import Verification, right_run
from ferryman.schedule.windows import trim


class Postprocessor:
    """Applies outcomes to the requests of their steps."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequence_table: SequenceTable,
        publisher: TreePublisher | None,
        retraction: Retraction,
        verification: Verification,
        isolation: FaultIsolation,
        audits: Audits,
        events: list[Event],
    ) -> None:
        self._allocator = allocator
        self._sequences = sequence_table
        self._publisher = publisher
        self._retraction = retraction
        self._verification = verification
        self._isolation = isolation
        self._audits = audits
        self._events = events
        self.drafts = NOTHING_DRAFTED

    def prefilled(
        self,
        plan: PrefillStep,
        outcome: StepOutcome,
        sequences: tuple[RunningSequence, ...],
        now: float,
    ) -> None:
        """Applies a prefill step: its chunks are computed, its loads read, its snapshots
        written."""
        sampled, scored = iter(outcome.sampled), iter(outcome.scores)
        run = self._isolation.run
        for load_id in dict.fromkeys(load.request_id for load in plan.ops.loads):
            if load_id not in outcome.corrupt:  # the report of corrupt units ends its lease
                self._events.append(LoadsDone(load_id))
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            drawn = [next(sampled) for _ in chunk.draws]
            scores = [next(scored) for _ in chunk.scores]
            if sequence.phase is Phase.DONE:
                continue
            if (error := outcome.failed.get(chunk.request_id)) is not None:
                self._isolation.fail(chunk.request_id, error)
            elif chunk.request_id in outcome.corrupt:
                run(chunk.request_id, self._start_over, sequence)
            else:
                done = partial(self._chunk_done, chunk, sequence)
                run(chunk.request_id, done, drawn, scores, now)

    def _chunk_done(
        self,
        chunk: Chunk,
        sequence: RunningSequence,
        drawn: Sequence[Sampled],
        scores: Sequence[PromptScores],
        now: float,
    ) -> None:
        # Check before any state of it is cached.
        for some in scores:
            self._check_scores(sequence, some)
            self._events.append(PromptScored(chunk.request_id, some))
        for first in drawn:
            self._check_numbers(sequence, first, sequence.prompt_len)
        done = ChunkDone(chunk.request_id, chunk.start, chunk.end, sequence.prompt_len)
        self._events.append(done)
        if self._publisher:
            for point in [point for point in sequence.points if point <= chunk.end]:
                self._publisher.publish_point(sequence, point, now)
        for first in drawn:
            self._end_prompt(sequence, first, now)

    def _end_prompt(self, sequence: RunningSequence, first: Sampled, now: float) -> None:
        if self._publisher:
            self._publisher.publish_prompt(sequence, now)
        trim(self._allocator, sequence)
        if sequence.goal is Goal.DECODE:
            self._append_token(sequence, first, now)
            self._leave_if_due(sequence, now)
        else:
            sequence.phase = Phase.HELD
            self._events.append(SequenceHeld(sequence.request_id, first))

    def _start_over(self, sequence: RunningSequence) -> None:
        """Sends a request back to wait after corrupt bytes came from a tier; its results are
        void."""
        self._sequences.leave(sequence)
        self._events.append(LoadCorrupt(sequence.request_id))
        request, goal = sequence.request, sequence.goal
        waiting = PendingRequest(sequence.order, request, goal, EMPTY_HOST, was_retracted=False)
        self._sequences.waiting.enter(waiting)

    def adopted(self, sequence: RunningSequence, first: Sampled, now: float) -> None:
        """A hand-off is verified: its pages are published here, and its first token counts."""
        self._events.append(SequenceAdmitted(sequence.request_id, sequence.plan, is_resumed=False))
        if self._publisher:
            self._publisher.publish_prompt(sequence, now)
        # After publishing: then the full pages are the tree's, and are shared without a copy.
        freeze_end(self._allocator, sequence, len(self._sequences.decoding), now)
        self._append_token(sequence, first, now)

    def decoded(
        self,
        plan: DecodeStep,
        outcome: StepOutcome,
        sequences: tuple[RunningSequence, ...],
        now: float,
    ) -> None:
        """Applies a decode step: a token of each request, and one more for each accepted draft."""
        for index, sequence in enumerate(sequences):
            if sequence.phase is Phase.DONE:
                continue  # it ended while this step was running; its token is dropped
            try:
                if (failure := outcome.failed.get(sequence.request_id)) is not None:
                    raise failure
                if sequence.drafts:
                    self._verified(sequence, plan, outcome, index, now)
                else:
                    self._append_token(sequence, outcome.sampled[index], now)
            except Exception as error:  # any error goes to the caller of the request
                self._isolation.fail(sequence.request_id, error)
            if sequence.phase in (Phase.RETRACTING, Phase.DETACHING):
                self._isolation.run(sequence.request_id, self._leave_if_due, sequence, now)

    def _verified(
        self,
        sequence: RunningSequence,
        plan: DecodeStep,
        outcome: StepOutcome,
        index: int,
        now: float,
    ) -> None:
        for sampled in self._settled(sequence, plan, outcome, index):
            self._append_token(sequence, sampled, now)

    def detach(self, sequence: RunningSequence, now: float) -> None:
        """Pauses a decoding request, at once or after its last step."""
        self._sequences.stop_decoding(sequence)
        sequence.phase = Phase.DETACHING
        self._leave_if_due(sequence, now)

    def _leave_if_due(self, sequence: RunningSequence, now: float) -> None:
        """A step in flight may still write the slots, and its token counts."""
        if sequence.in_flight:
            return
        if sequence.phase is Phase.RETRACTING:
            self._retraction.push_back(sequence, now)
        elif sequence.phase is Phase.DETACHING:
            sequence.phase = Phase.HELD
            self._events.append(SequenceDetached(sequence.request_id))

    def _settled(
        self, sequence: RunningSequence, plan: DecodeStep, outcome: StepOutcome, index: int
    ) -> Sequence[Sampled]:
        """The tokens of a verified run that count: none after the request's last token."""
        kept = _until_its_end(sequence, right_run(plan, outcome, index))
        self._verification.settle(sequence, len(kept))
        counts = DraftCounts(1, plan.num_drafts(index), len(kept) - 1)
        sequence.counts += counts
        self.drafts += counts
        return kept

    def _append_token(self, sequence: RunningSequence, sampled: Sampled, now: float) -> None:
        """Appends one token to a request and ends the request if it is the last."""
        request, offset = sequence.request, sequence.num_generated
        self._check_numbers(sequence, sampled, sequence.prompt_len + len(sequence.drawn))
        self._events.append(Drawn(request.request_id, offset, sampled))
        sequence.drawn.append(sampled.token_id)
        if sampled.token_id in request.stop_token_ids:
            self.finish(sequence, FinishReason.STOP, now)
        elif offset + 1 >= request.sampling.max_tokens:
            self.finish(sequence, FinishReason.LENGTH, now)

    def _check_numbers(self, sequence: RunningSequence, sampled: Sampled, position: int) -> None:
        """Raises for logits that are not finite, after dropping all state that they may come
        from. Also raises at a dead end of a grammar, and the error of a failed draw: then the state
        is good."""
        if isinstance(sampled, FailedDraw):
            raise sampled.error
        if sampled.token_id == NO_CHOICE:
            raise GrammarDeadEnd(f"the grammar leaves no token at position {position}", "grammar")
        if sampled.token_id == NO_TOKEN:
            self._fail_numbers(sequence, position)

    def _check_scores(self, sequence: RunningSequence, scores: PromptScores) -> None:
        if (position := scores.first_without_number) is not None:
            self._fail_numbers(sequence, position)

    def _fail_numbers(self, sequence: RunningSequence, position: int) -> NoReturn:
        self._drop_chain(sequence)
        what = f"the logits behind position {position - 1} are no finite numbers"
        if sequence.reuses:
            raise NonFiniteState(f"{what}; the state that was reused is dropped")
        raise NonFiniteLogits(what)

    def _drop_chain(self, sequence: RunningSequence) -> None:
        """The faulty page is not known, so every page that the row was computed from is dropped. A
        chain that was dropped already is not reported again."""
        drop_ends(self._allocator, sequence.request)
        if sequence.keys and not sequence.is_doubtful:
            first = sequence.keys[0]
            self._allocator.drop_chain(first, self._sequences.with_slots())
            self._events.append(ChainDropped(sequence.request_id, first, sequence.reuses))

    def finish(self, sequence: RunningSequence, reason: FinishReason, now: float) -> None:
        """Ends a request that holds slots; its computed state stays in the tree."""
        has_decoded = sequence.phase in (Phase.DECODING, Phase.RETRACTING, Phase.DETACHING)
        if has_decoded and reason is not FinishReason.CANCELLED:
            name = audit_name(sequence.request_id)
            self._isolation.run(name, self._audits.ended, sequence)
        if self._publisher and has_decoded:
            self._publisher.donate(sequence, now)
        self._sequences.leave(sequence)
        counts = sequence.counts
        self._events.append(Finished(sequence.request_id, reason, sequence.num_generated, counts))


def _until_its_end(sequence: RunningSequence, run: Sequence[Sampled]) -> Sequence[Sampled]:
    """The run up to a stop token. Drafting never goes past the last token that max_tokens
    allows."""
    for index, sampled in enumerate(run):
        if sampled.token_id in sequence.request.stop_token_ids:
            return run[: index + 1]
    return run
