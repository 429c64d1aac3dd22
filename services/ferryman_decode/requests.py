"""All requests of this worker, from reservation to a minute after the last token.

An ended request is kept for a while, so that a router whose stream broke can fetch missing tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ferryman.cache.resume import ResumePlan
from ferryman.cache.units import HostUnit
from ferryman.errors import (
    Cancelled,
    DeadlineExceeded,
    FerrymanError,
    NotFound,
    RequestDetached,
    RequestIdInUse,
    Stale,
    TakenOver,
)
from ferryman.handoff.attempt_window import AttemptWindows
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import (
    AuditDone,
    AuditOpened,
    AuditReady,
    Cached,
    ChainDropped,
    Drawn,
    Event,
    Finished,
    RequestFailed,
    Retracted,
    SequenceDetached,
)
from ferryman.schedule.request import FinishReason
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.values import (
    CommitOrder,
    PrefillOrder,
    RequestContext,
    RequestTokens,
    ReserveOrder,
    TokenCursor,
    Usage,
)
from ferryman.worker.auditor import Auditor
from ferryman.worker.loop import hear_each
from ferryman.worker.preempted import PreemptedRequests
from ferryman.worker.summary import tier_of
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import DecodeRequest, name_of
from ferryman_decode.departures import Departures
from ferryman_decode.token_streams import OrphanWatch, RouterStreams

LINGER_SECONDS = 60.0
PROGRESS_TOKENS = 64
TAKEN_OVER = "taken_over"  # the cause of an abort by another router than the request's


class Requests:
    """Turns events of the schedule into frames and lifecycle events."""

    def __init__(
        self, parts: WorkerContext, outlets: RouterStreams, departures: Departures
    ) -> None:
        self._parts = parts
        self._streams = outlets
        self._departures = departures
        self._preempted = PreemptedRequests(
            parts.host, parts.engine.scheduler, parts.background.start, parts.wake.set
        )
        self._auditor = Auditor(parts)
        self._windows = AttemptWindows()
        self._by_name: dict[str, DecodeRequest] = {}
        # by the request id, which all attempts share
        self._attempts: dict[str, list[DecodeRequest]] = {}
        self._deadlines: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._told: dict[str, int] = {}
        self._orphan_watch = OrphanWatch(outlets.is_open)
        self._idle, self._busy = asyncio.Event(), asyncio.Event()
        self._idle.set()

    # Requests coming in.

    def check_new(self, order: ReserveOrder | PrefillOrder) -> None:
        """Raises Stale for an attempt that is known or was here before: its Reserve comes late."""
        context, signature = order.context, order.signature
        if name_of(context.request_id, context.attempt) in self._by_name:
            raise Stale(f"attempt {context.attempt} of {context.request_id} is known here")
        lifetime = signature.lifetime_ms / 1000
        self._windows.check(order.router_id, signature.serial, lifetime, self._parts.clock())

    def check_repeated(self, order: ReserveOrder) -> None:
        """Raises PermissionDenied for the Reserve of an attempt that another one has begun."""
        self._by_name[name_of(order.context.request_id, order.context.attempt)].check_signature(
            order.signature.value
        )

    def reserved(self, request: DecodeRequest, facts: Mapping[str, Fact]) -> None:
        """The request may come. `facts` are the units wanted for it, the data plane, and the reason
        against a faster one."""
        name, signature = request.name, request.signature
        lifetime, now = signature.lifetime_ms / 1000, self._parts.clock()
        self._windows.begin(request.router_id, signature.serial, lifetime, now)
        self._by_name[name] = request
        self._attempts.setdefault(request.context.request_id, []).append(request)
        self._deadlines[name] = now + request.context.deadline_seconds
        self._idle.clear()
        self._busy.set()
        self._say(request, "reserved", **facts)

    def loaded(self, name: str, units: Sequence[HostUnit], seconds: float) -> None:
        """Units of the host tier are in the slots of a reservation."""
        self._parts.cache_metrics.loaded(units)
        request = self._by_name.get(name)
        if request is not None and not request.is_over:
            by_kind = Counter(str(unit.kind) for unit in units)
            by_tier = Counter(str(unit.origin) for unit in units)
            num_bytes = sum(unit.num_bytes for unit in units)
            facts: dict[str, Fact] = {"units": dict(by_kind), "tiers": dict(by_tier)}
            self._say(request, "loaded", bytes=num_bytes, seconds=round(seconds, 6), **facts)

    def check_commit(self, order: CommitOrder) -> None:
        """Raises, for a request that is known here, unless the commit is of the very attempt that
        its router signed: PermissionDenied, or InvalidRequest."""
        request = self._by_name.get(name_of(order.context.request_id, order.context.attempt))
        if request is not None:
            request.check_signature(order.signature)
            request.check_first(order.first.token_id)

    def committed(self, order: CommitOrder) -> None:
        """Decode has verified the hand-off: the request runs, and its first token may be sent."""
        context = order.context
        name = name_of(context.request_id, context.attempt)
        self.verified(name, order.usage, units=len(order.digests))
        scheduler = self._parts.engine.scheduler
        scheduler.adopt(order.reservation_id, order.first, self._parts.clock())
        self._parts.wake.set()

    def verified(self, name: str, usage: Usage, **facts: Fact) -> None:
        """All state of the request's prompt is here and known to be right."""
        request = self._by_name[name]
        request.committed(usage)
        self._say(request, "verified", **facts)

    def given_up(self, name: str, cause: str) -> None:
        """Ends a request whose reservation was given up, for the reason `cause`."""
        request = self._by_name.get(name)
        if request is not None and not request.is_over:
            self._end(request, cause)

    def freed(self, name: str) -> None:
        """The reservation was given up, and its slots are free."""
        self.withdrawn(name, "reservation_ended")

    def withdrawn(self, name: str, cause: str) -> None:
        """The request will not come, for the reason `cause` if no other ended it before."""
        self.given_up(name, cause)
        self._forget(name)
        self._parts.wake.set()

    # Requests ending.

    def is_of_another(self, request_id: str, router_id: str) -> bool:
        """Whether a request of that id belongs to another router than this one: the router of its
        latest attempt has it."""
        latest = self._latest(request_id)
        return latest is not None and latest.router_id != router_id

    def check_owner(self, context: RequestContext, router_id: str) -> None:
        """Raises unless a router may begin this attempt: the request is its own, or new here, or
        taken over from another router by an attempt after all that are known (if not, Stale).

        Routers do not know each other's ids. With one id for two requests the second would get the
        reservation of the first, and the first caller the answer of the second: RequestIdInUse.
        """
        latest = self._latest(context.request_id)
        if latest is None or latest.router_id == router_id:
            return
        message = f"request {context.request_id} is one of another router here"
        if not context.taken_from:
            raise RequestIdInUse(message)
        if context.attempt <= latest.context.attempt:
            raise Stale(message)

    def _latest(self, request_id: str) -> DecodeRequest | None:
        attempts = self._attempts.get(request_id, ())
        return max(attempts, key=lambda request: request.context.attempt, default=None)

    def supersede(self, context: RequestContext, router_id: str) -> None:
        """Ends attempts before this one, because their tokens are not read any more. Another router
        that reads them hears that the request was taken over."""
        for request in self._attempts.get(context.request_id, ()):
            if request.router_id != router_id and not request.is_over:
                self._taken_over(request)
        self.abort(context.request_id, context.attempt - 1, "superseded")

    def _taken_over(self, request: DecodeRequest) -> None:
        error = TakenOver(f"another router goes on with {request.context.request_id}")
        self._fail_aloud(request, error, TAKEN_OVER)
        self._streams.flush()

    def abort(self, request_id: str, attempt: int, cause: str) -> bool:
        """Ends this attempt and all before it; returns whether there was one to end."""
        found = [
            request
            for request in self._attempts.get(request_id, ())
            if request.context.attempt <= attempt and not request.is_over
        ]
        for request in found:
            if cause == TAKEN_OVER:
                self._taken_over(request)
                continue
            self._end(request, cause or "aborted")
            self._parts.engine.scheduler.cancel(request.name, self._parts.clock())
            self._close(request)
        if found:
            self._parts.wake.set()
        return bool(found)

    def detach(self, request_id: str, attempt: int, router_id: str) -> None:
        """Has a request of that router stand still, to leave this worker; for one that does so
        already this changes nothing. Raises NotFound for a request that does not decode here."""
        request = self._by_name.get(name_of(request_id, attempt))
        if request is not None and request.router_id == router_id:
            if not request.is_over:
                return self._departures.detach(request)
            if self._departures.has(request):
                return None
        raise NotFound(f"attempt {attempt} of {request_id} does not decode here")

    def _end(self, request: DecodeRequest, cause: str) -> None:
        """Ends with a failure, never a finish, so that a router that did not ask for it tries
        again."""
        request.fail(failure_of(Cancelled(f"given up by decode: {cause}")))
        self._say(request, "aborted", reason=cause)

    def expire(self, now: float) -> list[RequestContext]:
        """Ends requests after their deadline, and those whose router is gone, and returns them;
        forgets requests that ended long ago."""
        overdue = [self._by_name[name] for name, end in self._deadlines.items() if now >= end]
        for request in overdue:
            late = DeadlineExceeded("the deadline passed while decoding")
            self._fail_aloud(request, late, "deadline")
        orphans = self._orphans(now)
        for request in orphans:
            self.abort(request.context.request_id, request.context.attempt, "orphaned")
        for name in [name for name, end in self._ended.items() if now >= end]:
            self._forget(name)
        return [request.context for request in (*overdue, *orphans)]

    def _orphans(self, now: float) -> list[DecodeRequest]:
        under_way = [self._by_name[name] for name in self._deadlines]
        gone = self._orphan_watch.gone({request.router_id for request in under_way}, now)
        return [request for request in under_way if request.router_id in gone]

    def _fail_aloud(self, request: DecodeRequest, error: FerrymanError, cause: str) -> None:
        """Ends a request whose router did not ask for it, and may still read."""
        request.fail(failure_of(error))
        self._say(request, "aborted", reason=cause)
        self._parts.engine.scheduler.cancel(request.name, self._parts.clock())
        self._streams.gather(request.router_id, request.tokens_from(request.num_tokens))
        self._close(request)
        self._parts.wake.set()

    def _close(self, request: DecodeRequest) -> None:
        """Ends the request; a router can ask for its tokens again for a while."""
        self._deadlines.pop(request.name, None)
        self._ended[request.name] = self._parts.clock() + LINGER_SECONDS
        self._ring_if_idle()

    def _forget(self, name: str) -> None:
        if (request := self._by_name.pop(name, None)) is not None:
            attempts = self._attempts[request.context.request_id]
            attempts.remove(request)
            if not attempts:
                del self._attempts[request.context.request_id]
        self._deadlines.pop(name, None)
        self._ended.pop(name, None)
        self._ring_if_idle()

    def _ring_if_idle(self) -> None:
        if not self._deadlines:
            self._idle.set()
            self._busy.clear()

    @property
    def is_busy(self) -> bool:
        """Whether a request is reserved or running."""
        return self._busy.is_set()

    async def idle(self) -> None:
        """Waits until no request is reserved or running."""
        await self._idle.wait()

    async def becomes_busy(self, patience: float) -> bool:
        """Waits for a request that is not over, but no longer than `patience` seconds; whether
        there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._busy.wait()
        return self._busy.is_set()

    # Events of the schedule.

    def on_events(self, events: Iterable[Event]) -> None:
        """Called by the step loop once a step: sends each router one frame, with one entry for each
        of its requests, however many events of it the step brought."""
        scheduler, told = self._parts.engine.scheduler, self._told
        hear_each(scheduler, self._parts.numeric_watch, events, self._hear, self._fail)
        for name, num_told in told.items():
            request = self._by_name[name]
            try:
                if request.is_over:
                    self._close(request)
                if request.num_tokens > num_told or request.is_over:
                    self._streams.gather(request.router_id, request.tokens_from(num_told))
            except Exception as error:  # any error goes to the caller of the request
                scheduler.fail(name, error)
        told.clear()
        self._streams.flush()
        self._departures.retry()

    def _hear(self, event: Event) -> None:
        request = self._by_name.get(event.request_id)
        if request is not None and not request.is_over:
            self._told.setdefault(request.name, request.num_tokens)
            if isinstance(event, Drawn):
                num_drawn = request.drawn(event.sampled)
                if num_drawn == 1 or num_drawn % PROGRESS_TOKENS == 0:
                    self._note_progress(request, num_drawn)
                return
        tags = _tags(request)
        back_by = self._preempted.on_event(event, tags)
        if isinstance(event, Cached):
            self._parts.host.cached(event, tags)
        elif isinstance(event, ChainDropped):
            self._parts.host.chain_dropped(event.first)
        elif isinstance(event, AuditOpened | AuditReady | AuditDone):
            self._auditor.on_event(event)
        elif request is not None and not request.is_over:
            if back_by is not None:
                self._resumed(request, back_by)
            self._apply(request, event)

    def _fail(self, event: RequestFailed) -> None:
        """The schedule has removed the request; its router gets the error."""
        request = self._by_name.get(event.request_id)
        self._preempted.on_event(event, _tags(request))
        if request is not None and not request.is_over:
            self._told.setdefault(request.name, request.num_tokens)
            failure = failure_of(event.error)
            request.fail(failure)
            self._say(request, "aborted", reason=failure.reason)

    def _apply(self, request: DecodeRequest, event: Event) -> None:
        match event:
            case Finished(reason=FinishReason.CANCELLED):
                self._end(request, "cancelled_by_schedule")
            case Finished(reason=reason, drafts=drafts):
                request.finish(reason, drafts)
                self._say(request, "finished", reason=str(reason), tokens=request.num_tokens)
                self._parts.host.ended(request.name, _tags(request))
            case SequenceDetached():
                request.fail(failure_of(RequestDetached("it goes on at another decode worker")))
                self._say(request, "detached", tokens=request.num_tokens)
                self._departures.detached(request)
            case Retracted(num_generated=num_generated):
                self._say(request, "retracted", tokens=num_generated)

    def _resumed(self, request: DecodeRequest, plan: ResumePlan) -> None:
        """Reports the slowest tier that the resume loaded from."""
        self._parts.cache_metrics.planned(plan)
        self._say(
            request,
            "resumed",
            position=plan.position,
            prompt_len=plan.prompt_len,
            tier=tier_of(plan),
            load_bytes=plan.load_bytes,
        )

    def _note_progress(self, request: DecodeRequest, num_drawn: int) -> None:
        if num_drawn == 1:
            self._say(request, "first_token", offset=request.base)
        else:
            self._say(request, "progress", tokens=request.num_tokens)

    # Calls of other components.

    def since(self, cursors: Iterable[TokenCursor]) -> list[RequestTokens]:
        """The tokens that a router lacks after its cursors."""
        found = []
        for cursor in cursors:
            request = self._by_name.get(name_of(cursor.request_id, cursor.attempt))
            if request and (request.num_tokens > cursor.offset or request.is_over):
                found.append(request.tokens_from(cursor.offset))
        return found

    def _say(self, request: DecodeRequest, event: str, **facts: Fact) -> None:
        context = request.context
        self._parts.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )


def _tags(request: DecodeRequest | None) -> CallTags:
    return NO_TAGS if request is None else request.tags
