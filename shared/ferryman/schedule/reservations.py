"""Reservations: decode's side of a hand-off, from the promised slots to the adopted request."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.cache.manifest import Kind
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, HostView, ResumePlan
from ferryman.cache.slots import Holder, Role, SlotHandle
from ferryman.errors import NotFound, OutOfSlots
from ferryman.schedule.batch import SlotLoad
from ferryman.schedule.prompt_copies import share_end
from ferryman.schedule.request import Request
from ferryman.schedule.request_table import SequenceTable
from ferryman.schedule.sequence import Goal, PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator


class ReservedSequences:
    """Slots that a prefill worker writes to, by reservation id."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequences: SequenceTable,
        planner: Planner,
    ) -> None:
        self._allocator = allocator
        self._sequences = sequences
        self._planner = planner

    def reserve(
        self, reservation_id: str, request: Request, now: float, host: HostView = EMPTY_HOST
    ) -> RunningSequence:
        """Takes slots for the part of resume_set(n) that is not here. Raises OutOfSlots.

        The request has passed `Scheduler.check`. The slots are leased to the transfer; `adopt`
        hands them to the request, and until then only `free` gives them back: never a timeout
        alone. The caller runs the loads of `host`'s units (`loads_of`): they must have ended before
        either.
        """
        sequences = self._sequences
        if sequences.waiting:
            raise OutOfSlots(f"{len(sequences.waiting)} requests wait to come back here")
        keys = request.keys if self._allocator.has_prefix_cache else ()
        order = sequences.next_order()
        waiting = PendingRequest(order, request, Goal.DECODE, EMPTY_HOST, was_retracted=False)
        plan = self._planner.plan_receive(
            keys,
            request.prompt_len,
            self._allocator.tree,
            host if keys else EMPTY_HOST,
            num_decoded=waiting.num_decoded,
        )
        holder = Holder(Role.TRANSFER_IN, reservation_id)
        headroom = len(sequences.decoding)
        sequence = self._allocator.try_admit(waiting, plan, holder, headroom, now)
        if sequence is None:
            raise OutOfSlots("no room for one more request; see /debug/ledger")
        sequence.phase = Phase.RESERVED
        sequences.reserved[reservation_id] = sequence
        share_end(self._allocator, sequence, self._all_wanted(sequence))
        return sequence

    def _all_wanted(
        self, sequence: RunningSequence
    ) -> Iterator[tuple[tuple[Kind, int], SlotHandle]]:
        for kind in self._allocator.manifest.kinds:
            for index, handle in _wanted_units(sequence, kind, 0, sequence.prompt_len + 1):
                yield (kind, index), handle

    def expire(self, now: float) -> None:
        """Gives back the prompts' ends whose siblings have not come in time."""
        self._allocator.prompt_ends.expire(now)

    def name_of(self, reservation_id: str) -> str:
        """The request id of a reservation. Raises KeyError for a reservation that is not here."""
        return self._sequences.reserved[reservation_id].request_id

    def adopt(self, reservation_id: str) -> RunningSequence:
        """The hand-off is verified: the request owns the slots and decodes from now on."""
        sequence = self._sequences.reserved.pop(reservation_id)
        # first, so that a later failure finds the request by its name
        self._sequences.adopt(sequence)
        owner = Holder(Role.REQUEST, sequence.request_id)
        self._allocator.pools.move(sequence.slots(), sequence.holder, owner)
        sequence.holder, sequence.phase = owner, Phase.DECODING
        sequence.draws_submitted = 1
        return sequence

    def units_at(
        self, reservation_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of the units in [first, end), absolute, that a transfer writes. Raises
        NotFound.

        A recurrent unit's index is its position, the length of the prompt. Units that decode
        reuses, loads or copies are left out: they must not be written.
        """
        sequence = self._sequences.reserved.get(reservation_id)
        if sequence is None:
            raise NotFound(f"reservation {reservation_id} holds no slots here")
        return _wanted_units(sequence, kind, first, end)

    def loads_of(self, reservation_id: str) -> tuple[SlotLoad, ...]:
        """The host units that decode loads by itself, with their slots. Raises KeyError."""
        sequence = self._sequences.reserved[reservation_id]
        return tuple(
            SlotLoad(sequence.request_id, unit, sequence.own[unit.kind][unit.page_index].slot)
            for unit in sequence.plan.loads
        )

    def plan_of(self, reservation_id: str) -> ResumePlan:
        """The plan of a hand-off that has not ended. Raises KeyError."""
        return self._sequences.reserved[reservation_id].plan

    def num_copied(self, reservation_id: str) -> int:
        """The units that decode copies from a sibling's hand-off. Raises KeyError."""
        return len(self._sequences.reserved[reservation_id].opening)

    def free(self, reservation_id: str) -> bool:
        """Gives the slots back after quarantine, when no writer can write to them."""
        sequence = self._sequences.reserved.pop(reservation_id, None)
        if sequence is None:
            return False
        sequence.phase = Phase.DONE
        self._allocator.leave(sequence)
        return True


def _wanted_units(
    sequence: RunningSequence, kind: Kind, first: int, end: int
) -> list[tuple[int, SlotHandle]]:
    """The units in [first, end) that a transfer writes. Units that decode reuses, loads or copies
    must not be written."""
    copied = {copy.dst for copy in sequence.opening if copy.kind is kind}
    if kind is Kind.RECURRENT:
        units = {sequence.prompt_len: sequence.working} if sequence.working else {}
    else:
        plan = sequence.plan
        reused = plan.window_pages if kind is Kind.WINDOW else range(plan.anchor_pages)
        loaded = {unit.page_index for unit in plan.loads if unit.kind is kind}
        units = {
            page: handle
            for page, handle in sequence.own[kind].items()
            if page not in reused and page not in loaded
        }
    return [
        (index, units[index])
        for index in sorted(units)
        if first <= index < end and units[index].slot not in copied
    ]
