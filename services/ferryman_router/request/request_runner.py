"""A request's life: placed, prefilled, decoded, and tried again when a worker fails it.

The runner owns the token offsets. The answer gets each token once and in order; a later attempt
goes on after the tokens there are, with the same seed and positions, and therefore draws the same
ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from ferryman.cache.manifest import Exactness
from ferryman.errors import (
    Cancelled,
    CorruptState,
    DeadlineExceeded,
    FerrymanError,
    RequestIdInUse,
    Stopping,
    TakenOver,
)
from ferryman.handoff import request as events
from ferryman.handoff.offsets import Accepted, Diverged, Dropped, Lacking
from ferryman.handoff.request import RequestEvent, RequestState
from ferryman.handoff.usage import NONE_CACHED
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.status import error_of
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.values import (
    Failure,
    PrefillAdmitted,
    PrefillChunkDone,
    PrefillHandedOff,
    PrefillProgress,
    RequestTokens,
    StreamContinues,
    StreamFinished,
    TokenCursor,
    Usage,
)
from ferryman_router.request.attempt import PrefillCall, RouterAttempt
from ferryman_router.request.attempt_result import (
    AttemptFinished,
    AttemptStopped,
    Retryable,
    Verdict,
    classify,
    judge_finish,
    settled_usage,
)
from ferryman_router.request.context import RouterContext
from ferryman_router.request.placement import RequestPlacement
from ferryman_router.request.request_history import RequestHistory
from ferryman_router.request.response import OutputFailed, ResponseStream
from ferryman_router.request.worker_client import prefill_order
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.generate_request import TokenizedRequest
from ferryman_router.routing.routing_policy import Explanation


class RequestRunner:
    """One running request. `run` takes it to its end; the other methods report events to it.
    `attempts` are those that workers were asked for, the latest last."""

    def __init__(self, asked: TokenizedRequest, ctx: RouterContext) -> None:
        self.asked = asked
        self.attempts: list[RouterAttempt] = []
        self._ctx = ctx
        self.history = RequestHistory(asked.caller, ctx.lifecycle, asked.past.attempt)
        self._answer = ResponseStream(asked, ctx.model.tokenizer, ctx.metrics, ctx.clock)
        self._placement = RequestPlacement(asked, self.history, ctx)
        self._row = ctx.dispatcher.forecast.row()
        self._first_usage: Usage | None = None
        # Of every part of the answer; those of another router's part are in its log.
        self._arithmetics = set(asked.past.arithmetics if asked.past.token_ids else ())
        self._cause = "shutdown"
        self._stopped_by: Stopping | None = None
        self.output_log = self._answer.output_log

    @property
    def cursor(self) -> TokenCursor:
        return TokenCursor(self.asked.request_id, self.history.attempt, self._answer.next_offset)

    @property
    def attempt(self) -> RouterAttempt | None:
        """The latest; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def decode_worker(self) -> WorkerName | None:
        """The one that decodes it, or will."""
        return self.attempts[-1].decode if self.attempts else None

    @property
    def num_tokens(self) -> int:
        """The tokens that its next attempt would stand on: the prompt, and all that were drawn."""
        return self.asked.prompt_len + self._answer.next_offset

    @property
    def drawn_token_ids(self) -> tuple[int, ...]:
        """The tokens of the answer so far."""
        return self._answer.token_ids

    @property
    def was_abandoned(self) -> bool:
        """Whether it was cancelled, goes on at another router, or lost its id to a request of
        another one: no client can read the rest of it here."""
        end = self.output_log.end
        lost = Cancelled | TakenOver | RequestIdInUse
        return isinstance(end, OutputFailed) and isinstance(end.error, lost)

    # From beginning to end.

    async def run(self) -> None:
        """Serves the request until its end; the output log is closed when this returns."""
        asked, clock = self.asked, self._ctx.clock
        self.history.asked(asked.request, clock() - asked.arrived)
        self.history.received(asked, self._placement.chains, self._ctx.fleet.state())
        self._ctx.workers.end_past(asked)
        try:
            async with asyncio.timeout(max(0.0, asked.deadline - clock())):
                verdict = await self._serve()
            self._finish(verdict)
        except (TimeoutError, DeadlineExceeded):  # the same, wherever it is seen first
            self._out_of_time()
        except asyncio.CancelledError:
            if self._stopped_by is not None:
                self._break(events.Failed(self._stopped_by.reason), self._stopped_by)
            else:
                self._break(events.RequestCancelled(), Cancelled(f"cancelled: {self._cause}"))
            raise
        except FerrymanError as error:
            self._break(events.Failed(error.reason), error)
        finally:
            self._ctx.budget.give_back(asked.request_id)
            self._ctx.probation.leave(asked.request_id)
            if self.output_log.end is None:
                self._break(events.Failed("Internal"), FerrymanError("internal error"))

    def set_cancel_cause(self, cause: str) -> None:
        """Notes why the task is about to be cancelled."""
        self._cause = cause

    def stopped_by(self, error: Stopping) -> None:
        """Notes that the task is about to be cancelled though its client still listens."""
        self._stopped_by = error

    async def _serve(self) -> AttemptFinished | AttemptStopped:
        while True:
            if self.history.state in (RequestState.RECEIVED, RequestState.ROUTED):
                self.history.enter(events.RequestQueued())
            waits = self._ctx.clock()
            explanation, prefill, decode = await self._placement.place(self._answer.token_ids)
            self._ctx.metrics.queue_wait.observe(self._ctx.clock() - waits)
            verdict = await self._try(explanation, prefill, decode)
            if isinstance(verdict, AttemptFinished | AttemptStopped):
                return verdict
            lost, num_tokens = self.attempts[-1], self._answer.next_offset
            self._placement.on_lost_attempt(lost, verdict, num_tokens)

    # One attempt.

    async def _try(
        self, explanation: Explanation, prefill: Heartbeat, decode: Heartbeat
    ) -> Verdict:
        asked, ctx = self.asked, self._ctx
        # The log has `routed` before any event of the workers, which learn of it by the order.
        self.history.routed(explanation, self.decode_worker, self._answer.next_offset)
        self._answer.begin_attempt(explanation.attempt)
        is_move = explanation.chosen.prefill == self._placement.kept_by
        attempt = RouterAttempt.begin(asked.request_id, explanation, ctx.clock(), is_move=is_move)
        self.attempts.append(attempt)
        order = prefill_order(
            asked,
            self._placement.chains,
            pair=(prefill, decode),
            attempt=attempt.number,
            unlike_tokens=explanation.chosen.unlike_tokens,
            router=ctx.router_id,
            now=ctx.clock(),
        )
        ctx.workers.prefetch(explanation.chosen, prefill, order)
        call = PrefillCall(attempt, order, ctx, partial(self._progress, attempt))
        try:
            return await attempt.verdict
        finally:
            self._row.leave(ctx.clock())
            call.leave("deadline" if ctx.clock() >= asked.deadline else self._cause)

    def _progress(self, attempt: RouterAttempt, progress: PrefillProgress) -> None:
        """Raises CorruptState for scores that do not follow, or lack at the hand-off."""
        attempt.is_taken = True
        match progress:
            case PrefillAdmitted(usage):
                attempt.has_begun = True
                attempt.planned = usage
                self.history.reach(RequestState.PREFILLING)
            case PrefillChunkDone(end):
                self.history.reach(RequestState.TRANSFERRING)
                num_left = len(self._placement.chains.token_ids) - end
                self._ctx.fleet.computed(attempt.prefill, attempt.name, num_left)
                self._ctx.dispatcher.serve()
            case PromptScores() if attempt is self.attempt:  # none that ends in the background
                for tokens in self._answer.score(progress):
                    self.on_tokens(tokens)
            case PrefillHandedOff(usage):
                self._answer.check_scored()
                attempt.heard(self._ctx.clock())
                self._first_usage = self._first_usage or usage
                self.history.reach(RequestState.COMMITTED)

    # News of the attempt.

    def on_tokens(self, tokens: RequestTokens) -> None:
        """One entry of a decode worker's frame; called for every token, so it does not wait."""
        attempt = self.attempt
        if attempt is None or attempt.verdict.done() or self._answer.hold(tokens):
            return
        match self._answer.take(tokens):
            case Accepted(_, token_ids):
                self._accepted(attempt, len(token_ids))
            case Dropped(is_stale=True):
                return
            case Lacking():
                self._ctx.ask_again(attempt.decode)
                return
            case Diverged(offset):
                attempt.settle(Retryable(CorruptState(f"other tokens from offset {offset} on")))
                return
        match tokens.ending:
            case StreamContinues(held) if held is not NONE_CACHED:
                attempt.held = held
            case StreamFinished():
                attempt.settle(judge_finish(tokens.ending))
            case Failure():
                attempt.settle(classify(error_of(tokens.ending)))

    def _accepted(self, attempt: RouterAttempt, num_tokens: int) -> None:
        now = self._ctx.clock()
        if self.history.state is not RequestState.DECODING:
            self.history.reach(RequestState.DECODING)
            self._arithmetics.add(attempt.explanation.chosen.arithmetic)
            if attempt.number == 1:  # the time of others includes a failure
                self._ctx.dispatcher.forecast.first_token(now - attempt.begun)
        self._row.drawn(num_tokens, now)
        attempt.heard(now)
        self._ctx.probation.leave(self.asked.request_id)
        if self._answer.has_stopped:
            attempt.settle(AttemptStopped())

    def check_stalled(self, now: float) -> None:
        """Asks for tokens when none came for long: the frame with the last ones may be lost."""
        attempt = self.attempt
        if attempt is not None and not attempt.verdict.done() and attempt.is_stalled(now):
            self._ctx.ask_again(attempt.decode)

    def came_back(self, name: WorkerName) -> None:
        """A worker that was lost has not died."""
        self._placement.tries.came_back(name)

    # The end.

    def _finish(self, verdict: AttemptFinished | AttemptStopped) -> None:
        reason = verdict.reason if isinstance(verdict, AttemptFinished) else FinishReason.STOP
        counted = verdict.usage if isinstance(verdict, AttemptFinished) else self._usage_so_far()
        num_tokens = self.output_log.num_tokens
        usage = settled_usage(
            self._first_usage or counted, counted, self.asked.prompt_len, num_tokens
        )
        if self.history.attempt == 1:
            self._ctx.dispatcher.forecast.answered(num_tokens)
        exactness = Exactness.over(self._arithmetics)
        reason = self._answer.finish(reason, usage, exactness)
        chains, state = self._placement.chains_with(self._answer.token_ids), self._ctx.fleet.state()
        self.history.finished(reason, usage, exactness, self._answer.pace, chains, state)
        self._ctx.metrics.requests.labels(str(reason)).inc()
        self._ctx.metrics.count_usage(usage, self._ctx.fleet.page_size())
        self._ctx.metrics.request.observe(self._ctx.clock() - self.asked.arrived)

    def _usage_so_far(self) -> Usage:
        """The account of an answer that a stop string has ended: the one of its decode worker does
        not come."""
        latest = self.attempts[-1]
        # A stop may come before prefill's last report; what it planned is what it did.
        planned = latest.planned or Usage(self.asked.prompt_len)
        return replace(planned, at_decode=latest.held)

    def _out_of_time(self) -> None:
        """Ends the request; one that waits for workers to start gets that as its error."""
        self._cause, patience = "deadline", self._ctx.dispatcher.patience
        is_waiting = self._placement.is_waiting
        refusal = patience.refusal_at_deadline(self._ctx.clock()) if is_waiting else None
        if refusal is not None:
            self._break(events.Failed(refusal.reason), refusal)
        else:
            self._break(events.RequestCancelled(), DeadlineExceeded("the deadline passed"))

    def _break(self, event: RequestEvent, error: FerrymanError) -> None:
        num_tokens = self.output_log.num_tokens
        self.output_log.close(OutputFailed(error, str(self.history.state), num_tokens))
        self.history.broken(event, error.reason, num_tokens, self._cause)
        self._ctx.metrics.requests.labels(error.reason).inc()
