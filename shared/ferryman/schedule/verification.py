"""Verification: which drafts were right, and whose state goes on.

A step that verifies a run from position p consumes the known token and its drafts. The state behind
the known token is written to the working slot, the one behind draft j to scratch slot j:

    consumed    known    draft 1     draft 2     draft 3
    state at    p + 1    p + 2       p + 3       p + 4
    slot        working  scratch 1   scratch 2   scratch 3

Nothing is copied when it commits. With two drafts right, scratch 2 and the working slot change
places: integers. A page's end within the run has its state in a slot that nobody needs any more: it
becomes the track slot, and the older track slot is scratch from then on. What was rejected leaves
no trace: its states are scratch, its keys lie behind every later query until they are overwritten.
"""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.cache.slots import SlotHandle
from ferryman.schedule.batch import DecodeStep, Sampled, Snapshot, StepOutcome
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Running, Track


def right_run(plan: DecodeStep, outcome: StepOutcome, index: int) -> list[Sampled]:
    """What request `index` draws: one token, and one more behind each draft that is that token."""
    first, *others = plan.tokens_of(index)
    run = [outcome.sampled[first]]
    for token in others:
        if outcome.drafts[token - plan.waves[0]] != run[-1].token_id:
            break
        run.append(outcome.sampled[token])
    return run


class Verification:
    """Moves slots between the roles they have for a request, up to `max_tracks` to be tracks."""

    def __init__(self, residence: Residence, max_tracks: int) -> None:
        self._residence = residence
        has_snapshots = Kind.RECURRENT in residence.manifest.kinds
        self.max_tracks = max_tracks if has_snapshots else 0

    def settle(self, sequence: Running, num_kept: int) -> None:
        """The request goes on behind `num_kept` tokens of its run; they are not in `drawn` yet."""
        start = sequence.computed
        end, rows, row = start + num_kept, self._residence.rows, sequence.row
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
        self, sequence: Running, states: list[SlotHandle], start: int, end: int
    ) -> None:
        """Page ends before `end`: their states are not needed to go on, so they are given away."""
        page_size = self._residence.manifest.page_size
        for position in range((start // page_size + 1) * page_size, end, page_size):
            slot = self._take_track_slot(sequence)
            if slot is not None:
                behind = position - start - 1
                sequence.tracks.append(Track(states[behind], position))
                states[behind] = slot

    def saves(self, sequence: Running) -> tuple[Snapshot, ...]:
        """A run ended on a page's end: the next step freezes that state before it goes on."""
        position = sequence.computed
        has_track = any(track.position == position for track in sequence.tracks)
        if position <= sequence.prompt_len or has_track:
            return ()
        return self.track(sequence, position)

    def track(self, sequence: Running, position: int) -> tuple[Snapshot, ...]:
        """Freezes the working state at `position`, a page's end, in a track slot, if there is one.

        The older of the track slots is overwritten; its name goes before the write is launched, so
        a state can never be found under the position of the one before it.
        """
        slot = self._take_track_slot(sequence)
        if slot is None:
            return ()
        sequence.tracks.append(Track(slot, position))
        return (Snapshot(sequence.working_slot, slot.slot, position),)

    def _take_track_slot(self, sequence: Running) -> SlotHandle | None:
        if len(sequence.tracks) < self.max_tracks:
            taken = self._residence.try_take({Kind.RECURRENT: 1}, sequence.holder)
            if taken is not None:
                return taken[Kind.RECURRENT][0]
        return sequence.tracks.pop(0).handle if sequence.tracks else None
