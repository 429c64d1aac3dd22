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

import numpy as np

from ferryman.cache.branch import CacheChange
from ferryman.cache.capacity import Concurrency, path_snapshots
from ferryman.cache.keys import PageKey, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.planner import Planner
from ferryman.cache.resume import EMPTY_HOST, Costs, HostView, Reason, ResumePlan
from ferryman.cache.slots import Demand, Holder, Ledger, Role, SlotHandle
from ferryman.errors import InvalidRequest, NotFound, OutOfSlots, QueueFull
from ferryman.schedule import decode, prefill
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome, StepPlan
from ferryman.schedule.events import (
    Admitted,
    CachedUnit,
    ChunkDone,
    Drawn,
    Event,
    Finished,
    Held,
    LoadCorrupt,
    LoadsDone,
    Retracted,
)
from ferryman.schedule.line import WaitingLine
from ferryman.schedule.opening import OpsDraft, open_received
from ferryman.schedule.request import FinishReason, Request
from ferryman.schedule.residence import Residence
from ferryman.schedule.sequence import Goal, Phase, Running, Waiting
from ferryman.schedule.units import held_units, resume_units, wanted_units


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much at once. `chunk_tokens` bounds the tokens of one prefill step.

    `snapshot_grid` is the distance in tokens between the coarse snapshots of a prompt, a multiple
    of the page size; 0 for none.
    """

    concurrency: Concurrency
    chunk_tokens: int
    max_len: int
    max_waiting: int
    steps_in_flight: int
    prefix_cache: bool
    snapshot_grid: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """What beats and metrics report: gauges, and steps committed since the start."""

    waiting: int
    prefilling: int
    decoding: int
    held: int
    reserved: int
    tokens_to_prefill: int
    prefill_steps: int
    decode_steps: int


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step on its way, with the requests it was built from."""

    step_id: int
    sequences: tuple[Running, ...]


class Scheduler:
    """Decides which step runs next and on which slots. Touched from one thread only."""

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
        self.residence = Residence(manifest, sizes, limits.concurrency.rows, limits.max_len)
        most = path_snapshots(sizes.get(Kind.RECURRENT, 0))
        self.planner = Planner(
            manifest, costs, limits.chunk_tokens, limits.snapshot_grid, most_snapshots=most
        )
        self._root = root
        self._line = WaitingLine()
        self._prefilling: list[Running] = []
        self._decoding: list[Running] = []
        self._by_id: dict[str, Running] = {}
        self._reserved: dict[str, Running] = {}
        self._newly_adopted: list[Running] = []
        self._flights: deque[_Flight] = deque()
        self._events: list[Event] = []
        self._keeps_retracted = False
        self._kept: dict[str, tuple[SlotHandle, ...]] = {}
        self._prefill_steps = 0
        self._decode_steps = 0
        self._orders = count()
        self._step_ids = count(1)

    # The door.

    def check(self, request: Request) -> None:
        """Raises InvalidRequest when these pools can never hold the request to its last token."""
        if request.prompt_len < 1:
            raise InvalidRequest("the prompt is empty", "prompt")
        final = request.prompt_len - request.num_generated + request.sampling.max_tokens
        if final > self.limits.max_len:
            raise InvalidRequest(
                f"prompt of {request.prompt_len} tokens and max_tokens="
                f"{request.sampling.max_tokens} exceed the {self.limits.max_len} tokens that fit",
                "max_tokens",
            )

    def submit(self, request: Request, goal: Goal, host: HostView = EMPTY_HOST) -> None:
        """Queues a request. Raises InvalidRequest, or QueueFull."""
        self.check(request)
        if request.request_id in self._by_id or request.request_id in self._line:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        if len(self._line) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self._line)} requests are waiting here already")
        order = next(self._orders)
        self._line.enter(Waiting(order, request, goal, host, was_retracted=False))

    def cancel(self, request_id: str, now: float) -> bool:
        """Ends a request wherever it stands; False when it is not here. Slots go back by rule."""
        if (waiting := self._line.leave(request_id)) is not None:
            num_generated = waiting.request.num_generated
            self._events.append(Finished(request_id, FinishReason.CANCELLED, num_generated))
            return True
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.CANCELLED, now)
        return True

    def offer_host(self, request_id: str, view: HostView) -> bool:
        """Gives a request that waits, a retracted one above all, what the host tier holds of it.

        False when it no longer waits: then nobody will read the view, and its lease may end.
        """
        return self._line.offer_host(request_id, view)

    # Hand-off, decode's side.

    def reserve(self, reservation_id: str, request: Request, now: float) -> Running:
        """Takes the slots of resume_set(n) that are not here. Raises OutOfSlots, InvalidRequest.

        The slots are leased to the transfer; `adopt` hands them to the request, and until then
        only `free_reservation` gives them back: never a timeout alone.
        """
        self.check(request)
        if self._line:
            raise OutOfSlots(f"{len(self._line)} requests wait to come back here")
        keys = request.keys if self.limits.prefix_cache else ()
        plan = self.planner.plan_receive(keys, request.prompt_len, self.residence.tree)
        order = next(self._orders)
        waiting = Waiting(order, request, Goal.DECODE, EMPTY_HOST, was_retracted=False)
        holder = Holder(Role.TRANSFER_IN, reservation_id)
        headroom = len(self._decoding)
        sequence = self.residence.try_admit(waiting, plan, holder, headroom, now)
        if sequence is None:
            raise OutOfSlots("no room for one more request; see /debug/ledger")
        sequence.phase = Phase.RESERVED
        self._reserved[reservation_id] = sequence
        return sequence

    def adopt(self, reservation_id: str, first: Sampled, now: float) -> None:
        """The hand-off is verified: the request decodes here from its first token on."""
        sequence = self._reserved.pop(reservation_id)
        request_id = sequence.request_id
        owner = Holder(Role.REQUEST, request_id)
        self.residence.pools.move(sequence.slots(), sequence.holder, owner)
        sequence.holder, sequence.phase = owner, Phase.DECODING
        sequence.draws_submitted = 1
        self._by_id[request_id] = sequence
        self._decoding.append(sequence)
        self._newly_adopted.append(sequence)
        self._events.append(Admitted(request_id, sequence.plan, is_resumed=False))
        self._publish(sequence, sequence.prompt_len // self.manifest.page_size, None, now)
        self._apply_draw(sequence, first, now)

    def reserved_units_at(
        self, reservation_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of what a transfer writes of [first, end), absolute. Raises NotFound.

        A recurrent unit's index is its position, the length of the prompt. What decode holds
        already is not among them: nobody may write there.
        """
        sequence = self._reserved.get(reservation_id)
        if sequence is None:
            raise NotFound(f"reservation {reservation_id} holds no slots here")
        return wanted_units(sequence, kind, first, end)

    def free_reservation(self, reservation_id: str) -> bool:
        """Quarantine is over: nobody writes to these slots any more."""
        sequence = self._reserved.pop(reservation_id, None)
        if sequence is None:
            return False
        sequence.phase = Phase.DONE
        self.residence.leave(sequence)
        return True

    # Hand-off, prefill's side.

    def units_at(
        self, request_id: str, kind: Kind, first: int, end: int
    ) -> list[tuple[int, SlotHandle]]:
        """(index, handle) of the units [first, end) that a request's prompt lies in.

        A recurrent unit's index is a position: the prompt's length. Raises NotFound for a request
        that holds no slots, KeyError for a page that it does not have.
        """
        return held_units(self._running(request_id), self.residence.tree, kind, first, end)

    def release_held(self, request_id: str, now: float) -> None:
        """Decode has acknowledged (or will never): the slots of a held prompt go back."""
        self._finish(self._running(request_id), FinishReason.STOP, now)

    def _running(self, request_id: str) -> Running:
        sequence = self._by_id.get(request_id)
        if sequence is None:
            raise NotFound(f"request {request_id} holds no slots here")
        return sequence

    # Plan.

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run (or enough steps are in flight)."""
        if len(self._flights) >= self.limits.steps_in_flight:
            return None
        return self._plan_prefill(now) or self._plan_decode(now)

    def _plan_prefill(self, now: float) -> StepPlan | None:
        budget, draft = self.limits.chunk_tokens, OpsDraft()
        chunks, sequences = [], []
        for sequence in self._prompts(now):
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

    def _prompts(self, now: float) -> Iterator[Running]:
        """Prompts under way in their order, then as many of the waiting as can be admitted."""
        yield from list(self._prefilling)
        while admitted := self._try_admit_next(now):
            yield admitted

    def _try_admit_next(self, now: float) -> Running | None:
        active = len(self._prefilling) + len(self._decoding)
        waiting = self._line.head
        if waiting is None or active >= self.limits.concurrency.max_running:
            return None
        holder = Holder(Role.REQUEST, waiting.request.request_id)
        for plan in self._resume_plans(waiting):
            headroom = len(self._decoding)
            sequence = self.residence.try_admit(waiting, plan, holder, headroom, now)
            if sequence is not None:
                self._line.leave(sequence.request_id)
                self._admit(waiting, sequence)
                return sequence
        return None

    def _resume_plans(self, waiting: Waiting) -> Iterator[ResumePlan]:
        """The best plan, then smaller ones; a bare one when nobody is here who will make room."""
        prompt_len = waiting.request.prompt_len
        if not self.limits.prefix_cache:
            yield self.planner.plan_cold(prompt_len, Reason.CACHE_OFF)
            return
        keys = waiting.request.keys
        yield from self.planner.plans(keys, prompt_len, self.residence.tree, waiting.host)
        if not self._by_id and not self._reserved:
            yield self.planner.plan_cold(prompt_len, Reason.NO_ROOM)

    def _admit(self, waiting: Waiting, sequence: Running) -> None:
        self._by_id[sequence.request_id] = sequence
        self._prefilling.append(sequence)
        event = Admitted(sequence.request_id, sequence.plan, waiting.was_retracted)
        self._events.append(event)

    def _launch(self, step_id: int, sequences: list[Running]) -> None:
        """Records a step as submitted; copy sources are released behind it."""
        self._flights.append(_Flight(step_id, tuple(sequences)))
        self.residence.submitted(step_id)
        for sequence in sequences:
            if sequence.copy_source:
                self.residence.release_copy_source(sequence)
        moved = [s for s in self._prefilling if s.scheduled == s.prompt_len]
        for sequence in moved:
            self._prefilling.remove(sequence)
            if sequence.phase is Phase.DECODING:
                self._decoding.append(sequence)

    def _plan_decode(self, now: float) -> StepPlan | None:
        ready = self._ready_to_decode(now)
        if not ready:
            return None
        draft = OpsDraft()
        for sequence in self._newly_adopted:
            open_received(sequence, draft)
        self._newly_adopted.clear()
        self._plan_tracks(ready, draft)
        step = decode.build_step(self.residence, next(self._step_ids), ready, draft)
        self._launch(step.step_id, ready)
        return step

    def _ready_to_decode(self, now: float) -> list[Running]:
        """Requests that may draw and have a page for it; the newest pay when none is left."""
        ready = [sequence for sequence in self._decoding if sequence.may_draw]
        stalled = {id(s) for s in self._at_page(ready, offset=0) if not self._grow(s, now)}
        return [s for s in ready if id(s) not in stalled and s.phase is Phase.DECODING]

    def _at_page(self, sequences: list[Running], offset: int) -> list[Running]:
        """Those whose position + offset is a multiple of the page size."""
        rows = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
        positions = self.residence.rows.positions[rows] + offset
        return [sequences[i] for i in np.flatnonzero(positions % self.manifest.page_size == 0)]

    def _grow(self, sequence: Running, now: float) -> bool:
        if sequence.phase is not Phase.DECODING:
            return False
        position = int(self.residence.rows.positions[sequence.row])
        while not decode.try_grow(self.residence, sequence, position):
            if self._kept:
                return False  # what is being copied comes free when the copy ends
            victim = max(self._decoding, key=lambda sequence: sequence.order)
            self._retract(victim, now)
            if victim is sequence or victim.phase is Phase.RETRACTING:
                return False
        return True

    def _plan_tracks(self, ready: list[Running], draft: OpsDraft) -> None:
        max_tracks = self.limits.concurrency.tracking
        if not max_tracks or Kind.RECURRENT not in self.manifest.kinds:
            return
        for sequence in self._at_page(ready, offset=1):
            position = int(self.residence.rows.positions[sequence.row]) + 1
            draft.snapshots += decode.track(self.residence, sequence, position, max_tracks)

    # Retraction: back to wait, with what is known so far.

    def _retract(self, sequence: Running, now: float) -> None:
        """At once when no step holds it; else after its last step, whose token still counts."""
        self._decoding.remove(sequence)
        if sequence.in_flight:
            sequence.phase = Phase.RETRACTING
        else:
            self._push_back(sequence, now)

    def _push_back(self, sequence: Running, now: float) -> None:
        self._donate(sequence, now)
        if self._keeps_retracted:
            self._keep(sequence)
        self._leave(sequence)
        request = replace(
            sequence.request,
            token_ids=sequence.token_ids(),
            keys=sequence.keys,
            num_generated=sequence.num_generated,
        )
        self._events.append(Retracted(request.request_id, request.num_generated, request))
        order = sequence.order
        self._line.enter(Waiting(order, request, Goal.DECODE, EMPTY_HOST, was_retracted=True))

    def keep_retracted(self) -> None:
        """From now on what a retracted request would resume from is kept from eviction until
        `let_go`: somebody copies it elsewhere, for the room is wanted."""
        self._keeps_retracted = True

    def _keep(self, sequence: Running) -> None:
        units = self.resume_units(sequence.keys)
        if handles := tuple(unit.handle for unit in units):
            self.lease(handles, _keeper(sequence.request_id))
            self._kept[sequence.request_id] = handles

    def let_go(self, request_id: str) -> None:
        """The copy has ended, or will not be made; unknown requests are fine."""
        self.release(self._kept.pop(request_id, ()), _keeper(request_id))

    # Commit.

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        """Applies what a step brought. Steps commit in the order in which they were planned."""
        flight = self._flights.popleft()
        assert flight.step_id == plan.step_id == outcome.step_id, "steps commit in order"
        for sequence in flight.sequences:
            sequence.in_flight -= 1
        if isinstance(plan, PrefillStep):
            self._prefill_steps += 1
            self._commit_prefill(plan, outcome, flight.sequences, now)
        else:
            self._decode_steps += 1
            for sequence, sampled in zip(flight.sequences, outcome.sampled, strict=True):
                self._apply_draw(sequence, sampled, now)
        self.residence.committed(plan.step_id)

    def _commit_prefill(
        self, plan: PrefillStep, outcome: StepOutcome, sequences: tuple[Running, ...], now: float
    ) -> None:
        sampled = iter(outcome.sampled)
        for load_id in dict.fromkeys(load.request_id for load in plan.ops.loads):
            if load_id not in outcome.corrupt:  # its lease ends with the report of what is corrupt
                self._events.append(LoadsDone(load_id))
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            drawn = [next(sampled) for _ in chunk.draws]
            if sequence.phase is Phase.DONE:
                continue
            if chunk.request_id in outcome.corrupt:
                self._start_over(sequence)
                continue
            done = ChunkDone(chunk.request_id, chunk.start, chunk.end, sequence.prompt_len)
            self._events.append(done)
            for snapshot in chunk.snapshots:
                handle = sequence.snapshots.pop(snapshot.position)
                pages = snapshot.position // self.manifest.page_size
                self._publish(sequence, pages, handle, now)
            for first in drawn:
                self._end_prompt(sequence, first, now)

    def _end_prompt(self, sequence: Running, first: Sampled, now: float) -> None:
        self._publish(sequence, sequence.prompt_len // self.manifest.page_size, None, now)
        if sequence.goal is Goal.DECODE:
            self._apply_draw(sequence, first, now)
        else:
            sequence.phase = Phase.HELD
            self._events.append(Held(sequence.request_id, first))

    def _start_over(self, sequence: Running) -> None:
        """Corrupt bytes came from a tier: nothing computed from them counts."""
        self._leave(sequence)
        self._events.append(LoadCorrupt(sequence.request_id))
        request, goal = sequence.request, sequence.goal
        self._line.enter(Waiting(sequence.order, request, goal, EMPTY_HOST, was_retracted=False))

    def _apply_draw(self, sequence: Running, sampled: Sampled, now: float) -> None:
        if sequence.phase is Phase.DONE:
            return  # it ended while this step was on its way; the extra token is dropped
        request = sequence.request
        self._events.append(Drawn(request.request_id, sequence.num_generated, sampled))
        sequence.drawn.append(sampled.token_id)
        if sampled.token_id in request.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, now)
        elif sequence.num_generated >= request.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, now)
        elif sequence.phase is Phase.RETRACTING and not sequence.in_flight:
            self._push_back(sequence, now)

    # The way out.

    def _finish(self, sequence: Running, reason: FinishReason, now: float) -> None:
        if sequence.phase in (Phase.DECODING, Phase.RETRACTING):
            self._donate(sequence, now)
        self._leave(sequence)
        self._events.append(Finished(sequence.request_id, reason, sequence.num_generated))

    def _leave(self, sequence: Running) -> None:
        sequence.phase = Phase.DONE
        del self._by_id[sequence.request_id]
        for group in (self._prefilling, self._decoding, self._newly_adopted):
            if sequence in group:
                group.remove(sequence)
        self.residence.leave(sequence)

    def _donate(self, sequence: Running, now: float) -> None:
        """The newest track whose position is certain goes to the tree, with the pages below it."""
        if not self.limits.prefix_cache or not sequence.drawn:
            return
        page_size = self.manifest.page_size
        salt = sequence.request.tenant_salt
        root = root_key(self.manifest, salt) if salt else self._root
        sequence.extend_keys_to(root, page_size)
        certain = [track for track in sequence.tracks if track.position <= sequence.computed]
        if certain:
            newest = max(certain, key=lambda track: track.position)
            sequence.tracks.remove(newest)
            self._publish(sequence, newest.position // page_size, newest.handle, now)
        self._publish(sequence, sequence.computed // page_size, None, now)

    def _publish(
        self, sequence: Running, num_pages: int, snapshot: SlotHandle | None, now: float
    ) -> None:
        if not self.limits.prefix_cache:
            return
        cached = self.residence.publish(sequence, num_pages, snapshot, now)
        if cached is not None:
            self._events.append(cached)

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
        events, self._events = self._events, []
        return events

    def take_cache_changes(self) -> tuple[CacheChange, ...]:
        return self.residence.tree.drain_changes()

    def set_costs(self, costs: Costs) -> None:
        """New measured costs; plans made from now on use them."""
        self.planner = replace(self.planner, costs=costs)

    @property
    def has_work(self) -> bool:
        return bool(self._line or self._prefilling or self._decoding or self._flights)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def ledgers(self) -> dict[Kind, Ledger]:
        return self.residence.pools.ledgers()

    def statistics(self) -> SchedulerStatistics:
        under_way = sum(s.prompt_len - s.scheduled for s in self._prefilling)
        return SchedulerStatistics(
            waiting=len(self._line),
            prefilling=len(self._prefilling),
            decoding=len(self._decoding),
            held=sum(s.phase is Phase.HELD for s in self._by_id.values()),
            reserved=len(self._reserved),
            tokens_to_prefill=under_way + self._line.num_tokens,
            prefill_steps=self._prefill_steps,
            decode_steps=self._decode_steps,
        )

    def check_integrity(self) -> None:
        """Conservation: free and leased add up in every pool, and the tree is a tree."""
        self.residence.check_integrity()


def _keeper(request_id: str) -> Holder:
    """Of what a retracted request left, while it is copied."""
    return Holder(Role.STORE, f"{request_id} retracted")
