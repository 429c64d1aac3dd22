"""Outcomes: what follows from a step that has run, and how requests end."""

from __future__ import annotations

from collections.abc import Sequence

from ferryman.cache.resume import EMPTY_HOST
from ferryman.schedule.batch import DecodeStep, PrefillStep, Sampled, StepOutcome
from ferryman.schedule.donation import Donation
from ferryman.schedule.drafting import NOTHING_DRAFTED, DraftCounts
from ferryman.schedule.events import (
    Admitted,
    ChunkDone,
    Drawn,
    Event,
    Finished,
    Held,
    LoadCorrupt,
    LoadsDone,
)
from ferryman.schedule.request import FinishReason
from ferryman.schedule.residence import Residence
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Goal, Phase, Running, Waiting
from ferryman.schedule.verification import Verification, right_run
from ferryman.schedule.windows import trim


class Outcomes:
    """Applies outcomes to the requests that steps were built from."""

    def __init__(
        self,
        residence: Residence,
        roster: Roster,
        donation: Donation,
        retraction: Retraction,
        verification: Verification,
        events: list[Event],
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._donation = donation
        self._retraction = retraction
        self._verification = verification
        self._events = events
        self.drafts = NOTHING_DRAFTED

    def prefilled(
        self, plan: PrefillStep, outcome: StepOutcome, sequences: tuple[Running, ...], now: float
    ) -> None:
        """Chunks were computed, their loads were read, their snapshots are written."""
        sampled = iter(outcome.sampled)
        for load_id in dict.fromkeys(load.request_id for load in plan.ops.loads):
            if load_id not in outcome.corrupt:  # its lease ends with the report of what is corrupt
                self._events.append(LoadsDone(load_id))
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            drawn = [next(sampled) for _ in chunk.draws]
            if sequence.phase is Phase.DONE:
                continue
            if chunk.request_id in outcome.corrupt:
                self._start_over(sequence)
                continue
            done = ChunkDone(chunk.request_id, chunk.start, chunk.end, sequence.prompt_len)
            self._events.append(done)
            for point in [point for point in sequence.points if point <= chunk.end]:
                self._donation.publish_point(sequence, point, now)
            for first in drawn:
                self._end_prompt(sequence, first, now)

    def _end_prompt(self, sequence: Running, first: Sampled, now: float) -> None:
        self._donation.publish_prompt(sequence, now)
        trim(self._residence, sequence)
        if sequence.goal is Goal.DECODE:
            self._drew(sequence, first, now)
            self._go_back_if_due(sequence, now)
        else:
            sequence.phase = Phase.HELD
            self._events.append(Held(sequence.request_id, first))

    def _start_over(self, sequence: Running) -> None:
        """Corrupt bytes came from a tier: nothing computed from them counts."""
        self._roster.leave(sequence)
        self._events.append(LoadCorrupt(sequence.request_id))
        request, goal = sequence.request, sequence.goal
        waiting = Waiting(sequence.order, request, goal, EMPTY_HOST, was_retracted=False)
        self._roster.line.enter(waiting)

    def adopted(self, sequence: Running, first: Sampled, now: float) -> None:
        """A hand-off is verified: its pages are known here, and its first token counts."""
        self._events.append(Admitted(sequence.request_id, sequence.plan, is_resumed=False))
        self._donation.publish_prompt(sequence, now)
        self._drew(sequence, first, now)

    def decoded(
        self, plan: DecodeStep, outcome: StepOutcome, sequences: tuple[Running, ...], now: float
    ) -> None:
        """A token of each request, and one more for each of its drafts that was right."""
        for index, sequence in enumerate(sequences):
            if sequence.phase is Phase.DONE:
                continue  # it ended while this step was on its way; what it drew is dropped
            if sequence.drafts:
                for sampled in self._settled(sequence, plan, outcome, index):
                    self._drew(sequence, sampled, now)
            else:
                self._drew(sequence, outcome.sampled[index], now)
            self._go_back_if_due(sequence, now)

    def _go_back_if_due(self, sequence: Running, now: float) -> None:
        if sequence.phase is Phase.RETRACTING and not sequence.in_flight:
            self._retraction.push_back(sequence, now)

    def _settled(
        self, sequence: Running, plan: DecodeStep, outcome: StepOutcome, index: int
    ) -> Sequence[Sampled]:
        """What counts of a verified run: nothing behind the request's last token."""
        kept = _until_its_end(sequence, right_run(plan, outcome, index))
        self._verification.settle(sequence, len(kept))
        counts = DraftCounts(1, plan.num_drafts(index), len(kept) - 1)
        sequence.counts += counts
        self.drafts += counts
        return kept

    def _drew(self, sequence: Running, sampled: Sampled, now: float) -> None:
        """One token more of a request, perhaps its last."""
        request, offset = sequence.request, sequence.num_generated
        self._events.append(Drawn(request.request_id, offset, sampled))
        sequence.drawn.append(sampled.token_id)
        if sampled.token_id in request.stop_token_ids:
            self.finish(sequence, FinishReason.STOP, now)
        elif offset + 1 >= request.sampling.max_tokens:
            self.finish(sequence, FinishReason.LENGTH, now)

    def finish(self, sequence: Running, reason: FinishReason, now: float) -> None:
        """A request that holds slots ends: what it computed stays in the tree."""
        if sequence.phase in (Phase.DECODING, Phase.RETRACTING):
            self._donation.donate(sequence, now)
        self._roster.leave(sequence)
        counts = sequence.counts
        self._events.append(Finished(sequence.request_id, reason, sequence.num_generated, counts))


def _until_its_end(sequence: Running, run: Sequence[Sampled]) -> Sequence[Sampled]:
    """Up to a stop token; behind the last one that max_tokens allows nothing was drafted."""
    for index, sampled in enumerate(run):
        if sampled.token_id in sequence.request.stop_token_ids:
            return run[: index + 1]
    return run
