"""Reservations: decode's side of a hand-off, from the slots it promises to the request it takes."""

from __future__ import annotations

from ferryman.cache.manifest import Kind
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST
from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.errors import NotFound, OutOfSlots
from ferryman.schedule.door import Door
from ferryman.schedule.request import Request
from ferryman.schedule.residence import Residence
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Goal, Phase, Running, Waiting
from ferryman.schedule.units import wanted_units


class Reservations:
    """Slots that a prefill worker writes to, by reservation id."""

    def __init__(
        self,
        residence: Residence,
        roster: Roster,
        door: Door,
        planner: Planner,
        prefix_cache: bool,
    ) -> None:
        self._residence = residence
        self._roster = roster
        self._door = door
        self._planner = planner
        self._prefix_cache = prefix_cache

    def reserve(self, reservation_id: str, request: Request, now: float) -> Running:
        """Takes the slots of resume_set(n) that are not here. Raises OutOfSlots, InvalidRequest.

        The slots are leased to the transfer; `adopt` hands them to the request, and until then
        only `free` gives them back: never a timeout alone.
        """
        self._door.check(request, Goal.DECODE)
        roster = self._roster
        if roster.line:
            raise OutOfSlots(f"{len(roster.line)} requests wait to come back here")
        keys = request.keys if self._prefix_cache else ()
        order = roster.next_order()
        waiting = Waiting(order, request, Goal.DECODE, EMPTY_HOST, was_retracted=False)
        plan = self._planner.plan_receive(
            keys, request.prompt_len, self._residence.tree, num_decoded=waiting.num_decoded
        )
        holder = Holder(Role.TRANSFER_IN, reservation_id)
        headroom = len(roster.decoding)
        sequence = self._residence.try_admit(waiting, plan, holder, headroom, now)
        if sequence is None:
            raise OutOfSlots("no room for one more request; see /debug/ledger")
        sequence.phase = Phase.RESERVED
        roster.reserved[reservation_id] = sequence
        return sequence

    def adopt(self, reservation_id: str) -> Running:
        """The hand-off is verified: the slots are the request's, and it decodes from now on."""
        sequence = self._roster.reserved.pop(reservation_id)
        owner = Holder(Role.REQUEST, sequence.request_id)
        self._residence.pools.move(sequence.slots(), sequence.holder, owner)
        sequence.holder, sequence.phase = owner, Phase.DECODING
        sequence.draws_submitted = 1
        self._roster.adopt(sequence)
        return sequence

    def units_at(
        self, reservation_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of what a transfer writes of [first, end), absolute. Raises NotFound.

        A recurrent unit's index is its position, the length of the prompt. What decode holds
        already is not among them: nobody may write there.
        """
        sequence = self._roster.reserved.get(reservation_id)
        if sequence is None:
            raise NotFound(f"reservation {reservation_id} holds no slots here")
        return wanted_units(sequence, kind, first, end)

    def free(self, reservation_id: str) -> bool:
        """Quarantine is over: nobody writes to these slots any more."""
        sequence = self._roster.reserved.pop(reservation_id, None)
        if sequence is None:
            return False
        sequence.phase = Phase.DONE
        self._residence.leave(sequence)
        return True
