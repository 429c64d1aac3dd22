"""Runs requests through one pair of workers: prefill asks the host, decode reserves, both run.

The order of calls is that of `PrefillAttempt` in `ferryman_prefill.server`; all deciding code is
called, not copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest, OutOfSlots
from ferryman.handoff.offer import UnitsToSend, offered_ranges
from ferryman.handoff.values import Reservation, WantedUnit
from ferryman.runtime.life import alongside
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import (
    Cached,
    ChunkDone,
    Event,
    LoadsDone,
    SequenceAdmitted,
    SequenceHeld,
)
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.sequence import Goal
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import MISS
from ferryman.worker.summary import cached_tokens
from ferryman_simulator.client import join_node
from ferryman_simulator.modelled_time import now, run
from ferryman_simulator.node import SimulatedNode
from ferryman_simulator.result import Result, ResultCounts, quantiles
from ferryman_simulator.setup import Setup
from ferryman_simulator.trace import Trace, TracedRequest
from ferryman_simulator.worker import EPOCH, DecodeLoop, SimulatedAttempt, SimulatedWorker

# A router tries a pair again after this long when decode had no room.
AVOID_SECONDS = 1.0
DEADLINE_SECONDS = 300.0
# The time after the last token for stores that are still running.
SETTLE_SECONDS = 3600.0
PREFILL, DECODE = "prefill", "decode"


class Simulation:
    """Two schedulers, the node's tiers, and every request of a trace. Made on a virtual loop."""

    def __init__(self, setup: Setup) -> None:
        self.tally, self._setup = ResultCounts(), setup
        self._manifest, self._costs = setup.manifest, setup.costs
        self.prefill = SimulatedWorker(PREFILL, setup, setup.prefill)
        self.decode = SimulatedWorker(DECODE, setup, setup.decode)
        self.node = SimulatedNode(setup) if setup.arena.regions else None
        self._run_limit = asyncio.Semaphore(setup.prefill.limits.concurrency.max_running)
        self._root = root_key(setup.manifest)
        self._attempts: dict[str, SimulatedAttempt] = {}
        self._link_free_at = 0.0
        self.prefill.on_events = self._on_prefill

    async def run(self, trace: Trace) -> Result:
        """Runs all requests of a trace, to the last token."""
        async with AsyncExitStack() as stack:
            if self.node is not None:
                jobs = join_node(self._setup, self.node, (self.prefill, self.decode))
                await stack.enter_async_context(alongside(*jobs))
            async with asyncio.TaskGroup() as group:
                self._decoding = DecodeLoop(self.decode, self.tally, self._attempts, group)
                await self._ask_all(trace)
            seconds = now()
            await asyncio.sleep(SETTLE_SECONDS)
            return self._result(seconds)

    async def _ask_all(self, trace: Trace) -> None:
        requests = iter(trace.requests)
        async with asyncio.TaskGroup() as group:
            if self._setup.concurrency:
                for _ in range(self._setup.concurrency):
                    group.create_task(self._ask_in_turn(requests))
                return
            for traced in requests:
                await asyncio.sleep(max(0.0, traced.arrival_seconds - now()))
                group.create_task(self._serve(traced))

    async def _ask_in_turn(self, requests: Iterator[TracedRequest]) -> None:
        """One client: sends each request a moment after the answer to the one before."""
        for traced in requests:
            await asyncio.sleep(self._costs.client_seconds)
            await self._serve(traced)

    # One request.

    async def _serve(self, traced: TracedRequest) -> None:
        self.tally.num_requests += 1
        attempt = self._attempt_for(traced)
        if attempt is None:
            self.tally.num_refused += 1
            return
        name = traced.request_id
        self._attempts[name] = attempt
        while not await self._try_prefill(attempt):
            self.tally.num_turned_away += 1
            await asyncio.sleep(AVOID_SECONDS)
            attempt.tags = replace(attempt.tags, attempt=attempt.tags.attempt + 1)
        await attempt.finished.wait()
        del self._attempts[name]

    def _attempt_for(self, traced: TracedRequest) -> SimulatedAttempt | None:
        """None for a request that these pools can never hold."""
        tokens = traced.content.token_ids()
        prompt, name = tokens[: traced.prompt_len], traced.request_id
        keys = page_keys(self._root, prompt, self._manifest.page_size)
        forks = traced.fork_points if self._setup.has_forks else ()
        sampling = SamplingParams(max_tokens=traced.output_len)
        request = Request(name, prompt, keys, sampling, fork_points=forks)
        try:
            self.prefill.scheduler.check(request)
            self.decode.scheduler.check(request)
        except InvalidRequest:
            return None
        self.prefill.tokens[name] = self.decode.tokens[name] = tokens
        return SimulatedAttempt(request, now(), CallTags(name, 1))

    # Prefill.

    async def _try_prefill(self, attempt: SimulatedAttempt) -> bool:
        """From the queue to the hand-off; False when decode had no room."""
        async with self._run_limit:
            await self._lease(attempt)
            await asyncio.sleep(self._costs.call_seconds)
            try:
                await self._reserve(attempt)
            except OutOfSlots:
                self._release(attempt)
                return False
            first = await self._computed(attempt)
            await asyncio.sleep(max(0.0, attempt.sent_at - now()) + self._costs.call_seconds)
            self._hand_over(attempt, first)
            return True

    async def _lease(self, attempt: SimulatedAttempt) -> None:
        host, request, tags = self.prefill.host, attempt.request, attempt.tags
        brought = NOTHING_BROUGHT
        if host.wants_prefetch(request):
            brought = await host.prefetch(request, tags, seconds_left=DEADLINE_SECONDS)
        attempt.lease = await host.lease_for(request, tags, brought)

    def _release(self, attempt: SimulatedAttempt) -> None:
        lease, attempt.lease = attempt.lease, MISS
        self.prefill.host.release(lease)

    async def _reserve(self, attempt: SimulatedAttempt) -> None:
        """Reserves slots at decode. Units that neither it nor its host tier has are sent: pages
        when computed, all others at the end. Its loads take no time of the attempt's."""
        request, scheduler, host = attempt.request, self.decode.scheduler, self.decode.host
        lease = await host.lease_for_receive(request, attempt.tags, seconds_left=DEADLINE_SECONDS)
        try:
            scheduler.reservations.reserve(request.request_id, request, now(), lease.view)
        finally:
            host.release(lease)
        loads = scheduler.reservations.loads_of(request.request_id)
        host.loading(request.request_id, tuple(load.unit for load in loads))
        offered = offered_ranges(self._manifest, request.prompt_len)
        units_at, name = scheduler.reservations.units_at, request.request_id
        wanted = tuple(
            WantedUnit(span.kind, index, handle.generation)
            for span in offered
            for index, handle in units_at(name, span.kind, span.first, span.end)
        )
        reservation = Reservation(name, EPOCH, attempt.tags.attempt, wanted, DEADLINE_SECONDS)
        attempt.units_to_send = UnitsToSend(reservation, offered, self._manifest.page_size)

    def _on_prefill(self, events: list[Event]) -> None:
        """The host tier gets events at once; attempts, which are tasks, get them next."""
        for event in events:
            attempt = self._attempts.get(event.request_id)
            if isinstance(event, Cached):
                tags = attempt.tags if attempt else CallTags()
                self.prefill.host.cached(event, tags)
            elif attempt is not None:
                attempt.inbox.put_nowait(event)

    async def _computed(self, attempt: SimulatedAttempt) -> Sampled:
        """Follows the schedule's events until the prompt is held; returns the first token."""
        request, page_size = attempt.request, self._manifest.page_size
        self.prefill.scheduler.submit(request, Goal.HAND_OFF, attempt.lease.view)
        self.prefill.ring()
        while True:
            match await attempt.inbox.get():
                case SequenceAdmitted(plan=plan):
                    cached = cached_tokens(self._manifest, plan)
                    self.tally.planned(request.request_id, plan, cached, page_size)
                    self.prefill.host.planned(request, plan, attempt.tags)
                    self._send_pages(attempt, plan.anchor_pages * page_size)
                case ChunkDone(end=end):
                    self._send_pages(attempt, end)
                case LoadsDone():
                    self._release(attempt)
                case SequenceHeld(first=first):
                    self._send_pages(attempt, -(-request.prompt_len // page_size) * page_size)
                    self._send(attempt, attempt.units_to_send.remaining())
                    return first

    def _send_pages(self, attempt: SimulatedAttempt, position: int) -> None:
        if pages := attempt.units_to_send.up_to(position):
            self._send(attempt, pages)

    def _send(self, attempt: SimulatedAttempt, units: Sequence[WantedUnit]) -> None:
        """Sends units over the one link between the workers, which delivers them in order."""
        num_bytes = sum(self._manifest.layout(unit.kind).slot_bytes for unit in units)
        seconds = num_bytes * self._costs.handoff_seconds_per_byte
        self._link_free_at = attempt.sent_at = max(self._link_free_at, now()) + seconds

    def _hand_over(self, attempt: SimulatedAttempt, first: Sampled) -> None:
        """Decode has every unit: the request runs there, and prefill frees its slots."""
        name = attempt.request.request_id
        self.decode.scheduler.adopt(name, first, now())
        self.decode.ring()
        self._release(attempt)
        self.prefill.scheduler.release_held(name, now())
        del self.prefill.tokens[name]
        self.prefill.ring()

    # Results.

    def _result(self, seconds: float) -> Result:
        tally, workers = self.tally, (self.prefill, self.decode)
        evicted = {
            worker.life.worker_id: {str(k): n for k, n in worker.num_evicted.items()}
            for worker in workers
        }
        snapshots: dict[str, int] = {}
        if Kind.RECURRENT in self._manifest.kinds:
            snapshots = {w.life.worker_id: w.num_cached(Kind.RECURRENT) for w in workers}
        if self.node is not None:
            snapshots |= self.node.num_snapshots()
            evicted |= self.node.num_evicted()
        return Result(
            num_requests=tally.num_requests,
            num_refused=tally.num_refused,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            tokens=dict(tally.tiers),
            reasons=dict(tally.reasons),
            ttft_seconds=quantiles(tally.first_seconds),
            snapshots=snapshots,
            evicted=evicted,
            num_truncated=self.node.num_truncated if self.node else 0,
            num_turned_away=tally.num_turned_away,
            num_retracted=tally.num_retracted,
            seconds=seconds,
            outcomes=tally.outcomes,
        )


async def _run(setup: Setup, trace: Trace) -> Result:
    return await Simulation(setup).run(trace)


def simulate(setup: Setup, trace: Trace) -> Result:
    """One run from empty caches. Deterministic: the same trace and setup give the same result."""
    return run(_run(setup, trace))
