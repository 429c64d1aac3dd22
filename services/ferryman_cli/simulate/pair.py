"""Requests through one pair of workers: prefill asks the host, decode reserves, both run, tokens.

The order of calls is that of `ferryman_prefill.attempt`; whatever decides is called, not copied.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.resume import HostView, resume_set
from ferryman.errors import InvalidRequest, OutOfSlots
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import (
    Admitted,
    Cached,
    ChunkDone,
    Drawn,
    Event,
    Finished,
    Held,
    LoadsDone,
    Retracted,
)
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.sequence import Goal
from ferryman.worker.summary import cached_tokens
from ferryman_cli.simulate.clock import VirtualClock
from ferryman_cli.simulate.host import HostTier, NoHostTier, SimulatedHostTier, make_store
from ferryman_cli.simulate.result import Result, Tally, quantiles
from ferryman_cli.simulate.setup import Setup
from ferryman_cli.simulate.trace import Trace, TracedRequest
from ferryman_cli.simulate.worker import SimulatedWorker

# A router tries a pair again after this long when decode had no room.
AVOID_SECONDS = 1.0
PREFILL, DECODE, HOST = "prefill", "decode", "host"


@dataclass(slots=True)
class _Attempt:
    """One request under way. `wanted` bytes by page have not left prefill yet."""

    request: Request
    arrived: float
    lease_id: str = ""
    wanted_pages: deque[int] = field(default_factory=deque)
    rest_bytes: int = 0
    sent_at: float = 0.0
    is_counted: bool = False


class Pair:
    """Two schedulers, the store between them, and every request of a trace."""

    def __init__(self, setup: Setup) -> None:
        self.clock, self.tally, self._setup = VirtualClock(), Tally(), setup
        self._manifest, self._costs = setup.manifest, setup.costs
        self.prefill = SimulatedWorker(PREFILL, setup, setup.prefill, self.clock)
        self.decode = SimulatedWorker(DECODE, setup, setup.decode, self.clock)
        self.prefill.tell(self._on_prefill)
        self.decode.tell(self._on_decode)
        self._tiers = self._make_tiers()
        self._root = root_key(setup.manifest)
        self._attempts: dict[str, _Attempt] = {}
        self._queue: deque[_Attempt] = deque()
        self._num_prefilling = 0
        self._link_free_at = 0.0

    def _make_tiers(self) -> tuple[HostTier, HostTier]:
        """Of prefill and of decode; both write, and only prefill reads."""
        if not self._setup.arena.regions:
            self.store = None
            return NoHostTier(), NoHostTier()
        self.store = make_store(self._setup)
        return (
            SimulatedHostTier(self._setup, self.store, self.prefill, self.clock),
            SimulatedHostTier(self._setup, self.store, self.decode, self.clock),
        )

    # Arrivals.

    def run(self, trace: Trace) -> Result:
        """All of a trace, to the last token."""
        self._coming = iter(trace.requests)
        for _ in range(self._setup.concurrency or 1):
            self._expect_next()
        self.clock.run()
        return self._result()

    def _expect_next(self) -> None:
        traced = next(self._coming, None)
        if traced is not None:
            at = self.clock.now if self._setup.concurrency else traced.arrival_seconds
            self.clock.at(at, partial(self._arrive, traced))

    def _arrive(self, traced: TracedRequest) -> None:
        self.tally.num_requests += 1
        attempt = self._attempt_for(traced)
        if not self._setup.concurrency:
            self._expect_next()
        if attempt is None:
            self.tally.num_refused += 1
            if self._setup.concurrency:
                self._expect_next()
            return
        self._attempts[traced.request_id] = attempt
        self._queue.append(attempt)
        self._admit_next()

    def _attempt_for(self, traced: TracedRequest) -> _Attempt | None:
        """None for what these pools can never hold."""
        tokens = traced.content.token_ids()
        prompt, name = tokens[: traced.prompt_len], traced.request_id
        keys = page_keys(self._root, prompt, self._manifest.page_size)
        request = Request(name, prompt, keys, SamplingParams(max_tokens=traced.output_len))
        try:
            self.prefill.scheduler.check(request)
            self.decode.scheduler.check(request)
        except InvalidRequest:
            return None
        self.prefill.tokens[name] = self.decode.tokens[name] = tokens
        return _Attempt(request, self.clock.now)

    # Prefill.

    def _admit_next(self) -> None:
        """As many prompts at once as prefill runs; the others wait in their order."""
        most = self._setup.prefill.limits.concurrency.max_running
        while self._queue and self._num_prefilling < most:
            self._num_prefilling += 1
            self._begin(self._queue.popleft())

    def _begin(self, attempt: _Attempt) -> None:
        request = attempt.request
        then = partial(self._leased, attempt)
        self._tiers[0].acquire(request.keys, request.prompt_len, then)

    def _leased(self, attempt: _Attempt, lease_id: str, view: HostView) -> None:
        attempt.lease_id = lease_id
        self.clock.after(self._costs.call_seconds, partial(self._reserve, attempt, view))

    def _reserve(self, attempt: _Attempt, view: HostView) -> None:
        request = attempt.request
        try:
            self.decode.scheduler.reserve(request.request_id, request, self.clock.now)
        except OutOfSlots:
            self.tally.num_turned_away += 1
            self._release(attempt)
            self.clock.after(AVOID_SECONDS, partial(self._begin, attempt))
            return
        self._note_wanted(attempt)
        self.prefill.scheduler.submit(request, Goal.HAND_OFF, view)
        self.prefill.ring()

    def _note_wanted(self, attempt: _Attempt) -> None:
        """What decode lacks: pages leave as they are computed, all else at the end."""
        request = attempt.request
        needs = resume_set(self._manifest, request.prompt_len)
        spans = {
            Kind.FULL: tuple(needs.full),
            Kind.WINDOW: tuple(needs.window),
            Kind.RECURRENT: (request.prompt_len, request.prompt_len + 1),
        }
        wanted = {
            kind: self.decode.scheduler.reserved_units_at(request.request_id, kind, *spans[kind])
            for kind in self._manifest.kinds
        }
        attempt.wanted_pages = deque(page for page, _ in wanted.pop(Kind.FULL, ()))
        attempt.rest_bytes = sum(
            len(units) * self._manifest.layout(kind).slot_bytes for kind, units in wanted.items()
        )

    def _release(self, attempt: _Attempt) -> None:
        lease_id, attempt.lease_id = attempt.lease_id, ""
        self._tiers[0].release(lease_id)

    def _on_prefill(self, events: list[Event]) -> None:
        """The host tier hears at once; attempts are tasks of their own and hear next."""
        for event in events:
            if isinstance(event, Cached):
                self._tiers[0].cached(event)
            elif attempt := self._attempts.get(event.request_id):
                self.clock.after(0.0, partial(self._prefill_went_on, attempt, event))

    def _prefill_went_on(self, attempt: _Attempt, event: Event) -> None:
        page_size = self._manifest.page_size
        match event:
            case Admitted(plan=plan):
                if not attempt.is_counted:
                    attempt.is_counted = True
                    self.tally.planned(plan, cached_tokens(self._manifest, plan), page_size)
                self._send_pages(attempt, plan.anchor_pages)
            case ChunkDone(end=end):
                self._send_pages(attempt, end // page_size)
            case LoadsDone():
                self._release(attempt)
            case Held(first=first):
                self._send_pages(attempt, -(-attempt.request.prompt_len // page_size))
                self._send(attempt, attempt.rest_bytes)
                commit = partial(self._commit, attempt, first)
                self.clock.at(attempt.sent_at + self._costs.call_seconds, commit)

    def _send_pages(self, attempt: _Attempt, end: int) -> None:
        count = 0
        while attempt.wanted_pages and attempt.wanted_pages[0] < end:
            attempt.wanted_pages.popleft()
            count += 1
        if count:
            self._send(attempt, count * self._manifest.layout(Kind.FULL).slot_bytes)

    def _send(self, attempt: _Attempt, num_bytes: int) -> None:
        """One link between the two; what is sent later arrives later."""
        begin = max(self._link_free_at, self.clock.now)
        seconds = num_bytes * self._costs.handoff_seconds_per_byte
        self._link_free_at = attempt.sent_at = begin + seconds

    # Decode.

    def _commit(self, attempt: _Attempt, first: Sampled) -> None:
        """Decode has it all: it runs there, and prefill gives back what it kept."""
        name = attempt.request.request_id
        self.decode.scheduler.adopt(name, first, self.clock.now)
        self.decode.ring()
        self._release(attempt)
        self.prefill.scheduler.release_held(name, self.clock.now)
        del self.prefill.tokens[name]
        self.prefill.ring()
        self._num_prefilling -= 1
        self._admit_next()

    def _on_decode(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Cached():
                    self._tiers[1].cached(event)
                case Drawn(request_id=name, offset=0):
                    waited = self.clock.now - self._attempts[name].arrived
                    self.tally.first_seconds.append(waited + self._costs.call_seconds)
                case Retracted():
                    self.tally.num_retracted += 1
                case Finished(request_id=name, num_generated=count):
                    self._finished(name, count)

    def _finished(self, name: str, num_generated: int) -> None:
        self.tally.num_finished += 1
        self.tally.output_tokens += num_generated
        del self._attempts[name], self.decode.tokens[name]
        if self._setup.concurrency:
            self._expect_next()

    # What it came to.

    def _result(self) -> Result:
        tally, has_states = self.tally, Kind.RECURRENT in self._manifest.kinds
        snapshots = {
            worker.life.worker_id: worker.num_cached(Kind.RECURRENT) if has_states else 0
            for worker in (self.prefill, self.decode)
        }
        evicted = {
            worker.life.worker_id: {str(k): n for k, n in worker.num_evicted.items()}
            for worker in (self.prefill, self.decode)
        }
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
            num_truncated=tally.num_truncated,
            num_turned_away=tally.num_turned_away,
            num_retracted=tally.num_retracted,
            seconds=self.clock.now,
        )


def simulate(setup: Setup, trace: Trace) -> Result:
    """One run from empty caches. Deterministic: the same trace and setup give the same result."""
    return Pair(setup).run(trace)
