"""Retraction: a request goes back to wait, with what is known so far, so that others can go on."""

from __future__ import annotations

from dataclasses import replace

from ferryman.cache.resume import EMPTY_HOST
from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.schedule.donation import Donation
from ferryman.schedule.events import Event, Retracted
from ferryman.schedule.residence import Residence
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Goal, Phase, Running, Waiting
from ferryman.schedule.units import resume_units


class Retraction:
    """Pushes requests back, and keeps what they leave while somebody copies it."""

    def __init__(
        self, residence: Residence, roster: Roster, donation: Donation, events: list[Event]
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._donation = donation
        self._events = events
        self._keeps = False
        self._kept: dict[str, tuple[SlotHandle, ...]] = {}

    @property
    def is_keeping(self) -> bool:
        """Whether slots come free when a copy ends."""
        return bool(self._kept)

    def retract(self, sequence: Running, now: float) -> None:
        """At once when no step holds it; else after its last step, whose token still counts."""
        self._roster.decoding.remove(sequence)
        if sequence.in_flight:
            sequence.phase = Phase.RETRACTING
        else:
            self.push_back(sequence, now)

    def push_back(self, sequence: Running, now: float) -> None:
        """Donates, gives all slots back and waits in its old place."""
        self._donation.donate(sequence, now)
        if self._keeps:
            self._keep(sequence)
        self._roster.leave(sequence)
        request = replace(
            sequence.request,
            token_ids=sequence.token_ids(),
            keys=sequence.keys,
            num_generated=sequence.num_generated,
        )
        self._events.append(Retracted(request.request_id, request.num_generated, request))
        waiting = Waiting(sequence.order, request, Goal.DECODE, EMPTY_HOST, True, sequence.counts)
        self._roster.line.enter(waiting)

    # What somebody copies elsewhere, for the room is wanted.

    def keep_retracted(self) -> None:
        """From now on what a retracted request would resume from is kept until `let_go`."""
        self._keeps = True

    def _keep(self, sequence: Running) -> None:
        units = resume_units(self._residence.manifest, self._residence.tree, sequence.keys)
        if handles := tuple(unit.handle for unit in units):
            self._residence.pools.lease(handles, _keeper(sequence.request_id))
            self._kept[sequence.request_id] = handles

    def let_go(self, request_id: str) -> None:
        """The copy has ended, or will not be made; unknown requests are fine."""
        self._residence.pools.release(self._kept.pop(request_id, ()), _keeper(request_id))


def _keeper(request_id: str) -> Holder:
    """Of what a retracted request left, while it is copied."""
    return Holder(Role.STORE, f"{request_id} retracted")
