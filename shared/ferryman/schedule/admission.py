"""Admission: the requests that can ever run here, the next one to admit, and its resume plan."""

from __future__ import annotations

from collections.abc import Iterator

from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, Reason, ResumePlan
from ferryman.cache.slots import Demand, Holder, Role
from ferryman.errors import InvalidRequest
from ferryman.schedule.events import Event, SequenceAdmitted
from ferryman.schedule.limits import SchedulerLimits
from ferryman.schedule.request import Request
from ferryman.schedule.request_table import FaultIsolation, SequenceTable
from ferryman.schedule.sequence import Goal, PendingRequest, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator


class CapacityCheck:
    """Checks that pools of `sizes`, all empty, can hold a request to its last token.

    A request that can never fit is refused at once, so that it does not block the queue.
    """

    def __init__(self, limits: SchedulerLimits, sizes: Demand, planner: Planner) -> None:
        self._limits = limits
        self._sizes = sizes
        self._planner = planner

    def check(self, request: Request, goal: Goal) -> None:
        """Raises InvalidRequest for a request that can never run here, even alone."""
        self._limits.check(request)
        waiting = PendingRequest(0, request, goal, EMPTY_HOST, was_retracted=False)
        bare = self._planner.plan_cold(
            request.prompt_len, Reason.NO_ROOM, num_decoded=waiting.num_decoded
        )
        for kind, count in bare.demand.items():
            if count > self._sizes[kind]:
                raise InvalidRequest(
                    f"prompt of {request.prompt_len} tokens needs {count} {kind} slots at once, "
                    f"there are {self._sizes[kind]}",
                    "prompt",
                )

    def cold_demand(self, prompt_len: int) -> Demand:
        """The slots that a prompt takes when nothing of it is cached."""
        return self._planner.plan_cold(prompt_len, Reason.NO_ROOM).demand


class Admission:
    """Admits strictly in order: only the head of the queue. The caller may replace `planner` after
    it has measured costs."""

    def __init__(
        self,
        allocator: SlotAllocator,
        sequences: SequenceTable,
        limits: SchedulerLimits,
        planner: Planner,
        isolation: FaultIsolation,
        events: list[Event],
    ) -> None:
        self.planner = planner
        self._allocator = allocator
        self._sequences = sequences
        self._limits = limits
        self._isolation = isolation
        self._events = events
        self.lacks_slots = False

    def prompts(self, now: float) -> Iterator[RunningSequence]:
        """The prompts being prefilled in their order, then as many waiting requests as can be
        admitted."""
        self.lacks_slots = False
        yield from list(self._sequences.prefilling)
        while admitted := self._try_admit_next(now):
            yield admitted

    def _try_admit_next(self, now: float) -> RunningSequence | None:
        """Admits the head of the queue. A head that raises is removed, and the next one is
        tried."""
        sequences = self._sequences
        while (waiting := sequences.waiting.head) is not None:
            if sequences.num_active >= self._limits.concurrency.max_running:
                return None
            name = waiting.request.request_id
            admitted = self._isolation.run(name, self._try_admit, waiting, now)
            if admitted is not None or sequences.waiting.head is waiting:
                return admitted
        return None

    def _try_admit(self, waiting: PendingRequest, now: float) -> RunningSequence | None:
        sequences = self._sequences
        holder = Holder(Role.REQUEST, waiting.request.request_id)
        for plan in self._resume_plans(waiting):
            headroom = len(sequences.decoding)
            sequence = self._allocator.try_admit(waiting, plan, holder, headroom, now)
            if sequence is not None:
                sequences.admit(sequence)
                self._events.append(
                    SequenceAdmitted(sequence.request_id, plan, waiting.was_retracted)
                )
                return sequence
        self.lacks_slots = True
        return None

    def _resume_plans(self, waiting: PendingRequest) -> Iterator[ResumePlan]:
        """The best plan, then smaller ones. If no other request holds slots here, a cold plan comes
        last."""
        prompt_len, decoded = waiting.request.prompt_len, waiting.num_decoded
        if not self._allocator.has_prefix_cache:
            why = Reason.QUARANTINED if self._limits.prefix_cache else Reason.CACHE_OFF
            yield self.planner.plan_cold(prompt_len, why, num_decoded=decoded)
            return
        keys, tree, forks = waiting.request.keys, self._allocator.tree, waiting.request.fork_points
        if waiting.request.prompt_logprobs is None:
            yield from self.planner.plans(
                keys, prompt_len, tree, waiting.host, num_decoded=decoded, forks=forks
            )
        else:  # every token's logits are needed, and cached state has none
            why = Reason.PROMPT_LOGPROBS
            yield from self.planner.plans_anew(
                keys, prompt_len, why, num_decoded=decoded, forks=forks
            )
        if not self._sequences.by_id and not self._sequences.reserved:
            yield self.planner.plan_cold(prompt_len, Reason.NO_ROOM, num_decoded=decoded)
