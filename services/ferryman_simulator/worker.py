"""One worker without a device, and its requests. A step takes the seconds of the cost model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ferryman.cache.keys import TokenIds, root_key
from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome, StepPlan
from ferryman.schedule.events import (
    Cached,
    Drawn,
    Event,
    Finished,
    RequestFailed,
    Retracted,
)
from ferryman.schedule.request import Request
from ferryman.schedule.scheduler import Scheduler
from ferryman.tiers.values import WorkerLife
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import MISS, HostLease
from ferryman.worker.host import HostTier, NoHostTier
from ferryman.worker.preempted import PreemptedRequests
from ferryman_simulator.clock import now
from ferryman_simulator.result import ResultCounts
from ferryman_simulator.setup import Setup, WorkerShape

OnEvents = Callable[[list[Event]], None]
_EPOCH = 1


@dataclass(slots=True)
class SimulatedAttempt:
    """One running request. `wanted_pages` and `rest_bytes` have not left prefill yet."""

    request: Request
    arrived: float
    tags: CallTags
    inbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    lease: HostLease = MISS
    wanted_pages: deque[int] = field(default_factory=deque)
    rest_bytes: int = 0
    sent_at: float = 0.0


class SimulatedWorker:
    """A scheduler and a device that runs its steps one after the other, as the step loop does.

    `tokens` has the prompt and answer of each request here: the draws come from there. `host` is
    the worker's host tier; `on_events` gets the events of the schedule.
    """

    def __init__(self, name: str, setup: Setup, shape: WorkerShape) -> None:
        self.life = WorkerLife(name, _EPOCH)
        self.tokens: dict[str, TokenIds] = {}
        self.num_evicted = dict.fromkeys(setup.manifest.kinds, 0)
        self.host: HostTier = NoHostTier()
        self.on_events: OnEvents = lambda _events: None
        self._costs = setup.costs
        self.scheduler = Scheduler(
            setup.manifest,
            shape.slots,
            shape.limits,
            setup.costs.plan_costs,
            root_key(setup.manifest),
        )
        planner = self.scheduler.admission.planner
        self.scheduler.admission.planner = replace(planner, has_junctions=setup.has_junctions)
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0

    def ring(self) -> None:
        """Looks for work. Code that changes what can be scheduled must call it."""
        while (plan := self.scheduler.plan(now())) is not None:
            self._submit(plan)
        self._report()

    def _submit(self, plan: StepPlan) -> None:
        seconds = self._costs.seconds_of(plan)
        self._free_at = max(self._free_at, now()) + seconds
        self._loop.call_at(self._free_at, partial(self._done, plan, seconds))

    def _done(self, plan: StepPlan, seconds: float) -> None:
        outcome = StepOutcome(plan.step_id, self._draws(plan), forward_seconds=seconds)
        self.scheduler.commit(plan, outcome, now())
        self._report()
        self.ring()

    def _draws(self, plan: StepPlan) -> tuple[Sampled, ...]:
        """The tokens of the trace's answers at these places."""
        if isinstance(plan, PrefillStep):
            drawn = [(c.request_id, draw.position) for c in plan.chunks for draw in c.draws]
        else:
            positions = [draw.position for draw in plan.draws]
            drawn = list(zip(plan.request_ids, positions, strict=True))
        return tuple([Sampled(int(self.tokens[name][place]), {}) for name, place in drawn])

    def _report(self) -> None:
        """Passes on events first, then changes of the cache, as a worker's shell does."""
        if events := self.scheduler.take_events():
            for event in events:
                if isinstance(event, RequestFailed):
                    raise event.error  # a simulation that loses a request has no useful result
            self.on_events(events)
        if changes := self.scheduler.take_cache_changes():
            self.host.changed(changes)
            for change in changes:
                if not change.is_stored:
                    self.num_evicted[change.kind] += len(change.keys)

    def num_cached(self, kind: Kind) -> int:
        """Slots of `kind` that the prefix tree holds."""
        return self.scheduler.ledgers()[kind].by_role.get("tree", 0)


class DecodeLoop:
    """Handles the decode worker's events, in the order of `ferryman_decode.requests`."""

    def __init__(
        self,
        worker: SimulatedWorker,
        tally: ResultCounts,
        attempts: Mapping[str, SimulatedAttempt],
        background: asyncio.TaskGroup,
    ) -> None:
        self._worker, self._tally, self._attempts = worker, tally, attempts
        self._preempted = PreemptedRequests(
            worker.host, worker.scheduler, background.create_task, worker.ring
        )
        worker.on_events = self._on_events

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            attempt = self._attempts.get(event.request_id)
            tags = attempt.tags if attempt else CallTags()
            self._preempted.on_event(event, tags)
            if isinstance(event, Cached):
                self._worker.host.cached(event, tags)
            elif attempt is not None:
                self._count(event, attempt)

    def _count(self, event: Event, attempt: SimulatedAttempt) -> None:
        match event:
            case Drawn(offset=0):
                self._tally.first_seconds.append(now() - attempt.arrived)
            case Retracted():
                self._tally.num_retracted += 1
            case Finished(request_id=name, num_generated=count):
                self._worker.host.ended(name, attempt.tags)
                self._tally.output_tokens += count
                del self._worker.tokens[name]
                attempt.finished.set()
