"""Verification: accepts drafts, and selects the recurrent state to continue from.

A step that verifies a run from position p consumes the known token and its drafts. The state after
the known token is written to the working slot, the state after draft j to scratch slot j:

    consumed    known    draft 1     draft 2     draft 3
    state at    p + 1    p + 2       p + 3       p + 4
    slot        working  scratch 1   scratch 2   scratch 3

The commit copies nothing. With two drafts right, scratch 2 and the working slot change places, as
integers. If a page ends within the run, the slot of that state is not needed to go on: it becomes
the track slot, and the older track slot becomes scratch. Rejected drafts leave no trace: their
states are scratch, and no later query reads their keys before they are overwritten.

Track slots, and the scratch slots of a request that a hand-off brought, are taken while requests
run, and only as far as the rows kept for hand-offs still find a working slot each. A request that
gets none goes on without: it drafts less, or freezes no state. So taking a hand-off over allocates
nothing, and cannot fail.

Its common name is speculative decoding.
"""

from __future__ import annotations

from ferryman.cache.capacity import Concurrency
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.batch import DecodeStep, Sampled, SlotSnapshot, StepOutcome
from ferryman.schedule.request_table import SequenceTable
from ferryman.schedule.sequence import RunningSequence, TrackSlot
from ferryman.schedule.slot_allocator import SlotAllocator


def right_run(plan: DecodeStep, outcome: StepOutcome, index: int) -> list[Sampled]:
    """The tokens drawn for request `index`: one, and one more after each draft that equals its
    token."""
    first, *others = plan.tokens_of(index)
    run = [outcome.sampled[first]]
    for token in others:
        if outcome.drafts[token - plan.verify_depths[0]] != run[-1].token_id:
            break
        run.append(outcome.sampled[token])
    return run


class Verification:
    """Moves slots between their roles in a request; at most `max_tracks` become track slots."""

    def __init__(
        self, allocator: SlotAllocator, sequences: SequenceTable, concurrency: Concurrency
    ) -> None:
        self._allocator, self._sequences, self._concurrency = allocator, sequences, concurrency
        self._has_states = Kind.RECURRENT in allocator.manifest.kinds
        self.max_tracks = concurrency.tracking if self._has_states else 0

    def num_verifiable(self, sequence: RunningSequence, num_drafts: int) -> int:
        """The drafts, of `num_drafts`, behind which there is a slot for the state."""
        if not self._has_states:
            return num_drafts
        states = self._allocator.rows.states
        while len(sequence.scratch) < num_drafts:
            slot = self._take_slot(sequence)
            if slot is None:
                return len(sequence.scratch)
            sequence.scratch.append(slot)
            states[sequence.row, len(sequence.scratch)] = slot.slot
        return num_drafts

    def settle(self, sequence: RunningSequence, num_kept: int) -> None:
        """Continues the request after `num_kept` tokens of its run, which are not in `drawn`
        yet."""
        start = sequence.computed
        end, rows, row = start + num_kept, self._allocator.rows, sequence.row
        states = [sequence.working, *sequence.scratch] if sequence.working else []
        if states:
            self._track_passed(sequence, states, start, end)
            states[0], states[num_kept - 1] = states[num_kept - 1], states[0]
            sequence.working, *sequence.scratch = states
            rows.states[row, : len(states)] = [handle.slot for handle in states]
        rows.positions[row] = end
        sequence.scheduled, sequence.verifying = end, False
        sequence.draws_submitted = len(sequence.drawn) + num_kept

    def _track_passed(
        self, sequence: RunningSequence, states: list[SlotHandle], start: int, end: int
    ) -> None:
        """Page ends before `end`: continuing does not need their states, so they become tracks."""
        page_size = self._allocator.manifest.page_size
        for position in range((start // page_size + 1) * page_size, end, page_size):
            slot = self._take_track_slot(sequence)
            if slot is not None:
                depth = position - start - 1
                sequence.tracks.append(TrackSlot(states[depth], position))
                states[depth] = slot

    def saves(self, sequence: RunningSequence) -> tuple[SlotSnapshot, ...]:
        """If a run ended on a page's end, the next step freezes that state before it continues."""
        position = sequence.computed
        has_track = any(track.position == position for track in sequence.tracks)
        if position <= sequence.prompt_len or has_track:
            return ()
        return self.track(sequence, position)

    def track(self, sequence: RunningSequence, position: int) -> tuple[SlotSnapshot, ...]:
        """Freezes the working state at `position`, a page's end, in a track slot, if there is one.

        The older track slot is overwritten. Its record is removed before the write is launched, so
        a new state is never found under the old position.
        """
        slot = self._take_track_slot(sequence)
        if slot is None:
            return ()
        sequence.tracks.append(TrackSlot(slot, position))
        return (SlotSnapshot(sequence.working_slot, slot.slot, position),)

    def _take_track_slot(self, sequence: RunningSequence) -> SlotHandle | None:
        if len(sequence.tracks) < self.max_tracks:
            slot = self._take_slot(sequence)
            if slot is not None:
                return slot
        return sequence.tracks.pop(0).handle if sequence.tracks else None

    def _take_slot(self, sequence: RunningSequence) -> SlotHandle | None:
        """A slot beside the working one, if there is one more than hand-offs may need."""
        if not self._is_spare_left():
            return None
        taken = self._allocator.try_take({Kind.RECURRENT: 1}, sequence.holder)
        return taken[Kind.RECURRENT][0] if taken is not None else None

    def _is_spare_left(self) -> bool:
        """Whether the rows that are free, as far as they are kept for hand-offs, would still find a
        working slot each. A row whose request has just left counts as free: its slots come back
        with it."""
        concurrency, with_slots = self._concurrency, self._sequences.with_slots()
        to_come = min(concurrency.rows - len(with_slots), concurrency.max_prealloc)
        held = sum(sequence.num_states for sequence in with_slots)
        return held + to_come < self._allocator.pools[Kind.RECURRENT].num_slots
