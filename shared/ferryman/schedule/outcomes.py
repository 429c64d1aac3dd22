"""Outcomes: what follows from a step that has run, and how requests end."""

from __future__ import annotations

from ferryman.cache.resume import EMPTY_HOST
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome
from ferryman.schedule.donation import Donation
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
from ferryman.schedule.windows import trim


class Outcomes:
    """Applies outcomes to the requests that steps were built from."""

    def __init__(
        self,
        residence: Residence,
        roster: Roster,
        donation: Donation,
        retraction: Retraction,
        events: list[Event],
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._donation = donation
        self._retraction = retraction
        self._events = events

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
            self.drew(sequence, first, now)
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
        self.drew(sequence, first, now)

    def drew(self, sequence: Running, sampled: Sampled, now: float) -> None:
        """One token more of a request, perhaps its last."""
        if sequence.phase is Phase.DONE:
            return  # it ended while this step was on its way; the extra token is dropped
        request = sequence.request
        self._events.append(Drawn(request.request_id, sequence.num_generated, sampled))
        sequence.drawn.append(sampled.token_id)
        if sampled.token_id in request.stop_token_ids:
            self.finish(sequence, FinishReason.STOP, now)
        elif sequence.num_generated >= request.sampling.max_tokens:
            self.finish(sequence, FinishReason.LENGTH, now)
        elif sequence.phase is Phase.RETRACTING and not sequence.in_flight:
            self._retraction.push_back(sequence, now)

    def finish(self, sequence: Running, reason: FinishReason, now: float) -> None:
        """A request that holds slots ends: what it computed stays in the tree."""
        if sequence.phase in (Phase.DECODING, Phase.RETRACTING):
            self._donation.donate(sequence, now)
        self._roster.leave(sequence)
        self._events.append(Finished(sequence.request_id, reason, sequence.num_generated))
