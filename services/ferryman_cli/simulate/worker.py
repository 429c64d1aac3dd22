"""One worker without a device: the scheduler's steps take the seconds that the cost model says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ferryman.cache.keys import TokenIds, root_key
from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import PrefillStep, Sampled, StepOutcome, StepPlan
from ferryman.schedule.events import Event
from ferryman.schedule.scheduler import Scheduler
from ferryman.tiers.values import WorkerLife
from ferryman.worker.host import HostTierClient, NoHostTier
from ferryman_cli.simulate.clock import now
from ferryman_cli.simulate.setup import Setup, WorkerShape

OnEvents = Callable[[list[Event]], None]
_EPOCH = 1


class SimulatedWorker:
    """A scheduler and a device that runs its steps one after the other, as the step loop does.

    `tokens` has what each request here was asked and answered: the draws come from there. `host`
    is the worker's host tier, `on_events` who is told what happens in the schedule.
    """

    def __init__(self, name: str, setup: Setup, shape: WorkerShape) -> None:
        self.life = WorkerLife(name, _EPOCH)
        self.tokens: dict[str, TokenIds] = {}
        self.num_evicted = dict.fromkeys(setup.manifest.kinds, 0)
        self.host: HostTierClient = NoHostTier()
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
        """Looks for work: to be called by whoever changed what can be scheduled."""
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
        """The tokens that the trace's answers have at these places."""
        if isinstance(plan, PrefillStep):
            drawn = [(c.request_id, draw.position) for c in plan.chunks for draw in c.draws]
        else:
            positions = [draw.position for draw in plan.draws]
            drawn = list(zip(plan.request_ids, positions, strict=True))
        return tuple([Sampled(int(self.tokens[name][place]), {}) for name, place in drawn])

    def _report(self) -> None:
        """Events first, then what came and went, as a worker's shell does."""
        if events := self.scheduler.take_events():
            self.on_events(events)
        if changes := self.scheduler.take_cache_changes():
            self.host.changed(changes)
            for change in changes:
                if not change.is_stored:
                    self.num_evicted[change.kind] += len(change.keys)

    def num_cached(self, kind: Kind) -> int:
        """Slots of `kind` that the prefix tree holds."""
        return self.scheduler.ledgers()[kind].by_role.get("tree", 0)
