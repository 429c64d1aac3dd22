"""One try: a prefill worker, a decode worker, the call to the first of them, and how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ferryman.errors import (
    FerrymanError,
    RequestIdInUse,
    Unavailable,
    Unreachable,
    WrongEpoch,
)
from ferryman.handoff.usage import NONE_CACHED, CachedTokens
from ferryman.wire.values import PrefillOrder, PrefillProgress, RouterAbort, Usage
from ferryman_router.request.attempt_result import (
    AttemptFinished,
    AttemptStopped,
    CallBroken,
    CutOff,
    Fatal,
    LostAttempt,
    NoCapacity,
    Retryable,
    Verdict,
    WorkerDrains,
    WorkerGone,
    WorkerLost,
    classify,
)
from ferryman_router.request.context import RouterContext
from ferryman_router.routing.dispatcher import attempt_name
from ferryman_router.routing.fleet import WorkerName
from ferryman_router.routing.routing_policy import Explanation

log = logging.getLogger(__name__)

FIRST_PATIENCE_SECONDS = 1.0
MAX_PATIENCE_SECONDS = 16.0
LEAVE_AGAIN_SECONDS = 1.0
# A hand-off whose tokens have come already has this long to be reported.
FAREWELL_SECONDS = 5.0


@dataclass(slots=True)
class RouterAttempt:
    """A try by the pair of workers that `explanation` chose. `name` is the name of its claims on
    them, `begun` when it was sent to them. It `is_taken` once prefill has admitted it, `has_begun`
    once it is at work, `is_handed_off` once decode is known to have it: from then on the prefill
    worker may go. `planned` is prefill's report on the prompt so far, and `held` decode's.

    One that `is_move` has the draining decode worker in the place of prefill. It `is_leaving` once
    its own decode worker was asked to let it go on elsewhere; not before `leave_from`.
    """

    name: str
    explanation: Explanation
    begun: float
    verdict: asyncio.Future[Verdict]
    is_move: bool = False
    is_leaving: bool = False
    leave_from: float = 0.0
    is_taken: bool = False
    has_begun: bool = False
    is_handed_off: bool = False
    last_news: float = 0.0
    patience: float = FIRST_PATIENCE_SECONDS
    planned: Usage | None = None
    held: CachedTokens = NONE_CACHED

    @classmethod
    def begin(
        cls, request_id: str, explanation: Explanation, now: float, *, is_move: bool
    ) -> RouterAttempt:
        """The attempt with this pair of workers, sent to them now."""
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        name = attempt_name(request_id, explanation.attempt)
        return cls(name, explanation, now, verdict, is_move)

    @property
    def number(self) -> int:
        return self.explanation.attempt

    @property
    def prefill(self) -> WorkerName:
        return self.explanation.chosen.prefill

    @property
    def decode(self) -> WorkerName:
        return self.explanation.chosen.decode

    @property
    def refused_by(self) -> WorkerName:
        """The worker without room for it, when it is turned away: decode is asked by prefill."""
        return self.decode if self.is_taken else self.prefill

    def heard(self, now: float) -> None:
        """Tokens came: decode is at work, and the stream carries them."""
        self.has_begun = self.is_handed_off = True
        self.last_news, self.patience = now, FIRST_PATIENCE_SECONDS

    def is_stalled(self, now: float) -> bool:
        """Whether it is time to ask for tokens; the wait doubles each time that none come."""
        if not self.is_handed_off or now - self.last_news < self.patience:
            return False
        self.last_news, self.patience = now, min(MAX_PATIENCE_SECONDS, 2 * self.patience)
        return True

    @property
    def leaves(self) -> WorkerName | None:
        """The worker that it is leaving now, or moves away from."""
        if self.is_leaving:
            return self.decode
        return self.prefill if self.is_move and not self.is_handed_off else None

    def may_leave(self, now: float) -> bool:
        """Whether decode may be asked to let it go on elsewhere."""
        is_decoding = self.is_handed_off and not self.verdict.done()
        return is_decoding and not self.is_leaving and now >= self.leave_from

    def let_go(self, ctx: RouterContext, request_id: str, cause: str) -> None:
        """Tells the worker from which it was to move that no later attempt needs the state."""
        abort = RouterAbort(request_id, self.number, cause, ctx.router_id)
        ctx.outlive(ctx.workers.abort(self.prefill, abort))

    def stays(self, now: float) -> None:
        """Decode could not let it go; it may later."""
        self.is_leaving, self.leave_from = False, now + LEAVE_AGAIN_SECONDS

    def settle(self, verdict: Verdict) -> None:
        """The first verdict counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    def follower_ended(self, follower: asyncio.Task[None]) -> None:
        """The follower task fails only through a bug; then nothing waits for the attempt."""
        if not follower.cancelled() and (bug := follower.exception()) is not None:
            log.error("following prefill failed attempt=%d", self.number, exc_info=bug)
            self.settle(Fatal(FerrymanError("internal error")))

    def is_settled_as(self, kinds: tuple[type, ...]) -> bool:
        over = self.verdict.done() and not self.verdict.cancelled()
        return over and isinstance(self.verdict.result(), kinds)

    @property
    def is_lost(self) -> bool:
        """Whether it ended, and the request did not."""
        return self.is_settled_as(get_args(LostAttempt))

    @property
    def was_refused_for_its_id(self) -> bool:
        """Whether a worker has a request of this id from another router, and nothing of this
        one."""
        if not self.is_settled_as((Retryable,)):
            return False
        verdict = self.verdict.result()
        return isinstance(verdict, Retryable) and isinstance(verdict.error, RequestIdInUse)

    def is_running_on(self, name: WorkerName) -> bool:
        """Whether that worker is at work on it: slots promised at decode are no work yet."""
        if self.is_handed_off:
            return name == self.decode
        return name == self.prefill and self.has_begun

    def on_worker_lost(self, name: WorkerName, cause: str) -> None:
        """A worker is gone; the attempt is lost if it needs that worker."""
        if name == self.decode or (name == self.prefill and not self.is_handed_off):
            gone = WorkerGone(f"{name.worker_id} is gone: {cause}")
            self.settle(WorkerLost(gone, name, self.is_running_on(name)))


class PrefillCall:
    """The call to an attempt's prefill worker, followed in a task of its own. Progress goes to
    `heard`; a failure before the hand-off is the attempt's verdict."""

    def __init__(
        self,
        attempt: RouterAttempt,
        order: PrefillOrder,
        ctx: RouterContext,
        heard: Callable[[PrefillProgress], None],
    ) -> None:
        self._attempt, self._ctx, self._heard = attempt, ctx, heard
        self._request_id = order.request.request_id
        self._task = asyncio.ensure_future(self._follow(order))
        self._task.add_done_callback(attempt.follower_ended)

    def leave(self, cause: str) -> None:
        """The attempt is over, or the request ends by `cause` before it is. Decode has room again,
        and a worker that may still work on the attempt gets an abort."""
        attempt, ctx = self._attempt, self._ctx
        # Cancelling a hand-off that decode has taken would only make prefill report it as
        # cancelled: its end is near, and is waited for a little.
        if attempt.is_handed_off and not attempt.is_lost and not self._task.done():
            ctx.outlive(self._farewell())
        else:
            self._task.cancel()
        ctx.fleet.release(attempt.decode, attempt.name)
        if attempt.is_move and not attempt.is_handed_off and not attempt.is_lost:
            attempt.let_go(ctx, self._request_id, cause)  # the request itself ends
        if attempt.was_refused_for_its_id:
            return  # decode may not know the other's yet, and would refuse it when it comes
        if not attempt.is_settled_as((AttemptFinished, NoCapacity, WorkerDrains)):
            if attempt.is_settled_as((AttemptStopped,)):
                cause = "stop"
            elif attempt.verdict.done() and not attempt.verdict.cancelled():
                cause = "attempt_lost"
            abort = RouterAbort(self._request_id, attempt.number, cause, ctx.router_id)
            ctx.outlive(ctx.workers.abort(attempt.decode, abort))

    async def _farewell(self) -> None:
        try:
            await asyncio.wait({self._task}, timeout=FAREWELL_SECONDS)
        finally:
            self._task.cancel()

    async def _follow(self, order: PrefillOrder) -> None:
        """Follows the call until the hand-off; a failure counts unless decode has it already."""
        attempt, fleet, workers = self._attempt, self._ctx.fleet, self._ctx.workers
        call = workers.hand_off if attempt.is_move else workers.prefill
        try:
            async for progress in call(attempt.prefill, order):
                self._heard(progress)
            error: FerrymanError = Unavailable("prefill ended without a hand-off")
        except FerrymanError as caught:
            error = caught
            if isinstance(error, Unreachable):  # before its place is given to the next one
                fleet.suspect(self._unreachable(error))
        finally:
            if attempt.decode == attempt.prefill:  # its row is taken until the last token
                fleet.computed(attempt.prefill, attempt.name, num_left=0)
            else:
                fleet.release(attempt.prefill, attempt.name)
            self._ctx.dispatcher.serve()
        if not attempt.is_handed_off:
            verdict = await self._verdict(error)
            if not attempt.is_handed_off:  # tokens may have come in the meantime
                attempt.settle(verdict)

    async def _verdict(self, error: FerrymanError) -> Verdict:
        """A death settles all attempts on the worker at once, so here it only has to be detected;
        usually the attempt is settled when this returns."""
        attempt, liveness = self._attempt, self._ctx.liveness
        match error:
            case WrongEpoch():
                liveness.lost(attempt.refused_by, "restarted")
                return self._lost(attempt.refused_by, error)
            case Unreachable():
                name = self._unreachable(error)
                is_alive = await liveness.is_alive(name)
                return CutOff(error) if is_alive else self._lost(name, error)
            case WorkerGone():
                return self._lost(attempt.prefill, error)
        return classify(error)

    def _unreachable(self, error: Unreachable) -> WorkerName:
        """Prefill, or the decode worker that prefill reports unreachable."""
        attempt = self._attempt
        return attempt.prefill if isinstance(error, CallBroken) else attempt.decode

    def _lost(self, name: WorkerName, error: FerrymanError) -> WorkerLost:
        return WorkerLost(WorkerGone(str(error)), name, self._attempt.is_running_on(name))
