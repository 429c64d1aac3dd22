"""Chooses the workers of a request's next attempt, and decides when there is no further one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ferryman.cache.resume import max_resume_pages
from ferryman.errors import (
    DeadlineExceeded,
    Exhausted,
    FerrymanError,
    RequestIdInUse,
    Suspect,
    Unavailable,
)
from ferryman.runtime.logs import Tail
from ferryman.wire.nats.heartbeat import PREFILL, Heartbeat, ServedState
from ferryman.wire.redis.index import NodePrefix
from ferryman_router.request.attempt import RouterAttempt
from ferryman_router.request.attempt_result import (
    AttemptCount,
    CutOff,
    Fatal,
    LostAttempt,
    NoCapacity,
    RetriesExhausted,
    Retryable,
    WorkerDrains,
    WorkerGone,
    WorkerLost,
)
from ferryman_router.request.context import RouterContext
from ferryman_router.request.request_history import RequestHistory
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.generate_request import PageKeyCache, TokenizedRequest
from ferryman_router.routing.queue import QueuePosition, Ticket
from ferryman_router.routing.routing_policy import CacheIndex, Explanation, RoutingRequest

log = logging.getLogger(__name__)

MAX_AVOID_SECONDS = 1.0
# Tries to hand a request off by the worker that drains, before its tokens are computed again.
MAX_MOVES = 3
# Workers have clocks of their own: a deadline may have passed there this much earlier.
DEADLINE_MARGIN_SECONDS = 1.0


class RequestPlacement:
    """The placement of one request. `chains` are the keys of the prompt, and of what was generated
    when its latest attempt was placed; `tries` counts what it has been through. `kept_by` is the
    decode worker that drains and keeps its state."""

    def __init__(
        self, asked: TokenizedRequest, history: RequestHistory, ctx: RouterContext
    ) -> None:
        self._asked, self._history, self._ctx = asked, history, ctx
        self.tries = AttemptCount()
        self.kept_by: WorkerName | None = None
        self.is_waiting = False
        self._num_moves = 0
        self._excluded: dict[WorkerName, float] = {}
        self._standing = self._placed_as = QueuePosition.NEW
        self.chains = PageKeyCache(asked.token_ids, asked.key_salt, asked.adapter)

    async def place(self, generated: Sequence[int]) -> tuple[Explanation, Heartbeat, Heartbeat]:
        """The next attempt's prefill worker and decode worker, and why these. Waits for them;
        raises Exhausted when there is no room in time, or NoWorker when a role is empty."""
        asked, ctx = self._asked, self._ctx
        while True:
            ticket = Ticket(
                asked.request_id,
                asked.tenant.name,
                asked.deadline,
                priority=asked.request.options.priority,
                share=ctx.quotas.share(asked.tenant.name),
            )
            if self._standing is QueuePosition.NEW:
                ctx.dispatcher.check_in_time(ticket, asked.params.max_tokens)
            asking = await self._routing_request(generated)
            await self._on_probation(len(generated))
            # A request that comes here again was accepted by a worker, unless it was turned away.
            self._placed_as, self._standing = self._standing, QueuePosition.UNDER_WAY
            self.is_waiting = True
            explanation = await ctx.dispatcher.place(ticket, asking, self._placed_as)
            self.is_waiting = False
            ctx.probation.sent(asked.request_id)
            chosen = explanation.chosen
            prefill, decode = ctx.fleet.get(chosen.prefill), ctx.fleet.get(chosen.decode)
            if prefill is not None and decode is not None:
                return explanation, prefill.beat, decode.beat
            self._left(explanation, chosen.prefill if prefill is None else chosen.decode)

    async def _routing_request(self, generated: Sequence[int]) -> RoutingRequest:
        """The request as the policy sees it, with what was generated so far."""
        asked, self.chains = self._asked, self.chains_with(generated)
        computes_all = asked.params.prompt_logprobs is not None and not len(generated)
        is_kept = self.kept_by is not None
        return RoutingRequest(
            self.chains,
            self._history.attempt + 1,
            max_tokens=asked.params.max_tokens - len(generated),
            cache_index={} if computes_all or is_kept else await self._cache_index(),
            excluded=self._still_excluded,
            shared_by=asked.request.sharing.decode,
            kept_by=self.kept_by,
            computes_all=computes_all,
        )

    async def _on_probation(self, num_tokens: int) -> None:
        """Waits for a turn of its own while it may be what kills workers."""
        name, probation = self._asked.request_id, self._ctx.probation
        if self.tries.is_accused(num_tokens):
            await probation.enter(name)
            if not self.tries.is_accused(num_tokens):  # the worker came back meanwhile
                probation.leave(name)

    def chains_with(self, generated: Sequence[int]) -> PageKeyCache:
        """The keys of the prompt, and of what was generated so far."""
        behind = np.array(generated, dtype="<u4")
        return self.chains.extended(np.concatenate([self._asked.token_ids, behind]))

    async def _cache_index(self) -> CacheIndex:
        """The part of this prompt that each node holds, of each state that a worker could load."""
        index: dict[ServedState, Mapping[str, NodePrefix]] = {}
        for worker in self._ctx.fleet.usable(PREFILL, self._ctx.clock()):
            state = worker.beat.state
            reusable = max_resume_pages(len(self.chains.token_ids), state.page_size)
            chain = self.chains.of(state)[:reusable]
            if worker.beat.node and chain and state not in index:
                index[state] = await self._ctx.index.usable_pages(chain, state.resume_shape)
        return index

    def _still_excluded(self) -> frozenset[WorkerName]:
        workers = ((self._ctx.fleet.get(name), heard) for name, heard in self._excluded.items())
        return frozenset(w.name for w, heard in workers if w is not None and w.last_heard == heard)

    # How attempts went.

    def _left(self, explanation: Explanation, name: WorkerName) -> None:
        """A worker left between the choice and the order: another pair is chosen."""
        self._ctx.dispatcher.leave(self._asked.request_id, explanation)
        self._ctx.probation.leave(self._asked.request_id)
        self.kept_by = None
        gone = WorkerGone(f"{name.worker_id} left before it was asked")
        self._note(explanation.attempt, gone, cause="worker_lost")

    def on_lost_attempt(
        self, attempt: RouterAttempt, verdict: LostAttempt, num_tokens: int
    ) -> None:
        """Prepares the next attempt, after so many tokens; raises the error of a request that gets
        none."""
        self._ctx.probation.leave(self._asked.request_id)
        if attempt.is_move and not attempt.is_handed_off:
            return self._move_failed(attempt, verdict)
        # Another worker has had the state since, and only its report counts now.
        self.kept_by = None
        match verdict:
            case WorkerDrains():
                self.kept_by, self._num_moves = attempt.decode, 0
                self._ctx.metrics.retries.labels("drained").inc()
            case NoCapacity(error):
                self._no_capacity(attempt.refused_by, error)
            case WorkerLost():
                self._worker_lost(attempt, verdict, num_tokens)
            case CutOff(error) if attempt.has_begun:
                self._cut_off(attempt, error)
            case Retryable(DeadlineExceeded() as error) if self._is_nearly_over():
                raise error
            case Retryable(RequestIdInUse() as error) if not num_tokens:
                raise error  # under another id it can be served
            case Retryable(Unavailable()) if not attempt.has_begun:
                self._ctx.fleet.suspect(attempt.refused_by)
                self._not_reached(attempt)
            case Retryable(error):
                self._failed(attempt, error)
            case CutOff():
                self._not_reached(attempt)
            case Fatal(error):
                raise error

    def _move_failed(self, attempt: RouterAttempt, verdict: LostAttempt) -> None:
        """Nothing is lost: the state is kept for another try, or the tokens are computed again.

        Not counted for the request: a worker that drains is no failure of its own.
        """
        self._num_moves += 1
        log.warning("a request was not moved attempt=%s: %s", attempt.name, verdict.error)
        if isinstance(verdict, NoCapacity):
            wait = min(MAX_AVOID_SECONDS, verdict.error.retry_after_seconds)
            self._ctx.fleet.avoid(attempt.refused_by, self._ctx.clock() + wait)
        elif isinstance(verdict, Retryable | Fatal) or self._num_moves >= MAX_MOVES:
            self.kept_by = None
            # The worker would keep the state, for orders that will not come.
            attempt.let_go(self._ctx, self._asked.request_id, "not_moved")
        self._ctx.metrics.retries.labels("not_moved").inc()

    def _is_nearly_over(self) -> bool:
        """Whether a worker may have seen the caller's own deadline pass."""
        return self._ctx.clock() >= self._asked.deadline - DEADLINE_MARGIN_SECONDS

    def _no_capacity(self, worker: WorkerName, error: Exhausted) -> None:
        """No room there for a while."""
        wait = min(MAX_AVOID_SECONDS, error.retry_after_seconds)
        self._ctx.fleet.avoid(worker, self._ctx.clock() + wait)
        self._ctx.metrics.retries.labels("no_room").inc()
        if self._placed_as is not QueuePosition.UNDER_WAY:
            self._standing = QueuePosition.TURNED_AWAY

    def _worker_lost(self, attempt: RouterAttempt, lost: WorkerLost, num_tokens: int) -> None:
        """Another worker goes on, after so many tokens. Raises Suspect when too many died.

        Not charged to the budget: one death fails many requests, and none of them is to blame.
        """
        if lost.was_running:
            self.tries.ran_at_a_death(lost.name, num_tokens)
        self._note(attempt.number, lost.error, cause="worker_lost")
        if self.tries.is_suspect:
            num_deaths = len(self.tries.deaths)
            raise Suspect(f"{num_deaths} workers died while they ran this request: {lost.error}")

    def _cut_off(self, attempt: RouterAttempt, error: FerrymanError) -> None:
        """Another pair tries. Raises when this request has been tried often enough.

        Not charged to the budget, for one connection carries many requests; but counted for this
        one, so that a request that breaks every connection ends.
        """
        self._exclude(attempt)
        self.tries.failed()
        self._note(attempt.number, error, cause="cut_off")
        if not self.tries.may_go_on:
            raise RetriesExhausted(f"the last of {self.tries.num_failed} failures: {error}")

    def _not_reached(self, attempt: RouterAttempt) -> None:
        """Nothing was done: another pair tries, or the same one after its next beats."""
        self._exclude(attempt)
        self._ctx.metrics.retries.labels("not_reached").inc()

    def _failed(self, attempt: RouterAttempt, error: FerrymanError) -> None:
        """Another pair tries. Raises when there is no other attempt."""
        self._exclude(attempt)
        self.tries.failed()
        self._note(attempt.number, error, cause=error.reason)
        in_flight = self._ctx.num_in_flight()
        has_budget = self._ctx.budget.try_take(self._asked.request_id, in_flight)
        if not self.tries.may_go_on or not has_budget:
            raise RetriesExhausted(f"the last of {self.tries.num_failed} failures: {error}")

    def _exclude(self, attempt: RouterAttempt) -> None:
        """This pair failed: not again for this request, until its next beats."""
        for name in (attempt.prefill, attempt.decode):
            if (worker := self._ctx.fleet.get(name)) is not None:
                self._excluded[name] = worker.last_heard

    def _note(self, attempt: int, error: FerrymanError, *, cause: str) -> None:
        tail = Tail(
            id=self._asked.request_id,
            attempt=attempt,
            state=self._history.state,
            reason=error.reason,
            message=error,
        )
        log.warning("attempt lost %s", tail)
        self._ctx.metrics.retries.labels(cause).inc()
