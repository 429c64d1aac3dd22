"""A request's life: placed, prefilled, decoded, and tried again when a worker fails it.

The runner owns the token offsets. The answer gets each token once and in order; a later attempt
goes on after the tokens there are, with the same seed and positions, and therefore draws the same
ones.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

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
from ferryman.runtime.logs import Tail
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.status import error_of
from ferryman.wire.nats.heartbeat import Heartbeat
from ferryman.wire.values import (
    Failure,
    PrefillAdmitted,
    PrefillChunkDone,
    PrefillHandedOff,
    PrefillOrder,
    PrefillProgress,
    RequestTokens,
    RouterAbort,
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
    WorkerGone,
    WorkerLost,
    classify,
    judge_finish,
    settled_usage,
)
from ferryman_router.request.context import RouterContext
from ferryman_router.request.placement import RequestPlacement
from ferryman_router.request.prompt_score_gate import PromptScoreGate
from ferryman_router.request.request_history import RequestHistory
from ferryman_router.request.response import OutputFailed, ResponseStream
from ferryman_router.request.worker_client import prefill_order
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.forecast import ServedRequest
from ferryman_router.routing.generate_request import TokenizedRequest
from ferryman_router.routing.routing_policy import Explanation, RouteChoice

log = logging.getLogger(__name__)

_COMMITTED = (RequestState.COMMITTED, RequestState.DECODING)


class RequestRunner:
    """One running request. `run` takes it to its end; the other methods report events to it."""

    def __init__(self, asked: TokenizedRequest, ctx: RouterContext) -> None:
        self.asked = asked
        self.explanations: list[Explanation] = []
        self._ctx = ctx
        self.history = RequestHistory(asked.caller, ctx.lifecycle, asked.past.attempt)
        self._answer = ResponseStream(asked, ctx.model.tokenizer, ctx.metrics, ctx.clock)
        self._score_gate = PromptScoreGate(asked)
        self._placement = RequestPlacement(asked, ctx)
        self._attempt: RouterAttempt | None = None
        self._previous: RouterAttempt | None = None
        self._first_usage: Usage | None = None
        self._cause = "shutdown"
        self._stopped_by: Stopping | None = None
        self.output_log = self._answer.output_log

    @property
    def cursor(self) -> TokenCursor:
        return TokenCursor(self.asked.request_id, self.history.attempt, self._answer.next_offset)

    @property
    def attempt(self) -> RouterAttempt | None:
        """The latest; None before the first, and if a worker had left before it was asked."""
        return self._attempt

    @property
    def num_tokens(self) -> int:
        """The tokens that its next attempt would stand on: the prompt, and all that were drawn."""
        return self.asked.prompt_len + self._answer.next_offset

    @property
    def was_abandoned(self) -> bool:
        """Whether it was cancelled, goes on at another router, or lost its id to a request of
        another one: no client can read the rest of it here."""
        end = self.output_log.end
        lost = Cancelled | TakenOver | RequestIdInUse
        return isinstance(end, OutputFailed) and isinstance(end.error, lost)

    def is_decoded_by(self, name: WorkerName) -> bool:
        return self._attempt is not None and self._attempt.decode == name

    @property
    def decode_worker(self) -> WorkerName | None:
        """The one that decodes it, or will."""
        return self._attempt.decode if self._attempt is not None else None

    # From beginning to end.

    async def run(self) -> None:
        """Serves the request until its end; the output log is closed when this returns."""
        asked, clock = self.asked, self._ctx.clock
        self.history.received(asked, self._placement.chains, self._ctx.fleet.state())
        self._end_past()
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

    def _out_of_time(self) -> None:
        """Ends the request; one that waits for workers to start gets that as its error."""
        self._cause, patience = "deadline", self._ctx.dispatcher.patience
        is_waiting = self._placement.is_waiting
        refusal = patience.refusal_at_deadline(self._ctx.clock()) if is_waiting else None
        if refusal is not None:
            self._break(events.Failed(refusal.reason), refusal)
        else:
            self._break(events.RequestCancelled(), DeadlineExceeded("the deadline passed"))

    def _end_past(self) -> None:
        """Has the previous router's latest decode worker end its work on this request: no client
        reads that answer any more."""
        past, fleet = self.asked.past, self._ctx.fleet
        for worker in fleet:
            if worker.beat.worker_id == past.decode:
                abort = RouterAbort(
                    self.asked.request_id, past.attempt, "taken_over", past.router_id
                )
                self._ctx.outlive(self._ctx.workers.abort(worker.name, abort))

    def set_cancel_cause(self, cause: str) -> None:
        """Notes why the task is about to be cancelled."""
        self._cause = cause

    def stopped_by(self, error: Stopping) -> None:
        """Notes that the task is about to be cancelled though its client still listens."""
        self._stopped_by = error

    async def _serve(self) -> AttemptFinished | AttemptStopped:
        history = self.history
        while True:
            if history.state in (RequestState.RECEIVED, RequestState.ROUTED):
                history.enter(events.RequestQueued())
            generated = self._answer.token_ids
            explanation = await self._placement.place(generated, attempt=history.attempt + 1)
            verdict = await self._try(explanation)
            if isinstance(verdict, AttemptFinished | AttemptStopped):
                return verdict
            self._placement.on_lost_attempt(
                verdict,
                explanation,
                self._attempt,
                stage=history.state,
                num_tokens=self._answer.next_offset,
            )

    # One attempt.

    async def _try(self, explanation: Explanation) -> Verdict:
        chosen, ctx = explanation.chosen, self._ctx
        prefill, decode = ctx.fleet.get(chosen.prefill), ctx.fleet.get(chosen.decode)
        if prefill is None or decode is None:
            self._previous, self._attempt = self._attempt or self._previous, None
            ctx.dispatcher.leave(self.asked.request_id, explanation)
            name = chosen.prefill if prefill is None else chosen.decode
            gone = WorkerGone(f"{name.worker_id} left before it was asked")
            return WorkerLost(gone, name, was_running=False)
        # The log has `routed` before any event of the workers, which learn of it by the order.
        previous = self._attempt or self._previous
        self.history.attempt += 1
        self._answer.begin_attempt(self.history.attempt)
        self._score_gate.begin_attempt()
        self.explanations.append(explanation)
        attempt = self._attempt = RouterAttempt.begin(
            self.asked.request_id,
            self.history.attempt,
            chosen,
            ctx.clock(),
            is_move=chosen.prefill == self._placement.kept_by,
        )
        self._report_route(explanation, previous)
        order = prefill_order(
            self.asked,
            self._placement.chains,
            pair=(prefill.beat, decode.beat),
            attempt=attempt.number,
            router=ctx.router_id,
            now=ctx.clock(),
        )
        self._begin_prefetch(chosen, prefill.beat, order)
        call = PrefillCall(attempt, order, ctx, partial(self._progress, attempt))
        try:
            return await attempt.verdict
        finally:
            call.leave("deadline" if ctx.clock() >= self.asked.deadline else self._cause)

    def _begin_prefetch(self, chosen: RouteChoice, prefill: Heartbeat, order: PrefillOrder) -> None:
        """Starts to fetch units of storage or of a peer before the worker has read its order."""
        host = self._ctx.fleet.host_caches().get(prefill.node)
        if chosen.is_worth_fetching and host is not None and host.state == prefill.state:
            have_tokens = chosen.arrival.device_tokens
            self._ctx.workers.prefetch(host, order, have_tokens)

    def _report_route(self, explanation: Explanation, previous: RouterAttempt | None) -> None:
        if previous is not None and self.history.state in _COMMITTED:
            self.history.enter(events.Migrated())
            decode = explanation.chosen.decode
            self.history.migrated(previous.decode, decode, self._answer.next_offset)
        self.history.enter(events.Routed(self.history.attempt))
        self.history.routed(explanation)

    def _progress(self, attempt: RouterAttempt, progress: PrefillProgress) -> None:
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
            case PromptScores():
                self._scored(attempt, progress)
            case PrefillHandedOff() if not self._is_scored(attempt):
                pass  # it is lost
            case PrefillHandedOff(usage):
                attempt.heard(self._ctx.clock())
                self._first_usage = self._first_usage or usage
                self.history.reach(RequestState.COMMITTED)

    def _scored(self, attempt: RouterAttempt, piece: PromptScores) -> None:
        if attempt is not self._attempt:
            return  # a call that ends in the background
        try:
            held = self._score_gate.add(piece)
        except CorruptState as error:
            attempt.settle(Retryable(error))
            return
        if self._score_gate.is_whole:
            self.output_log.scores = self._score_gate.pieces
        for tokens in held:
            self.on_tokens(tokens)

    def _is_scored(self, attempt: RouterAttempt) -> bool:
        """Whether everything that comes before a hand-off is here."""
        try:
            self._score_gate.check_handed_off()
        except CorruptState as error:
            attempt.settle(Retryable(error))
        return self._score_gate.is_whole

    # News of the attempt.

    def on_tokens(self, tokens: RequestTokens) -> None:
        """One entry of a decode worker's frame; called for every token, so it does not wait."""
        attempt = self._attempt
        if attempt is None or attempt.verdict.done() or self._score_gate.hold(tokens):
            return
        match self._answer.take(tokens):
            case Accepted():
                self._accepted(attempt)
            case Dropped(is_stale=True):
                return
            case Lacking():
                self._ctx.ask_again(attempt.decode)
                return
            case Diverged(offset):
                attempt.settle(Retryable(CorruptState(f"other tokens from offset {offset} on")))
                return
        match tokens.ending:
            case StreamFinished():
                attempt.settle(judge_finish(tokens.ending))
            case Failure():
                attempt.settle(classify(error_of(tokens.ending)))

    def _accepted(self, attempt: RouterAttempt) -> None:
        if self.history.state is not RequestState.DECODING:
            self.history.reach(RequestState.DECODING)
        attempt.heard(self._ctx.clock())
        self._ctx.probation.leave(self.asked.request_id)
        if self._answer.has_stopped:
            attempt.settle(AttemptStopped())

    def check_stalled(self, now: float) -> None:
        """Asks for tokens when none came for long: the frame with the last ones may be lost."""
        attempt = self._attempt
        if attempt is not None and not attempt.verdict.done() and attempt.is_stalled(now):
            self._ctx.ask_again(attempt.decode)

    def on_worker_lost(self, name: WorkerName, cause: str) -> None:
        """A worker is gone."""
        attempt = self._attempt
        if attempt is not None and attempt.needs(name):
            gone = WorkerGone(f"{name.worker_id} is gone: {cause}")
            attempt.settle(WorkerLost(gone, name, attempt.is_running_on(name)))

    def came_back(self, name: WorkerName) -> None:
        """A worker that was lost has not died."""
        self._placement.tries.came_back(name)

    # The end.

    def _finish(self, verdict: AttemptFinished | AttemptStopped) -> None:
        reason = verdict.reason if isinstance(verdict, AttemptFinished) else FinishReason.STOP
        assert self._attempt is not None, "nothing ends well that was not begun"
        # A stop may come before prefill's last report; what it planned is what it did.
        counted = verdict.usage if isinstance(verdict, AttemptFinished) else self._attempt.planned
        usage = settled_usage(
            self._first_usage or counted,
            counted,
            self.asked.prompt_len,
            self.output_log.num_tokens,
        )
        self.history.enter(events.RequestFinished())
        self._note_service(is_whole=True)
        reason = self._answer.finish(reason, usage)
        chains = self._placement.chains_with(self._answer.token_ids)
        self.history.finished(reason, usage, self._answer.pace, chains, self._ctx.fleet.state())
        log.info(
            "request done %s",
            Tail(
                id=self.asked.request_id,
                prompt=usage.prompt_tokens,
                cached=usage.cached.total,
                tokens=usage.completion_tokens,
                ttft_ms=(self._answer.pace.first_seconds or 0.0) * 1000,
                attempts=self.history.attempt,
            ),
        )
        metrics = self._ctx.metrics
        metrics.requests.labels(str(reason)).inc()
        metrics.count_usage(usage, self._ctx.fleet.page_size())

    def _break(self, event: RequestEvent, error: FerrymanError) -> None:
        self._note_service(is_whole=False)
        stage, num_tokens = self.history.state, self.output_log.num_tokens
        self.history.enter(event)
        self.output_log.close(OutputFailed(error, str(stage), num_tokens))
        self.history.broken(event, stage, error.reason, num_tokens, self._cause)
        self._ctx.metrics.requests.labels(error.reason).inc()

    def _note_service(self, *, is_whole: bool) -> None:
        """Records requests that were placed once: the time of others includes a failure."""
        pace = self._answer.pace
        if (
            self.history.attempt == 1
            and self._attempt is not None
            and pace.first_seconds is not None
        ):
            first_seconds = self.asked.arrived + pace.first_seconds - self._attempt.begun
            served = ServedRequest(
                first_seconds, pace.decode_seconds, self.output_log.num_tokens, is_whole
            )
            self._ctx.dispatcher.forecast.served(served)
