"""A request's life: placed, prefilled, decoded, and tried again when a worker fails it.

The journey owns the token offsets. Whatever workers do, the answer gets each token once and in
order; a later attempt goes on behind the tokens there are, with the same seed and positions, and
therefore draws the same ones.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ferryman.errors import Cancelled, CorruptState, DeadlineExceeded, FerrymanError, Unavailable
from ferryman.handoff import request as events
from ferryman.handoff.offsets import Accepted, Diverged, Dropped, Lacking
from ferryman.handoff.request import RequestEvent, RequestState, next_state, reached
from ferryman.runtime.lifecycle import Fact
from ferryman.runtime.logs import Tail
from ferryman.schedule.request import FinishReason
from ferryman.wire.beats import Beat
from ferryman.wire.status import error_of
from ferryman.wire.values import (
    AbortOrder,
    Admitted,
    ChunkDone,
    Failure,
    Finished,
    HandedOff,
    PrefillOrder,
    PrefillProgress,
    RequestTokens,
    TokenCursor,
    Usage,
)
from ferryman_router.answer import Answer
from ferryman_router.asked import Asked
from ferryman_router.attempt import Attempt
from ferryman_router.facts import chain_facts, finished_facts, routed_facts
from ferryman_router.fleet import WorkerName
from ferryman_router.orders import prefetch_order, prefill_order
from ferryman_router.placing import Placing
from ferryman_router.policy import Candidate, Explanation
from ferryman_router.prefill_call import PrefillCall
from ferryman_router.surroundings import Surroundings
from ferryman_router.transcript import Broken
from ferryman_router.usage import settled_usage
from ferryman_router.verdict import (
    Done,
    Hopeless,
    Spoiled,
    Stopped,
    TurnedAway,
    Verdict,
    WorkerGone,
    judge,
)

log = logging.getLogger(__name__)

_COMMITTED = (RequestState.COMMITTED, RequestState.DECODING, RequestState.RETRACTED)


class Journey:
    """One request on its way. `run` takes it to its end; everything else is told to it."""

    def __init__(self, asked: Asked, around: Surroundings) -> None:
        self.asked = asked
        self.explanations: list[Explanation] = []
        self.state = RequestState.RECEIVED
        self._around = around
        self._number = 0
        self._answer = Answer(asked, around.model.tokenizer, around.metrics, around.clock)
        self._placing = Placing(asked, around)
        self._attempt: Attempt | None = None
        self._previous: Attempt | None = None
        self._first_usage: Usage | None = None
        self._cause = "shutdown"
        self.transcript = self._answer.transcript

    @property
    def number(self) -> int:
        """The number of the latest attempt."""
        return self._number

    @property
    def cursor(self) -> TokenCursor:
        return TokenCursor(self.asked.request_id, self._number, self._answer.next_offset)

    @property
    def was_abandoned(self) -> bool:
        """Whether it was cancelled: nobody can hear the rest of it any more."""
        end = self.transcript.end
        return isinstance(end, Broken) and isinstance(end.error, Cancelled)

    def is_decoded_by(self, name: WorkerName) -> bool:
        return self._attempt is not None and self._attempt.decode == name

    # From beginning to end.

    async def run(self) -> None:
        """Serves the request until its end; the transcript is closed when this returns."""
        asked, clock = self.asked, self._around.clock
        self._report(
            "received",
            tokens=asked.prompt_len,
            tenant=asked.tenant.name,
            deadline_ms=int(asked.caller.deadline_seconds * 1000),
            **chain_facts(self._placing.chains, self._around.fleet.state()),
        )
        try:
            async with asyncio.timeout(max(0.0, asked.deadline - clock())):
                verdict = await self._serve()
            self._finish(verdict)
        except TimeoutError:
            self._cause = "deadline"
            self._break(events.Cancelled(), DeadlineExceeded("the deadline passed"))
        except asyncio.CancelledError:
            self._break(events.Cancelled(), Cancelled(f"cancelled: {self._cause}"))
            raise
        except FerrymanError as error:
            self._break(events.Failed(error.reason), error)
        finally:
            self._around.budget.give_back(asked.request_id)
            if self.transcript.end is None:
                self._break(events.Failed("Internal"), FerrymanError("internal error"))

    def because(self, cause: str) -> None:
        """Says why the task is about to be cancelled."""
        self._cause = cause

    async def _serve(self) -> Done | Stopped:
        is_retry = False
        while True:
            explanation = await self._place(is_retry)
            verdict = await self._try(explanation)
            match verdict:
                case Done() | Stopped():
                    return verdict
                case TurnedAway(error):
                    assert self._attempt is not None, "somebody was asked"
                    self._placing.turned_away(self._attempt.refused_by, error)
                case Spoiled():
                    had_begun = self._attempt is not None and self._attempt.has_begun
                    self._placing.spoiled(
                        explanation, verdict, had_begun=had_begun, stage=self.state
                    )
                case Hopeless(error):
                    raise error
            is_retry = True

    # One attempt.

    async def _place(self, is_retry: bool) -> Explanation:
        if self.state in (RequestState.RECEIVED, RequestState.ROUTED):
            self._enter(events.Queued())
        return await self._placing.place(
            self._answer.token_ids, attempt=self._number + 1, is_retry=is_retry
        )

    async def _try(self, explanation: Explanation) -> Verdict:
        chosen, around = explanation.chosen, self._around
        prefill, decode = around.fleet.get(chosen.prefill), around.fleet.get(chosen.decode)
        if prefill is None or decode is None:
            self._previous, self._attempt = self._attempt or self._previous, None
            return Spoiled(Unavailable("the chosen worker left before it was asked"))
        previous = self._attempt or self._previous
        attempt = self._begin(explanation)
        self._report_route(explanation, previous)
        order = prefill_order(
            self.asked,
            self._placing.chains,
            pair=(prefill.beat, decode.beat),
            attempt=attempt.number,
            router=around.router_id,
            now=around.clock(),
        )
        self._begin_prefetch(chosen, prefill.beat, order)
        call = PrefillCall(attempt, order, around, partial(self._progress, attempt))
        try:
            return await attempt.verdict
        finally:
            call.leave()
            around.fleet.settled(chosen.decode, 0)
            self._tell_end(attempt)

    def _begin_prefetch(self, chosen: Candidate, prefill: Beat, order: PrefillOrder) -> None:
        """What storage or a peer holds is on its way before the worker has read its order."""
        host = self._around.fleet.host_caches().get(prefill.node)
        if chosen.is_worth_fetching and host is not None and host.state == prefill.state:
            have_tokens = chosen.arrival.device_tokens
            self._around.workers.prefetch(host, prefetch_order(host, order, have_tokens))

    def _begin(self, explanation: Explanation) -> Attempt:
        self._number += 1
        self._answer.begin_attempt(self._number)
        self.explanations.append(explanation)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        chosen = explanation.chosen
        num_tokens = len(self._placing.chains.token_ids) - chosen.usable_tokens
        self._attempt = Attempt(self._number, chosen.prefill, chosen.decode, num_tokens, verdict)
        return self._attempt

    def _report_route(self, explanation: Explanation, previous: Attempt | None) -> None:
        if previous is not None and self.state in _COMMITTED:
            self._enter(events.Migrated())
            self._report(
                "migrated",
                **{"from": previous.decode.worker_id, "to": explanation.chosen.decode.worker_id},
                offset=self._answer.next_offset,
            )
        self._enter(events.Routed(self._number))
        self._report("routed", **routed_facts(explanation))

    def _progress(self, attempt: Attempt, progress: PrefillProgress) -> None:
        attempt.is_taken = True
        match progress:
            case Admitted(plan):
                attempt.has_begun = True
                attempt.planned = Usage(plan.prompt_len, 0, plan.cached, plan.uncached)
                self._see(RequestState.PREFILLING)
            case ChunkDone():
                self._see(RequestState.TRANSFERRING)
            case HandedOff(usage=usage):
                attempt.heard(self._around.clock())
                self._first_usage = self._first_usage or usage
                self._see(RequestState.COMMITTED)

    def _tell_end(self, attempt: Attempt) -> None:
        """Whoever may still work on the attempt hears that it is over."""
        if attempt.is_settled_as((Done, TurnedAway)):
            return
        order = AbortOrder(self.asked.request_id, attempt.number, self._cause_of_end(attempt))
        self._around.outlive(self._around.workers.abort(attempt.decode, order))

    def _cause_of_end(self, attempt: Attempt) -> str:
        if attempt.is_settled_as((Stopped,)):
            return "stop"
        if attempt.verdict.done() and not attempt.verdict.cancelled():
            return "attempt_lost"
        return "deadline" if self._around.clock() >= self.asked.deadline else self._cause

    # What is told.

    def take(self, tokens: RequestTokens) -> None:
        """One entry of a decode worker's frame; called for every token, so it does not wait."""
        attempt = self._attempt
        if attempt is None or attempt.verdict.done():
            return
        match self._answer.take(tokens):
            case Accepted():
                self._accepted(attempt)
            case Dropped(is_stale=True):
                return
            case Lacking():
                self._around.workers.ask_again(attempt.decode)
                return
            case Diverged(offset):
                attempt.settle(Spoiled(CorruptState(f"other tokens from offset {offset} on")))
                return
        match tokens.ending:
            case Finished(reason, usage):
                attempt.settle(Done(reason, usage))
            case Failure():
                attempt.settle(judge(error_of(tokens.ending)))

    def _accepted(self, attempt: Attempt) -> None:
        if self.state is not RequestState.DECODING:
            self._see(RequestState.DECODING)
        attempt.heard(self._around.clock())
        if self._answer.has_stopped:
            attempt.settle(Stopped())

    def look(self, now: float) -> None:
        """Asks for tokens when none came for long: the frame with the last ones may be lost."""
        attempt = self._attempt
        if attempt is not None and not attempt.verdict.done() and attempt.is_stalled(now):
            self._around.workers.ask_again(attempt.decode)

    def lost(self, name: WorkerName, cause: str) -> None:
        """A worker is no more."""
        if self._attempt is not None and self._attempt.needs(name):
            self._attempt.settle(Spoiled(WorkerGone(f"{name.worker_id} is gone: {cause}")))

    # The end.

    def _finish(self, verdict: Done | Stopped) -> None:
        reason = verdict.reason if isinstance(verdict, Done) else FinishReason.STOP
        assert self._attempt is not None, "nothing ends well that was not begun"
        # A stop may come before prefill's last word; what it planned is what it did.
        counted = verdict.usage if isinstance(verdict, Done) else self._attempt.planned
        usage = settled_usage(
            self._first_usage or counted,
            counted,
            self.asked.prompt_len,
            self.transcript.num_tokens,
        )
        self._enter(events.Finished())
        self._answer.finish(reason, usage)
        chains = self._placing.chains_with(self._answer.token_ids)
        shared = chain_facts(chains, self._around.fleet.state())
        self._report("finished", **finished_facts(reason, usage, self._answer.pace), **shared)
        log.info(
            "request done %s",
            Tail(
                id=self.asked.request_id,
                prompt=usage.prompt_tokens,
                cached=usage.cached.total,
                tokens=usage.completion_tokens,
                ttft_ms=(self._answer.pace.first_seconds or 0.0) * 1000,
                attempts=self._number,
            ),
        )
        metrics = self._around.metrics
        metrics.requests.labels(str(reason)).inc()
        metrics.count_usage(usage, self._around.fleet.page_size())

    def _break(self, event: RequestEvent, error: FerrymanError) -> None:
        stage, self.state = self.state, next_state(self.state, event)
        self.transcript.close(Broken(error, str(stage), self.transcript.num_tokens))
        facts: dict[str, Fact] = {"stage": str(stage), "reason": error.reason}
        facts["offset"] = self.transcript.num_tokens
        if isinstance(event, events.Cancelled):
            self._report("cancelled", **facts, cause=self._cause)
        elif self._number == 0:
            self._report("rejected", **facts)
        else:
            self._report("failed", **facts)
        self._around.metrics.requests.labels(error.reason).inc()

    def _enter(self, event: RequestEvent) -> None:
        self.state = next_state(self.state, event)

    def _see(self, stage: RequestState) -> None:
        self.state = reached(self.state, stage)

    def _report(self, event: str, **facts: Fact) -> None:
        caller = self.asked.caller
        self._around.lifecycle.publish(
            caller.request_id,
            max(1, self._number),
            event,
            traceparent=caller.traceparent,
            **facts,
        )
