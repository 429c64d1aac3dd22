"""The scheduler: plan → run → commit. It holds integers only, so it cannot race with the device.

    plan = scheduler.plan(now)                 # pure: which step next, on which slots
    outcome = await stream.run(plan)           # the device
    scheduler.commit(plan, outcome, now)       # pure: what follows from it
    events = scheduler.take_events()

One scheduler drives the offline engine and all kinds of worker alike. The engine has no phases: a
step prefills or decodes, in the order that `limits.order` sets (`schedule/limits.py`). With
overlap a step is planned while another runs, so everything that the commit needs is recorded with
the step and not read from the request later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ParamSpec, TypeVar

from ferryman.cache.capacity import prompt_points
from ferryman.cache.keys import PageKey, TokenIds
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.node import TreeChange
from ferryman.cache.placement import FORK_PAGES, Placement
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, HostView, ResumeCosts
from ferryman.cache.slots import Demand, Holder, Ledger, Prepare, SlotHandle, is_ready
from ferryman.cache.window_budget import WindowPool
from ferryman.errors import InvalidRequest, QueueFull
from ferryman.schedule import prefill
from ferryman.schedule.admission import Admission, CapacityCheck
from ferryman.schedule.audit.audits import Audits
from ferryman.schedule.batch import (
    AuditStep,
    Chunk,
    DecodeStep,
    MixedStep,
    PrefillStep,
    Sampled,
    SlotOpsBuilder,
    StepOutcome,
    StepPlan,
)
from ferryman.schedule.decode import DecodeSteps
from ferryman.schedule.events import CachedUnit, Event, Finished
from ferryman.schedule.limits import SchedulerLimits, SchedulerStatistics
from ferryman.schedule.postprocess import Postprocessor
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.request_table import FaultIsolation, SequenceTable
from ferryman.schedule.reservations import ReservedSequences
from ferryman.schedule.retraction import Retraction, resume_units
from ferryman.schedule.sequence import Goal, PendingRequest, Phase, RunningSequence
from ferryman.schedule.slot_allocator import SlotAllocator
from ferryman.schedule.tree_publisher import TreePublisher
from ferryman.schedule.verification import Verification

P = ParamSpec("P")
S = TypeVar("S")

Sequences = tuple[RunningSequence, ...]
Planned = tuple[S, list[RunningSequence]]
"""A step and its requests, in its order."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step on its way, with its requests."""

    step_id: int
    sequences: tuple[RunningSequence, ...]


class Scheduler:
    """Decides which step runs next and on which slots. Used from one thread only.

    `admission` admits requests, `reservations` is decode's side of a hand-off, `retraction` pushes
    requests back when slots are short; `sequences` holds all requests. `audits` computes some of
    them again, when there is nothing else to do.
    """

    def __init__(
        self,
        manifest: StateManifest,
        sizes: Demand,
        limits: SchedulerLimits,
        costs: ResumeCosts,
        root: PageKey,
        *,
        prepare: Prepare = is_ready,
    ) -> None:
        """`prepare` is called before a slot is given for the first time."""
        self.manifest = manifest
        self.limits = limits
        self._events: list[Event] = []
        self.allocator = SlotAllocator(manifest, sizes, limits, prepare)
        self.sequences = SequenceTable(self.allocator)
        gain = FORK_PAGES * manifest.page_size
        placement = Placement(limits.snapshot_grid, prompt_points(manifest, sizes), gain)
        windows = WindowPool(sizes.get(Kind.WINDOW, 0), limits.concurrency.uncertain_len)
        planner = Planner(
            manifest,
            costs,
            limits.chunk_tokens,
            placement,
            windows=windows,
            num_drafts=limits.drafting.num_tokens,
        )
        here = self.allocator, self.sequences
        isolation = FaultIsolation(self.sequences, self.check_integrity, self._events)
        self._isolation = isolation
        self.admission = Admission(*here, limits, planner, isolation, self._events)
        self._capacity = CapacityCheck(limits, sizes, planner)
        self.reservations = ReservedSequences(*here, planner)
        # Without a prefix cache all slots go back to the pools.
        has_cache = limits.prefix_cache
        publisher = TreePublisher(self.allocator, root, self._events) if has_cache else None
        self.retraction = Retraction(*here, publisher, self._events)
        verification = Verification(*here, limits.concurrency)
        self.audits = Audits(*here, planner, limits.audit_share, self._events)
        self._postprocessor = Postprocessor(
            *here, publisher, self.retraction, verification, isolation, self.audits, self._events
        )
        self._decode = DecodeSteps(*here, self.retraction, verification, isolation, limits)
        self._flights: deque[_StepInFlight] = deque()
        self._prefill_steps = 0
        self._decode_steps = 0
        self._last_was_prefill = False
        self._step_ids = count(1)

    # Requests coming in and ending.

    def check(self, request: Request, goal: Goal = Goal.DECODE) -> None:
        """Raises InvalidRequest when these pools can never hold the request to its last token."""
        self._capacity.check(request, goal)

    def last_fresh(self, prompt_len: int) -> dict[Kind, int]:
        """The last slot of each kind that a prompt would take if nothing of it is cached, as far as
        it was never given before: then its memory may not be there yet."""
        return self.allocator.pools.last_fresh(self._capacity.cold_demand(prompt_len))

    def submit(self, request: Request, goal: Goal, host: HostView = EMPTY_HOST) -> None:
        """Queues a request that has passed `check`: one that never fits would block the queue.

        Raises QueueFull, or InvalidRequest for an id that is in use.
        """
        line = self.sequences.waiting
        if request.request_id in self.sequences:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        if len(line) >= self.limits.max_waiting:
            raise QueueFull(f"{len(line)} requests are waiting here already")
        line.enter(
            PendingRequest(self.sequences.next_order(), request, goal, host, was_retracted=False)
        )

    def cancel(self, request_id: str, now: float) -> bool:
        """Ends a request in any phase; False when it is not here. Slots are given back as
        always."""
        if (waiting := self.sequences.waiting.leave(request_id)) is not None:
            num_generated = waiting.request.num_generated
            self._events.append(Finished(request_id, FinishReason.CANCELLED, num_generated))
            return True
        sequence = self.sequences.by_id.get(request_id)
        if sequence is None:
            return False
        self.isolate(request_id, self._postprocessor.finish, sequence, FinishReason.CANCELLED, now)
        return True

    def isolate(
        self, request_id: str, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Runs `act` on behalf of one request, here or not; False when it raised, which ends that
        request with `RequestFailed` and no other."""
        try:
            act(*args, **kwargs)
        except Exception as error:  # any error goes to the caller of the request
            self.fail(request_id, error)
            return False
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        """Ends a request, here or not, for which some work raised `error`."""
        self._isolation.fail(request_id, error)

    def offer_host(self, request_id: str, view: HostView) -> bool:
        """Gives a waiting request, usually a retracted one, a view of its state in the host tier.

        False when it no longer waits: then the view is not used, and its lease may end.
        """
        return self.sequences.waiting.offer_host(request_id, view)

    # Hand-off.

    def adopt(self, reservation_id: str, first: Sampled, now: float) -> None:
        """Decode has verified the hand-off: the request decodes here from its first token on."""
        name = self.reservations.name_of(reservation_id)
        self.isolate(name, self._adopt, reservation_id, first, now)

    def _adopt(self, reservation_id: str, first: Sampled, now: float) -> None:
        self._postprocessor.adopted(self.reservations.adopt(reservation_id), first, now)

    def units_at(
        self, request_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of the units [first, end) of a request's prompt: its own, or the tree's.

        A recurrent unit's index is a position: the prompt's length. Raises NotFound for a request
        that holds no slots, KeyError for a page that it does not have.
        """
        sequence, tree = self.sequences.running(request_id), self.allocator.tree
        if kind is Kind.RECURRENT:
            return [(first, sequence.working)] if sequence.working else []
        leased, keys = sequence.own[kind], sequence.keys
        pages = range(first, end)
        return [(page, leased.get(page) or tree.slot(kind, keys[page])) for page in pages]

    def detach(self, request_id: str, now: float) -> bool:
        """Pauses a decoding request between two steps, to be handed off: it draws nothing more, and
        `SequenceDetached` follows once no step holds it. Its slots hold the state of all its tokens
        but the last, until `cancel`.

        False for a request that cannot be stopped yet: it has drawn no token, waits for slots, or
        its first step has to copy state into them.
        """
        sequence = self.sequences.by_id.get(request_id)
        if sequence is None or sequence.phase is not Phase.DECODING:
            return False
        if sequence.opening or not sequence.drawn:
            return False
        return self.isolate(request_id, self._postprocessor.detach, sequence, now)

    def known_tokens(self, request_id: str) -> TokenIds:
        """All tokens of a request with slots, the last drawn too. Raises NotFound."""
        return self.sequences.running(request_id).token_ids()

    def release_held(self, request_id: str, now: float) -> None:
        """Gives the slots of a held request back: decode has acknowledged it, or never will."""
        sequence = self.sequences.running(request_id)
        self.isolate(request_id, self._postprocessor.finish, sequence, FinishReason.STOP, now)

    # Plan.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run (or enough steps are in flight)."""
        if len(self._flights) >= self.limits.steps_in_flight:
            return None
        if self.audits.is_due and (audit := self._plan_audit(now)) is not None:
            return audit
        step_id, order = next(self._step_ids), self.limits.order
        if order.mixes and not self.limits.drafting.num_tokens:
            planned = self._mixed(step_id, now)
        elif order.decodes_next(after_prefill=self._last_was_prefill):
            planned = self._tokens(step_id, now) or self._prompts(step_id, now)
        else:
            planned = self._prompts(step_id, now) or self._tokens(step_id, now)
        if planned is None:
            return None
        step, members = planned
        self._last_was_prefill = isinstance(step, PrefillStep)
        self._launch(step_id, members)
        self.audits.budget.stepped()
        return step

    def _mixed(self, step_id: int, now: float) -> Planned[StepPlan] | None:
        """A step of all running requests and of prompts, or of those that are there."""
        # Tokens first: a prompt that ends in this step draws its first token, and no second one.
        tokens = self._tokens(step_id, now)
        prompts = self._prompts(step_id, now)
        if tokens is None or prompts is None:
            return tokens or prompts
        return MixedStep(prompts[0], tokens[0]), prompts[1] + tokens[1]

    def _plan_audit(self, now: float) -> StepPlan | None:
        """The next chunk of the open audit. It is dropped if it finds no slots, or raises."""
        name, step_id = self.audits.name, next(self._step_ids)
        step = self._isolation.run(name, self.audits.plan, step_id, now)
        if step is None:
            self.audits.drop()
            return None
        self._launch(step_id, self.audits.computing())
        return step

    def _prompts(self, step_id: int, now: float) -> Planned[PrefillStep] | None:
        """Chunks of the prompts that fit into the budget of a step."""
        limits, draft = self.limits, SlotOpsBuilder()
        num_decoding, grid = len(self.sequences.decoding), self.manifest.scan_chunk
        budget = limits.order.prefill_tokens(limits.chunk_tokens, num_decoding, grid)
        chunks, sequences = [], []
        for sequence in self.admission.prompts(now):
            name = sequence.request_id
            chunk = self._isolation.run(name, self._cut_chunk, sequence, budget, draft)
            if chunk is not None:
                budget -= chunk.end - chunk.start
                chunks.append(chunk)
                sequences.append(sequence)
            is_whole = sequence.scheduled == sequence.prompt_len
            if budget <= 0 or not (is_whole or sequence.phase is Phase.DONE):
                break
        if not chunks:
            return None
        return prefill.build_step(self.allocator, step_id, chunks, draft), sequences

    def _cut_chunk(
        self, sequence: RunningSequence, budget: int, draft: SlotOpsBuilder
    ) -> Chunk | None:
        """The next chunk of a prompt, if one fits into `budget` tokens."""
        end = prefill.next_end(sequence, budget, self.manifest.scan_chunk)
        if end <= sequence.scheduled:
            return None
        ops = SlotOpsBuilder()
        chunk = prefill.cut_chunk(self.allocator, sequence, end, ops)
        draft.add(ops)  # all or none: slots of a request that failed here are free already
        return chunk

    def _tokens(self, step_id: int, now: float) -> Planned[DecodeStep] | None:
        """A token of each running request that may draw, or a run of them."""
        ready = self._decode.ready(now)
        return self._decode.plan(step_id, ready) if ready else None

    def _launch(self, step_id: int, sequences: list[RunningSequence]) -> None:
        """Records a step as submitted; the sources of its copies are released after it."""
        self._flights.append(_StepInFlight(step_id, tuple(sequences)))
        self.allocator.submitted(step_id)
        for sequence in sequences:
            if sequence.copy_source:
                self.allocator.release_copy_source(sequence)
        self.sequences.sort_scheduled()

    # Commit.

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Applies the outcome of a step. Steps commit in the order in which they were planned."""
        flight = self._flights.popleft()
        assert flight.step_id == plan.step_id == outcome.step_id, "steps commit in order"
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        if isinstance(plan, AuditStep):
            (sequence,) = flight.sequences
            run, audits = self._isolation.run, self.audits
            if not run(audits.name, audits.committed, plan, outcome, sequence):
                audits.drop()
        elif isinstance(plan, MixedStep):
            of_prompts, of_tokens = plan.outcomes(outcome)
            first = len(plan.prompts.chunks)
            self._prefilled(plan.prompts, of_prompts, flight.sequences[:first], now)
            self._decoded(plan.tokens, of_tokens, flight.sequences[first:], now)
        elif isinstance(plan, PrefillStep):
            self._prefilled(plan, outcome, flight.sequences, now)
        else:
            self._decoded(plan, outcome, flight.sequences, now)
        self.allocator.committed(plan.step_id)

    def _prefilled(
        self, plan: PrefillStep, outcome: StepOutcome, sequences: Sequences, now: float
    ) -> None:
        self.audits.budget.earn(sum(chunk.end - chunk.start for chunk in plan.chunks))
        self._prefill_steps += 1
        self._postprocessor.prefilled(plan, outcome, sequences, now)

    def _decoded(
        self, plan: DecodeStep, outcome: StepOutcome, sequences: Sequences, now: float
    ) -> None:
        self.audits.budget.earn(len(plan.rows))
        self._decode_steps += 1
        self._postprocessor.decoded(plan, outcome, sequences, now)

    # Views and leases for other components.

    def lease(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        """Keeps slots for a reader outside the schedule: a copy, a transfer."""
        self.allocator.pools.lease(handles, holder)

    def release(self, handles: Iterable[SlotHandle], holder: Holder) -> None:
        """Ends `lease`."""
        self.allocator.pools.release(handles, holder)

    def chain_units(self, keys: Sequence[PageKey]) -> tuple[CachedUnit, ...]:
        """All units of a key chain in the tree, shallow pages first."""
        tree = self.allocator.tree
        return tuple(
            CachedUnit(kind, page, key, tree.slot(kind, key))
            for page, key in enumerate(keys[: tree.match_depth(keys)])
            for kind in self.manifest.kinds
            if tree.has(kind, key)
        )

    def next_to_evict(self, kind: Kind) -> Iterator[PageKey]:
        """Keys of the units that would be evicted next, in that order. Changes nothing."""
        return self.allocator.next_to_evict(kind)

    def free_share(self, kind: Kind) -> float:
        """The share of a pool's slots that are free."""
        pool = self.allocator.pools[kind]
        return pool.num_free / pool.num_slots if pool.num_slots else 0.0

    def resume_units(self, keys: Sequence[PageKey]) -> tuple[CachedUnit, ...]:
        """All that a resume at the deepest possible point of a chain needs; empty without one."""
        return resume_units(self.manifest, self.allocator.tree, keys)

    def flush(self) -> int:
        """Drops every cached unit that is not in use; returns the number of slots that freed."""
        everything = {kind: pool.num_slots for kind, pool in self.allocator.pools.by_kind.items()}
        free = sum(pool.num_free for pool in self.allocator.pools.by_kind.values())
        self.allocator.prompt_ends.drop_all()
        self.allocator.make_room(everything)
        return sum(pool.num_free for pool in self.allocator.pools.by_kind.values()) - free

    def quarantine(self) -> None:
        """Some state here proved wrong, and the cause is not known: nothing cached is reused or
        published any more. Requests that run go on; later ones are computed whole."""
        self.allocator.has_prefix_cache = False
        self.flush()

    @property
    def is_quarantined(self) -> bool:
        return self.limits.prefix_cache and not self.allocator.has_prefix_cache

    @property
    def lacks_slots(self) -> bool:
        """Whether the head of the queue could not be admitted for lack of slots."""
        return self.admission.lacks_slots

    def drop_chain(self, first: PageKey) -> None:
        """Removes a first page from the tree, with all that stands on it."""
        self.allocator.prompt_ends.drop_chain(first)
        self.allocator.drop_chain(first, self.sequences.with_slots())

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def take_cache_changes(self) -> tuple[TreeChange, ...]:
        return self.allocator.tree.drain_changes()

    def set_costs(self, costs: ResumeCosts) -> None:
        """New measured costs; plans made from now on use them."""
        self.admission.planner = replace(self.admission.planner, costs=costs)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences.waiting or self.sequences.num_active or self._flights)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def ledgers(self) -> dict[Kind, Ledger]:
        return self.allocator.pools.ledgers()

    def statistics(self) -> SchedulerStatistics:
        sequence_table, drafts = self.sequences, self._postprocessor.drafts
        return SchedulerStatistics(
            waiting=len(sequence_table.waiting),
            prefilling=len(sequence_table.prefilling),
            decoding=len(sequence_table.decoding),
            held=sequence_table.num_held,
            reserved=len(sequence_table.reserved),
            tokens_to_prefill=sequence_table.tokens_to_prefill,
            prefill_steps=self._prefill_steps,
            decode_steps=self._decode_steps,
            draft_steps=drafts.steps,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            audited_tokens=self.audits.budget.spent,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless free and leased slots add up in every pool, the tree is
        consistent, and every lease or hold belongs to the tree or to a request that is here."""
        self.allocator.check_integrity([*self.sequences.with_slots(), *self.audits.computing()])
