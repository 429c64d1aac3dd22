"""One worker without a device, and its requests. A step takes the seconds of the cost model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ferryman.cache.keys import TokenIds, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.node import TreeChange
from ferryman.cache.resume import ResumeCosts
from ferryman.handoff.offer import UnitsToSend
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome, StepPlan, halves_of
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
from ferryman.worker.loop import OnEvents, StepLoop, StepTimings
from ferryman.worker.preempted import PreemptedRequests
from ferryman_simulator.modelled_time import CostModel, now
from ferryman_simulator.result import ResultCounts
from ferryman_simulator.setup import Setup, WorkerShape

EPOCH = 1


@dataclass(slots=True)
class SimulatedAttempt:
    """One running request. `units_to_send`, set by its reservation, have not left prefill yet."""

    request: Request
    arrived: float
    tags: CallTags
    inbox: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    lease: HostLease = MISS
    units_to_send: UnitsToSend = field(init=False)
    sent_at: float = 0.0


class ModelledDevice:
    """Runs the steps of one worker one after the other, each for the seconds of the cost model.

    `tokens` has the prompt and answer of each request: the draws come from there. `on_done` is
    called when a step is over.
    """

    def __init__(
        self, costs: CostModel, tokens: Mapping[str, TokenIds], on_done: Callable[[], None]
    ) -> None:
        self._costs, self._tokens, self._on_done = costs, tokens, on_done
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        seconds, future = self._costs.seconds_of(plan), Future[StepOutcome]()
        self._free_at = max(self._free_at, now()) + seconds
        self._loop.call_at(self._free_at, self._finish, plan, seconds, future)
        return future

    def _finish(self, plan: StepPlan, seconds: float, future: Future[StepOutcome]) -> None:
        future.set_result(StepOutcome(plan.step_id, self._draws(plan), forward_seconds=seconds))
        self._on_done()

    def _draws(self, plan: StepPlan) -> tuple[Sampled, ...]:
        """The tokens of the trace's answers at these places."""
        drawn: list[tuple[str, int]] = []
        for half in halves_of(plan):
            if isinstance(half, PrefillStep):
                drawn += [(c.request_id, draw.position) for c in half.chunks for draw in c.draws]
            else:
                positions = [draw.position for draw in half.draws]
                drawn += zip(half.request_ids, positions, strict=True)
        return tuple([Sampled(int(self._tokens[name][place]), {}) for name, place in drawn])


class ModelledPace(StepTimings):
    """Plans reckon with the costs of the model from the start."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self._plan_costs = costs.plan_costs

    def costs(self) -> ResumeCosts:
        return self._plan_costs


class SimulatedWorker:
    """A scheduler, the step loop of the services, and a modelled device.

    `tokens` has the prompt and answer of each request here. `host` is the worker's host tier;
    `on_events` gets the events of the schedule.
    """

    def __init__(self, name: str, setup: Setup, shape: WorkerShape) -> None:
        self.life = WorkerLife(name, EPOCH)
        self.tokens: dict[str, TokenIds] = {}
        self.num_evicted = dict.fromkeys(setup.manifest.kinds, 0)
        self.host: HostTier = NoHostTier()
        self.on_events: OnEvents = lambda _events: None
        self.scheduler = Scheduler(
            setup.manifest,
            shape.slots,
            shape.limits,
            setup.costs.plan_costs,
            root_key(setup.manifest),
        )
        planner = self.scheduler.admission.planner
        self.scheduler.admission.planner = replace(planner, has_junctions=setup.has_junctions)
        device = ModelledDevice(setup.costs, self.tokens, self.ring)
        # No task waits for its wake: whatever happens here advances it at once, at that very time.
        self._steps = StepLoop(
            self.scheduler,
            device.submit,
            asyncio.Event(),
            self._on_events,
            now,
            on_changes=self._on_changes,
            pace=ModelledPace(setup.costs),
        )

    def ring(self) -> None:
        """Looks for work. Code that changes what can be scheduled must call it."""
        self._steps.advance()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                raise event.error  # a simulation that loses a request has no useful result
        self.on_events(events)

    def _on_changes(self, changes: tuple[TreeChange, ...]) -> None:
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
                outcome = self._tally.outcomes[attempt.request.request_id]
                outcome.first_seconds = now() - attempt.arrived
            case Retracted():
                self._tally.num_retracted += 1
            case Finished(request_id=name, num_generated=count):
                self._worker.host.ended(name, attempt.tags)
                self._tally.output_tokens += count
                del self._worker.tokens[name]
                attempt.finished.set()
