"""All requests of this worker, from reservation to a minute after the last token.

An ended request is kept for a while, so that a router whose stream broke can ask for what it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from ferryman.cache.resume import ResumePlan
from ferryman.errors import DeadlineExceeded
from ferryman.handoff.values import Reservation
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import Cached, Drawn, Event, Finished, Retracted
from ferryman.schedule.request import FinishReason
from ferryman.wire.rpc import NO_TAGS, CallTags, tags_for
from ferryman.wire.status import failure_of
from ferryman.wire.values import CommitOrder, RequestContext, RequestTokens, TokenCursor
from ferryman.worker.shell import Parts
from ferryman.worker.summary import tier_of
from ferryman_decode.comebacks import Comebacks
from ferryman_decode.outlets import Outlets
from ferryman_decode.running import RunningRequest, name_of

LINGER_SECONDS = 60.0
PROGRESS_TOKENS = 64


class Requests:
    """Turns what the schedule reports into frames and lifecycle events."""

    def __init__(self, parts: Parts, outlets: Outlets) -> None:
        self._parts = parts
        self._outlets = outlets
        self._comebacks = Comebacks(parts)
        self._by_name: dict[str, RunningRequest] = {}
        self._deadlines: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # A request's way in.

    def reserved(
        self, request: RunningRequest, reservation: Reservation, chosen: Mapping[str, Fact]
    ) -> None:
        """`chosen` is the data plane, and why not a faster one."""
        name = request.name
        self._by_name[name] = request
        self._deadlines[name] = self._parts.clock() + request.context.deadline_seconds
        self._idle.clear()
        facts: dict[str, Fact] = {
            f"wanted_{span.kind}": [span.first, span.end] for span in reservation.ranges
        }
        self._say(request, "reserved", **facts, **chosen)

    def committed(self, order: CommitOrder) -> None:
        """Verified: it runs from its first token on, which may now be seen."""
        context = order.context
        request = self._by_name[name_of(context.request_id, context.attempt)]
        request.committed(order.usage)
        self._say(request, "verified", units=len(order.digests))
        scheduler = self._parts.engine.scheduler
        scheduler.adopt(order.reservation_id, order.first, self._parts.clock())
        self._parts.bell.set()

    def freed(self, name: str) -> None:
        """Its reservation came to nothing."""
        request = self._by_name.get(name)
        if request is not None and not request.is_over:
            request.finish(FinishReason.CANCELLED)
            self._say(request, "aborted", reason="reservation_ended")
        self._forget(name)
        self._parts.bell.set()

    # Its way out.

    def abort(self, request_id: str, attempt: int, cause: str) -> bool:
        """Ends this attempt and all before it; whether there was anything to end."""
        found = [
            request
            for request in self._by_name.values()
            if request.context.request_id == request_id
            and request.context.attempt <= attempt
            and not request.is_over
        ]
        for request in found:
            request.finish(FinishReason.CANCELLED)
            self._say(request, "aborted", reason=cause or "aborted")
            self._parts.engine.scheduler.cancel(request.name, self._parts.clock())
            self._close(request)
        if found:
            self._parts.bell.set()
        return bool(found)

    def expire(self, now: float) -> list[RequestContext]:
        """Ends and names what has outlived its deadline; forgets what ended long ago."""
        overdue = [self._by_name[name] for name, end in self._deadlines.items() if now >= end]
        for request in overdue:
            self._overdue(request)
        for name in [name for name, end in self._ended.items() if now >= end]:
            del self._ended[name], self._by_name[name]
        return [request.context for request in overdue]

    def _overdue(self, request: RunningRequest) -> None:
        request.fail(failure_of(DeadlineExceeded("the deadline passed while decoding")))
        self._say(request, "aborted", reason="deadline")
        self._parts.engine.scheduler.cancel(request.name, self._parts.clock())
        self._outlets.gather(request.router_id, request.tokens_from(request.num_tokens))
        self._close(request)
        self._parts.bell.set()

    def _close(self, request: RunningRequest) -> None:
        """No more of it; what was said can be asked for again for a while."""
        self._deadlines.pop(request.name, None)
        self._ended[request.name] = self._parts.clock() + LINGER_SECONDS
        self._ring_if_idle()

    def _forget(self, name: str) -> None:
        self._by_name.pop(name, None)
        self._deadlines.pop(name, None)
        self._ended.pop(name, None)
        self._ring_if_idle()

    def _ring_if_idle(self) -> None:
        if not self._deadlines:
            self._idle.set()

    async def idle(self) -> None:
        """Waits until no request is reserved or running."""
        await self._idle.wait()

    # What the schedule reports.

    def on_events(self, events: Iterable[Event]) -> None:
        """One entry per request and step, however much of it the step brought."""
        changed: dict[str, int] = {}
        for event in events:
            request = self._by_name.get(event.request_id)
            tags = _tags(request)
            back_by = self._comebacks.heard(event, tags)
            if isinstance(event, Cached):
                self._parts.host.cached(event, tags)
            elif request is not None and not request.is_over:
                before = request.num_tokens
                if back_by is not None:
                    self._resumed(request, back_by)
                self._apply(request, event)
                if request.num_tokens > before or request.is_over:
                    changed.setdefault(request.name, before)
        for name, before in changed.items():
            request = self._by_name[name]
            self._outlets.gather(request.router_id, request.tokens_from(before))
            if request.is_over:
                self._close(request)

    def _apply(self, request: RunningRequest, event: Event) -> None:
        match event:
            case Drawn(sampled=sampled):
                request.drawn(sampled)
                self._note_progress(request)
            case Finished(reason=reason, drafts=drafts):
                request.finish(reason, drafts)
                name = "aborted" if reason is FinishReason.CANCELLED else "finished"
                self._say(request, name, reason=str(reason), tokens=request.num_tokens)
                if reason is not FinishReason.CANCELLED:
                    self._parts.host.ended(request.name, _tags(request))
            case Retracted(num_generated=num_generated):
                self._say(request, "retracted", tokens=num_generated)

    def _resumed(self, request: RunningRequest, plan: ResumePlan) -> None:
        """From the slowest tier that something came from."""
        self._parts.reuse.planned(plan)
        self._say(
            request,
            "resumed",
            position=plan.position,
            prompt_len=plan.prompt_len,
            tier=tier_of(plan),
            load_bytes=plan.load_bytes,
        )

    def _note_progress(self, request: RunningRequest) -> None:
        drawn = request.num_tokens - request.base
        if drawn == 1:
            self._say(request, "first_token", offset=request.base)
        elif drawn % PROGRESS_TOKENS == 0:
            self._say(request, "progress", tokens=request.num_tokens)

    # What others ask.

    def since(self, cursors: Iterable[TokenCursor]) -> list[RequestTokens]:
        """What a router lacks, by its own account."""
        found = []
        for cursor in cursors:
            request = self._by_name.get(name_of(cursor.request_id, cursor.attempt))
            if request and (request.num_tokens > cursor.offset or request.is_over):
                found.append(request.tokens_from(cursor.offset))
        return found

    def num_tokens(self, name: str) -> int:
        request = self._by_name.get(name)
        return request.num_tokens if request else 0

    def _say(self, request: RunningRequest, event: str, **facts: Fact) -> None:
        context = request.context
        self._parts.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )


def _tags(request: RunningRequest | None) -> CallTags:
    if request is None:
        return NO_TAGS
    return tags_for(request.context)
