"""The roster: who waits, and who holds slots, by where they stand."""

from __future__ import annotations

from itertools import count

from ferryman.errors import NotFound
from ferryman.schedule.line import WaitingLine
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Phase, Running


class Roster:
    """All requests of one schedule. `by_id` has those that hold slots, but for the reserved ones.

    `newly_adopted` came by a hand-off, and no step has heard of them yet.
    """

    def __init__(self, residence: Residence) -> None:
        self.line = WaitingLine()
        self.prefilling: list[Running] = []
        self.decoding: list[Running] = []
        self.newly_adopted: list[Running] = []
        self.by_id: dict[str, Running] = {}
        self.reserved: dict[str, Running] = {}
        self._residence = residence
        self._orders = count()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id or request_id in self.line

    def next_order(self) -> int:
        """Arrivals are numbered: lower goes first."""
        return next(self._orders)

    def running(self, request_id: str) -> Running:
        """Raises NotFound for a request that holds no slots."""
        sequence = self.by_id.get(request_id)
        if sequence is None:
            raise NotFound(f"request {request_id} holds no slots here")
        return sequence

    @property
    def num_active(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_held(self) -> int:
        return sum(sequence.phase is Phase.HELD for sequence in self.by_id.values())

    @property
    def tokens_to_prefill(self) -> int:
        under_way = sum(s.prompt_len - s.scheduled for s in self.prefilling)
        return under_way + self.line.num_tokens

    # Coming, going on, leaving.

    def admit(self, sequence: Running) -> None:
        """Out of the line: its prompt is computed from now on."""
        self.line.leave(sequence.request_id)
        self.by_id[sequence.request_id] = sequence
        self.prefilling.append(sequence)

    def adopt(self, sequence: Running) -> None:
        """It comes with its prompt computed."""
        self.by_id[sequence.request_id] = sequence
        self.decoding.append(sequence)
        self.newly_adopted.append(sequence)

    def sort_scheduled(self) -> None:
        """Prompts of which the last chunk was submitted prefill no more."""
        for sequence in [s for s in self.prefilling if s.scheduled == s.prompt_len]:
            self.prefilling.remove(sequence)
            if sequence.phase is Phase.DECODING:
                self.decoding.append(sequence)

    def leave(self, sequence: Running) -> None:
        """Its slots go back, once the device is done with them."""
        sequence.phase = Phase.DONE
        del self.by_id[sequence.request_id]
        for group in (self.prefilling, self.decoding, self.newly_adopted):
            if sequence in group:
                group.remove(sequence)
        self._residence.leave(sequence)
