"""The table of sequences: waiting requests, and requests with slots by their phase.

An error in the work for one request ends that request only. All work that the schedule does for one
request runs through `FaultIsolation.run`, or passes its error to `FaultIsolation.fail`: admission,
its chunk or draws in a plan, its outcome, its end, and the worker's handling of its events. The
error removes the request, with every slot, row and hold it has, recorded or not, and is reported as
`RequestFailed`. Errors in preparing a step for one request come with its outcome
(`engine/forward/prepared_step.py`, `engine/forward/token_source.py`). Errors of a whole step (its
forward, the device) are not isolated: then the state is unknown, and the worker ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import ParamSpec, TypeVar

from ferryman.cache.resume import HostView
from ferryman.errors import NotFound
from ferryman.schedule.events import Event, RequestFailed
from ferryman.schedule.sequence import PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator

P = ParamSpec("P")
T = TypeVar("T")


class WaitingQueue:
    """Waiting requests, lower `order` first: a retracted request gets its old place back."""

    def __init__(self) -> None:
        self._waiting: list[PendingRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(waiting.request.request_id == request_id for waiting in self._waiting)

    @property
    def num_tokens(self) -> int:
        """The tokens of all waiting prompts."""
        return sum(waiting.request.prompt_len for waiting in self._waiting)

    @property
    def head(self) -> PendingRequest | None:
        return self._waiting[0] if self._waiting else None

    def enter(self, waiting: PendingRequest) -> None:
        insort(self._waiting, waiting, key=lambda waiting: waiting.order)

    def offer_host(self, request_id: str, host: HostView) -> bool:
        """Gives a waiting request a new view of the host tier; False when it does not wait here."""
        for index, waiting in enumerate(self._waiting):
            if waiting.request.request_id == request_id:
                self._waiting[index] = replace(waiting, host=host)
                return True
        return False

    def leave(self, request_id: str) -> PendingRequest | None:
        """Takes a request out; None when it is not here."""
        for index, waiting in enumerate(self._waiting):
            if waiting.request.request_id == request_id:
                return self._waiting.pop(index)
        return None


class SequenceTable:
    """All requests of one schedule. `by_id` has those with slots, except the reserved ones.

    `newly_adopted` came by a hand-off and have not been in a step yet.
    """

    def __init__(self, allocator: SlotAllocator) -> None:
        self.waiting = WaitingQueue()
        self.prefilling: list[RunningSequence] = []
        self.decoding: list[RunningSequence] = []
        self.newly_adopted: list[RunningSequence] = []
        self.by_id: dict[str, RunningSequence] = {}
        self.reserved: dict[str, RunningSequence] = {}
        self._allocator = allocator
        self._orders = count()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_id or request_id in self.waiting

    def next_order(self) -> int:
        """Numbers arrivals: the lower number goes first."""
        return next(self._orders)

    def running(self, request_id: str) -> RunningSequence:
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
        return under_way + self.waiting.num_tokens

    # Admission, changes of phase, leaving.

    def admit(self, sequence: RunningSequence) -> None:
        """Moves a request out of the queue; its prompt is computed from now on."""
        self.waiting.leave(sequence.request_id)
        self.by_id[sequence.request_id] = sequence
        self.prefilling.append(sequence)

    def adopt(self, sequence: RunningSequence) -> None:
        """Adds a request whose prompt is computed already."""
        self.by_id[sequence.request_id] = sequence
        self.decoding.append(sequence)
        self.newly_adopted.append(sequence)

    def sort_scheduled(self) -> None:
        """Moves prompts whose last chunk was submitted out of prefill."""
        for sequence in [s for s in self.prefilling if s.scheduled == s.prompt_len]:
            self.prefilling.remove(sequence)
            if sequence.phase is Phase.DECODING:
                self.decoding.append(sequence)

    def stop_decoding(self, sequence: RunningSequence) -> None:
        """Takes a request out of the decode steps; it keeps its slots."""
        for group in (self.decoding, self.newly_adopted):
            if sequence in group:
                group.remove(sequence)

    def leave(self, sequence: RunningSequence) -> None:
        """Ends a request. Its slots go back once no step in flight uses them."""
        sequence.phase = Phase.DONE
        del self.by_id[sequence.request_id]
        for group in (self.prefilling, self.decoding, self.newly_adopted):
            if sequence in group:
                group.remove(sequence)
        self._allocator.leave(sequence)

    def take_out(self, request_id: str) -> None:
        """Removes a failed request without trusting its records."""
        self.waiting.leave(request_id)
        sequence = self.by_id.pop(request_id, None)
        if sequence is None:
            return
        sequence.phase = Phase.DONE
        for group in (self.prefilling, self.decoding, self.newly_adopted):
            if sequence in group:
                group.remove(sequence)
        self._allocator.reclaim(sequence)

    def with_slots(self) -> list[RunningSequence]:
        """All requests that hold slots, the reserved ones included."""
        return [*self.by_id.values(), *self.reserved.values()]


class FaultIsolation:
    """Runs the work for one request, and ends that request if the work raises."""

    def __init__(
        self, sequences: SequenceTable, check_integrity: Callable[[], None], events: list[Event]
    ) -> None:
        self._sequences = sequences
        self._check_integrity = check_integrity
        self._events = events

    def run(
        self, request_id: str, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """The result of `act`; None when it raised, which ended the request.

        Raises AssertionError when pools, tree and requests no longer agree afterwards: then the
        error has damaged more than the request, and nothing here can be trusted.
        """
        try:
            return act(*args, **kwargs)
        except Exception as error:  # any error goes to the caller of the request
            self.fail(request_id, error)
            return None

    def fail(self, request_id: str, error: Exception) -> None:
        """Removes the request whose work raised `error`. Raises as `run` does."""
        self._sequences.take_out(request_id)
        self._events.append(RequestFailed(request_id, error))
        self._check_integrity()
