"""The scheduler: plan → run → commit. It holds integers only, so it cannot race with the device.

    plan = scheduler.plan(now)                 # pure: which step next, on which slots
    outcome = await stream.run(plan)           # the device
    scheduler.commit(plan, outcome, now)       # pure: what follows from it
    events = scheduler.take_events()

One scheduler drives the offline engine, prefill workers and decode workers alike. There is no phase
of the engine: a step prefills if a prompt can advance, and decodes otherwise. With overlap a step
is planned while another runs; all that committing needs is recorded with the step, not read from
the request afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ferryman.cache.branch import CacheChange
from ferryman.cache.capacity import prompt_points
from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.placement import Placement
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, Costs, HostView
from ferryman.cache.slots import Demand, Holder, Ledger, SlotHandle
from ferryman.cache.window_budget import WindowPool
from ferryman.errors import InvalidRequest, QueueFull
from ferryman.schedule import prefill
from ferryman.schedule.admission import Admission
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome, StepPlan
from ferryman.schedule.decode import DecodeSteps
from ferryman.schedule.donation import Donation, ToNobody, ToTree
from ferryman.schedule.door import Door
from ferryman.schedule.events import CachedUnit, Event, Finished
from ferryman.schedule.limits import SchedulerLimits, SchedulerStatistics
from ferryman.schedule.opening import OpsDraft
from ferryman.schedule.outcomes import Outcomes
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.reservations import Reservations
from ferryman.schedule.residence import Residence
from ferryman.schedule.retraction import Retraction
from ferryman.schedule.roster import Roster
from ferryman.schedule.sequence import Goal, Running, Waiting
from ferryman.schedule.units import held_units, resume_units
from ferryman.schedule.verification import Verification


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way, with the requests it was built from."""

    step_id: int
    sequences: tuple[Running, ...]


class Scheduler:
    """Decides which step runs next and on which slots. Touched from one thread only.

    `admission` lets in, `reservations` is decode's side of a hand-off, `retraction` what happens
    when room is short; `roster` says who is here.
    """

    def __init__(
        self,
        manifest: StateManifest,
        sizes: Demand,
        limits: SchedulerLimits,
        costs: Costs,
        root: PageKey,
    ) -> None:
        self.manifest = manifest
        self.limits = limits
        self._events: list[Event] = []
        self.residence = Residence(manifest, sizes, limits)
        self.roster = Roster(self.residence)
        placement = Placement(limits.snapshot_grid, prompt_points(manifest, sizes))
        windows = WindowPool(sizes.get(Kind.WINDOW, 0), limits.concurrency.uncertain_len)
        planner = Planner(
            manifest,
            costs,
            limits.chunk_tokens,
            placement,
            windows=windows,
            num_drafts=limits.drafting.num_tokens,
        )
        here = self.residence, self.roster
        self.admission = Admission(*here, limits, planner, self._events)
        self._door = Door(limits, sizes, planner)
        self.reservations = Reservations(*here, self._door, planner, limits.prefix_cache)
        donation: Donation = ToNobody()
        if limits.prefix_cache:
            donation = ToTree(self.residence, root, self._events)
        self.retraction = Retraction(*here, donation, self._events)
        verification = Verification(self.residence, limits.concurrency.tracking)
        self._outcomes = Outcomes(*here, donation, self.retraction, verification, self._events)
        self._decode = DecodeSteps(*here, self.retraction, verification, limits)
        self._flights: deque[_Flight] = deque()
        self._prefill_steps = 0
        self._decode_steps = 0
        self._step_ids = count(1)

    # The door.

    def check(self, request: Request, goal: Goal = Goal.DECODE) -> None:
        """Raises InvalidRequest when these pools can never hold the request to its last token."""
        self._door.check(request, goal)

    def submit(self, request: Request, goal: Goal, host: HostView = EMPTY_HOST) -> None:
        """Queues a request. Raises InvalidRequest, or QueueFull."""
        self.check(request, goal)
        line = self.roster.line
        if request.request_id in self.roster:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        if len(line) >= self.limits.max_waiting:
            raise QueueFull(f"{len(line)} requests are waiting here already")
        line.enter(Waiting(self.roster.next_order(), request, goal, host, was_retracted=False))

    def cancel(self, request_id: str, now: float) -> bool:
        """Ends a request wherever it stands; False when it is not here. Slots go back by rule."""
        if (waiting := self.roster.line.leave(request_id)) is not None:
            num_generated = waiting.request.num_generated
            self._events.append(Finished(request_id, FinishReason.CANCELLED, num_generated))
            return True
        sequence = self.roster.by_id.get(request_id)
        if sequence is None:
            return False
        self._outcomes.finish(sequence, FinishReason.CANCELLED, now)
        return True

    def offer_host(self, request_id: str, view: HostView) -> bool:
        """Gives a request that waits, a retracted one above all, what the host tier holds of it.

        False when it no longer waits: then nobody will read the view, and its lease may end.
        """
        return self.roster.line.offer_host(request_id, view)

    # Hand-off.

    def adopt(self, reservation_id: str, first: Sampled, now: float) -> None:
        """Decode has verified it: the request decodes here from its first token on."""
        self._outcomes.adopted(self.reservations.adopt(reservation_id), first, now)

    def units_at(
        self, request_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of the units [first, end) that a request's prompt lies in.

        A recurrent unit's index is a position: the prompt's length. Raises NotFound for a request
        that holds no slots, KeyError for a page that it does not have.
        """
        return held_units(self.roster.running(request_id), self.residence.tree, kind, first, end)

    def release_held(self, request_id: str, now: float) -> None:
        """Decode has acknowledged (or will never): the slots of a held prompt go back."""
        self._outcomes.finish(self.roster.running(request_id), FinishReason.STOP, now)

    # Plan.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run (or enough steps are in flight)."""
        if len(self._flights) >= self.limits.steps_in_flight:
            return None
        return self._plan_prefill(now) or self._plan_decode(now)

    def _plan_prefill(self, now: float) -> StepPlan | None:
        budget, draft = self.limits.chunk_tokens, OpsDraft()
        chunks, sequences = [], []
        for sequence in self.admission.prompts(now):
            end = prefill.next_end(sequence, budget, self.manifest.scan_chunk)
            if end > sequence.scheduled:
                budget -= end - sequence.scheduled
                chunks.append(prefill.cut_chunk(self.residence, sequence, end, draft))
                sequences.append(sequence)
            if end < sequence.prompt_len or budget <= 0:
                break
        if not chunks:
            return None
        step = prefill.build_step(self.residence, next(self._step_ids), chunks, draft)
        self._launch(step.step_id, sequences)
        return step

    def _plan_decode(self, now: float) -> StepPlan | None:
        ready = self._decode.ready(now)
        if not ready:
            return None
        step, members = self._decode.plan(next(self._step_ids), ready)
        self._launch(step.step_id, members)
        return step

    def _launch(self, step_id: int, sequences: list[Running]) -> None:
        """Records a step as submitted; copy sources are released behind it."""
        self._flights.append(_Flight(step_id, tuple(sequences)))
        self.residence.submitted(step_id)
        for sequence in sequences:
            if sequence.copy_source:
                self.residence.release_copy_source(sequence)
        self.roster.sort_scheduled()

    # Commit.

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Applies what a step brought. Steps commit in the order in which they were planned."""
        flight = self._flights.popleft()
        assert flight.step_id == plan.step_id == outcome.step_id, "steps commit in order"
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        if isinstance(plan, PrefillStep):
            self._prefill_steps += 1
            self._outcomes.prefilled(plan, outcome, flight.sequences, now)
        else:
            self._decode_steps += 1
            self._outcomes.decoded(plan, outcome, flight.sequences, now)
        self.residence.committed(plan.step_id)

    # What others read, and keep alive.

    def lease(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        """Keeps slots while somebody beside the schedule reads them: a copy, a transfer."""
        self.residence.pools.lease(handles, holder)

    def release(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        """Ends `lease`."""
        self.residence.pools.release(handles, holder)

    def chain_units(self, keys: Sequence[PageKey]) -> tuple[CachedUnit, ...]:
        """All that the tree holds of a key chain, shallow pages first."""
        tree = self.residence.tree
        return tuple(
            CachedUnit(kind, page, key, tree.slot(kind, key))
            for page, key in enumerate(keys[: tree.match_depth(keys)])
            for kind in self.manifest.kinds
            if tree.has(kind, key)
        )

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Keys of the units that would be evicted next, in that order. Changes nothing."""
        return self.residence.next_to_evict(kind)

    def free_share(self, kind: Kind) -> float:
        """The share of a pool's slots that nobody holds."""
        pool = self.residence.pools[kind]
        return pool.num_free / pool.num_slots if pool.num_slots else 0.0

    def resume_units(self, keys: Sequence[PageKey]) -> tuple[CachedUnit, ...]:
        """All that a resume at the deepest possible point of a chain needs; empty without one."""
        return resume_units(self.manifest, self.residence.tree, keys)

    def flush(self) -> int:
        """Drops everything cached that nobody uses; how many slots that freed."""
        everything = {kind: pool.num_slots for kind, pool in self.residence.pools.by_kind.items()}
        free = sum(pool.num_free for pool in self.residence.pools.by_kind.values())
        self.residence.make_room(everything)
        return sum(pool.num_free for pool in self.residence.pools.by_kind.values()) - free

    def take_events(self) -> list[Event]:
        """Everything that happened since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def take_cache_changes(self) -> tuple[CacheChange, ...]:
        return self.residence.tree.drain_changes()

    def set_costs(self, costs: Costs) -> None:
        """New measured costs; plans made from now on use them."""
        self.admission.planner = replace(self.admission.planner, costs=costs)

    @property
    def has_work(self) -> bool:
        return bool(self.roster.line or self.roster.num_active or self._flights)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def ledgers(self) -> dict[Kind, Ledger]:
        return self.residence.pools.ledgers()

    def statistics(self) -> SchedulerStatistics:
        roster, drafts = self.roster, self._outcomes.drafts
        return SchedulerStatistics(
            waiting=len(roster.line),
            prefilling=len(roster.prefilling),
            decoding=len(roster.decoding),
            held=roster.num_held,
            reserved=len(roster.reserved),
            tokens_to_prefill=roster.tokens_to_prefill,
            prefill_steps=self._prefill_steps,
            decode_steps=self._decode_steps,
            draft_steps=drafts.steps,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
        )

    def check_integrity(self) -> None:
        """Conservation: free and leased add up in every pool, and the tree is a tree."""
        self.residence.check_integrity()
