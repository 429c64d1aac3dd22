"""A request's life: placed, prefilled, decoded, and tried again when a worker fails it.

The journey owns the token offsets. Whatever workers do, the transcript gets each token once and in
order; a later attempt goes on behind the tokens there are, with the same seed and positions, and
therefore draws the same ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import numpy as np

from ferryman.cache.keys import TokenIds
from ferryman.errors import Cancelled, CorruptState, DeadlineExceeded, FerrymanError, Unavailable
from ferryman.handoff import request as events
from ferryman.handoff.offsets import (
    Accepted,
    Diverged,
    Dropped,
    Lacking,
    TokenLedger,
)
from ferryman.handoff.request import RequestEvent, RequestState, next_state, reached
from ferryman.runtime.lifecycle import Fact
from ferryman.runtime.logs import Tail
from ferryman.schedule.request import FinishReason
from ferryman.wire.beats import Beat
from ferryman.wire.index import Holding, ResumeShape
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
from ferryman_router.asked import Asked
from ferryman_router.attempt import Attempt
from ferryman_router.budget import Tries
from ferryman_router.chains import Chains
from ferryman_router.facts import chain_facts, finished_facts, routed_facts
from ferryman_router.fleet import WorkerName
from ferryman_router.orders import prefetch_order, prefill_order
from ferryman_router.pace import Pace
from ferryman_router.policy import Asking, Candidate, Explanation
from ferryman_router.queue import Ticket
from ferryman_router.surroundings import Surroundings
from ferryman_router.transcript import Broken, Transcript
from ferryman_router.usage import settled_usage
from ferryman_router.verdict import (
    Done,
    Hopeless,
    RetriesExhausted,
    Spoiled,
    Stopped,
    Suspect,
    TurnedAway,
    Verdict,
    WorkerGone,
    judge,
)
from ferryman_router.writer import Writer

log = logging.getLogger(__name__)

MAX_AVOID_SECONDS = 1.0
_COMMITTED = (RequestState.COMMITTED, RequestState.DECODING, RequestState.RETRACTED)


class Journey:
    """One request on its way. `run` takes it to its end; everything else is told to it."""

    def __init__(self, asked: Asked, around: Surroundings) -> None:
        self.asked = asked
        self.transcript = Transcript()
        self.explanations: list[Explanation] = []
        self.state = RequestState.RECEIVED
        self._around = around
        self._writer = Writer(around.model.tokenizer, asked, self.transcript)
        self._number = 0
        self._ledger = TokenLedger(0)
        self._chains = Chains(asked.token_ids, asked.tenant.salt)
        self._tries = Tries()
        self._excluded: dict[WorkerName, float] = {}
        self._pace = Pace(asked.arrived)
        self._attempt: Attempt | None = None
        self._previous: Attempt | None = None
        self._first_usage: Usage | None = None
        self._cause = "shutdown"

    @property
    def number(self) -> int:
        """The number of the latest attempt."""
        return self._number

    @property
    def cursor(self) -> TokenCursor:
        return TokenCursor(self.asked.request_id, self._number, self._ledger.next_offset)

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
            **chain_facts(self._chains, self._around.fleet.state()),
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
                    wait = min(MAX_AVOID_SECONDS, error.retry_after_seconds)
                    self._around.fleet.avoid(explanation.chosen.decode, self._around.clock() + wait)
                    self._around.metrics.retries.labels("no_room").inc()
                case Spoiled(error):
                    self._exclude(explanation, error)
                    self._check_retry(verdict)
                case Hopeless(error):
                    raise error
            is_retry = True

    def _check_retry(self, spoiled: Spoiled) -> None:
        """Raises when nobody shall try this again."""
        around, tries, error = self._around, self._tries, spoiled.error
        had_begun = self._attempt is not None and self._attempt.has_begun
        if isinstance(error, Unavailable) and not had_begun:
            around.metrics.retries.labels("not_reached").inc()
            return  # nothing was done: another worker, or the same one after its next beat
        tries.failed(by_death=spoiled.is_death and had_begun)
        tail = Tail(
            id=self.asked.request_id,
            attempt=self._number,
            state=self.state,
            reason=error.reason,
            message=error,
        )
        log.warning("attempt lost %s", tail)
        if tries.is_suspect:
            raise Suspect(f"two workers died while they ran this request: {error}")
        in_flight = around.num_in_flight()
        if not tries.may_go_on or not around.budget.try_take(self.asked.request_id, in_flight):
            raise RetriesExhausted(f"the last of {tries.num_failed} failures: {error}")
        around.metrics.retries.labels(error.reason).inc()

    def _exclude(self, explanation: Explanation, error: FerrymanError) -> None:
        """This pair failed: not again for this request, until it has been heard of since."""
        fleet, chosen = self._around.fleet, explanation.chosen
        for name in (chosen.prefill, chosen.decode):
            if (worker := fleet.get(name)) is not None:
                self._excluded[name] = worker.last_heard
        if isinstance(error, Unavailable) and not isinstance(error, WorkerGone):
            fleet.suspect(chosen.decode)  # a prefill worker that is gone would not say so

    def _still_excluded(self) -> frozenset[WorkerName]:
        found = ((self._around.fleet.get(name), heard) for name, heard in self._excluded.items())
        return frozenset(w.name for w, heard in found if w is not None and w.last_heard == heard)

    # One attempt.

    async def _place(self, is_retry: bool) -> Explanation:
        asked = self.asked
        if self.state in (RequestState.RECEIVED, RequestState.ROUTED):
            self._enter(events.Queued())
        ticket = Ticket(asked.request_id, asked.tenant.name, asked.arrived, asked.deadline)
        self._chains = self._chains.extended(self._all_token_ids())
        holdings = await self._holdings()
        asking = Asking(self._chains, len(self._chains.token_ids), holdings, self._still_excluded)
        return await self._around.dispatcher.place(
            ticket, asking, attempt=self._number + 1, is_retry=is_retry
        )

    def _all_token_ids(self) -> TokenIds:
        """The prompt, and what was generated so far."""
        generated = np.array(self._ledger.token_ids, dtype="<u4")
        return np.concatenate([self.asked.token_ids, generated])

    async def _holdings(self) -> Mapping[str, Holding]:
        """What the nodes hold of this prompt; asked once, for the state in use."""
        for worker in self._around.fleet.usable("prefill", self._around.clock()):
            state = worker.beat.state
            reusable = (len(self._chains.token_ids) - 1) // state.page_size
            chain = self._chains.of(state)[:reusable]
            if not worker.beat.node or not chain:
                continue
            shape = ResumeShape(state.page_size, state.window_len, frozenset(state.kinds))
            return await self._around.index.usable_pages(chain, shape)
        return {}

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
            self._chains,
            pair=(prefill.beat, decode.beat),
            attempt=attempt.number,
            router=around.router_id,
            now=around.clock(),
        )
        self._begin_prefetch(chosen, prefill.beat, order)
        follower = asyncio.ensure_future(self._follow_prefill(attempt, order))
        follower.add_done_callback(attempt.follower_ended)
        try:
            return await attempt.verdict
        finally:
            follower.cancel()
            around.fleet.settled(chosen.decode, 0)
            self._tell_end(attempt)

    def _begin_prefetch(self, chosen: Candidate, prefill: Beat, order: PrefillOrder) -> None:
        """What storage or a peer holds is on its way before the worker has read its order."""
        host = self._around.fleet.host_cache(prefill.node)
        if chosen.is_worth_fetching and host is not None and host.state == prefill.state:
            have_tokens = chosen.arrival.device_tokens
            self._around.workers.prefetch(host, prefetch_order(host, order, have_tokens))

    def _begin(self, explanation: Explanation) -> Attempt:
        self._number += 1
        self._ledger.begin_attempt(self._number)
        self.explanations.append(explanation)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        chosen = explanation.chosen
        num_tokens = len(self._chains.token_ids) - chosen.usable_tokens
        self._attempt = Attempt(self._number, chosen.prefill, chosen.decode, num_tokens, verdict)
        return self._attempt

    def _report_route(self, explanation: Explanation, previous: Attempt | None) -> None:
        if previous is not None and self.state in _COMMITTED:
            self._enter(events.Migrated())
            self._report(
                "migrated",
                **{"from": previous.decode.worker_id, "to": explanation.chosen.decode.worker_id},
                offset=self._ledger.next_offset,
            )
        self._enter(events.Routed(self._number))
        self._report("routed", **routed_facts(explanation))

    async def _follow_prefill(self, attempt: Attempt, order: PrefillOrder) -> None:
        """Until the hand-off; a failure counts unless decode has been heard of already."""
        workers, fleet = self._around.workers, self._around.fleet
        try:
            async for progress in workers.prefill(attempt.prefill, order):
                self._progress(attempt, progress)
            error: FerrymanError = Unavailable("prefill ended without a hand-off")
        except FerrymanError as caught:
            error = caught
            if isinstance(error, WorkerGone):
                fleet.suspect(attempt.prefill)
        finally:
            fleet.settled(attempt.prefill, attempt.num_prefill_tokens)
        if not attempt.is_handed_off:
            attempt.settle(judge(error))

    def _progress(self, attempt: Attempt, progress: PrefillProgress) -> None:
        match progress:
            case Admitted():
                attempt.has_begun = True
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
        match self._ledger.accept(tokens.frame):
            case Accepted(offset, token_ids):
                self._accept(attempt, offset, token_ids, tokens)
            case Dropped(is_stale):
                if is_stale:
                    self._around.metrics.refused_tokens.labels("stale").inc()
                    return
            case Lacking():
                self._around.metrics.refused_tokens.labels("early").inc()
                self._around.workers.ask_again(attempt.decode)
                return
            case Diverged(offset):
                self._around.metrics.refused_tokens.labels("diverged").inc()
                attempt.settle(Spoiled(CorruptState(f"other tokens from offset {offset} on")))
                return
        match tokens.ending:
            case Finished(reason, usage):
                attempt.settle(Done(reason, usage))
            case Failure():
                attempt.settle(judge(error_of(tokens.ending)))

    def _accept(
        self, attempt: Attempt, offset: int, token_ids: tuple[int, ...], tokens: RequestTokens
    ) -> None:
        if self.state is not RequestState.DECODING:
            self._see(RequestState.DECODING)
        is_first, metrics = self._pace.first_seconds is None, self._around.metrics
        now = self._around.clock()
        attempt.heard(now)
        gap = self._pace.tokens(len(token_ids), now)
        if is_first:
            metrics.first_token.observe(gap)
        else:
            metrics.gap.observe(gap, len(token_ids))
        logprobs = tokens.logprobs[-len(token_ids) :] if tokens.logprobs else ()
        self._writer.write(offset, token_ids, logprobs)
        if self._writer.has_stopped:
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
        counted = verdict.usage if isinstance(verdict, Done) else None
        usage = settled_usage(
            self._first_usage or counted, self.asked.prompt_len, self.transcript.num_tokens
        )
        self._enter(events.Finished())
        self._writer.finish(reason, usage)
        chains = self._chains.extended(self._all_token_ids())
        shared = chain_facts(chains, self._around.fleet.state())
        self._report("finished", **finished_facts(reason, usage, self._pace), **shared)
        log.info(
            "request done %s",
            Tail(
                id=self.asked.request_id,
                prompt=usage.prompt_tokens,
                cached=usage.cached.total,
                tokens=usage.completion_tokens,
                ttft_ms=(self._pace.first_seconds or 0.0) * 1000,
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
