"""PrefillService and DecodeService of one worker, on one engine.

The decode service has all that outlives a prompt: requests, their tokens, what was retracted, and
the host tier's news of the cache. The prefill service has the attempts until their first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.handoff.lifecycle import DECODE, PREFILL
from ferryman.handoff.receiver import ReservationTable
from ferryman.schedule.events import Drawn, Event, SequenceAdmitted
from ferryman.schedule.sequence import Goal
from ferryman.wire import values
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.plane_values import LOCAL, GrpcOnly
from ferryman.wire.values import PrefillOrder, Usage
from ferryman.worker.summary import prompt_usage
from ferryman.worker.telemetry import WorkerLoad
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import DecodeRequest, name_of
from ferryman_decode.requests import Requests
from ferryman_decode.server import SERVICE as DECODE_SERVICE
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.prompt_attempt import PrefillContext, PromptAttempt
from ferryman_prefill.server import SERVICE as PREFILL_SERVICE
from ferryman_prefill.server import PrefillServicer

SERVICES = (PREFILL_SERVICE, DECODE_SERVICE)
NO_NIXL = GrpcOnly("this worker decodes what it prefills")


class LocalHandoffs:
    """Decode's half of the hand-offs within this worker: requests until their first token, on the
    slots of their prompts.

    Nothing is reserved, sent or verified by digests. A request holds its slots, under its own
    lease, from admission to its last token; only its phase changes, with the step that draws the
    first token. To routers and in the lifecycle log the hand-off looks like any other: reserved,
    verified, and then tokens. Late and repeated attempts are refused as at Reserve.
    """

    def __init__(self, parts: WorkerContext, requests: Requests, table: ReservationTable) -> None:
        self._parts = parts
        self._requests = requests
        self._table = table
        self._usage: dict[str, Usage] = {}

    def begin(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> None:
        """Takes a request before its prompt is scheduled. An earlier attempt ends: its tokens are
        not read any more. Raises Stale for an attempt that was ended, or is known already."""
        context = order.context
        self._requests.check_owner(context, order.router_id)
        self._table.check_new(context.request_id, context.attempt, self._parts.clock())
        self._requests.check_new(order)
        self._requests.supersede(context, order.router_id)
        self._usage[name_of(context.request_id, context.attempt)] = Usage(order.request.prompt_len)
        self._requests.reserved(DecodeRequest(order, grammar), {"path": LOCAL})

    def is_pending(self, name: str) -> bool:
        """Whether the request has no first token yet, so that its attempt must end it."""
        return name in self._usage

    def give_up(self, name: str, cause: str) -> None:
        """The prompt will not be computed."""
        if self._usage.pop(name, None) is not None:
            self._requests.withdrawn(name, cause)

    def on_event(self, event: Event) -> None:
        """Takes each event before the requests do: a request may end in the step that draws its
        first token, and then tells how much of its prompt was reused."""
        name = event.request_id
        if name not in self._usage:
            return
        match event:
            case SequenceAdmitted(plan=plan):
                # The last plan counts: a corrupt load causes a new one.
                self._usage[name] = prompt_usage(self._parts.engine.manifest, plan)
            case Drawn():
                self._requests.verified(name, self._usage.pop(name), units=0)


class LocalAttempt(PromptAttempt):
    """Its request decodes where its prompt is computed, on the very slots that hold it.

    It ends with the first token; from then on the request is decode's alone.
    """

    def __init__(
        self,
        order: PrefillOrder,
        local: LocalHandoffs,
        ctx: PrefillContext,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        super().__init__(order, ctx, grammar)
        self._local = local

    def refuse(self, reservation_id: str) -> None:
        """There is no reservation."""

    async def _run(self, lease: HostLease) -> None:
        began = self._ctx.clock()
        self._local.begin(self.order, self.grammar)
        try:
            self._ctx.engine.scheduler.submit(self._request, Goal.DECODE, lease.view)
            self.is_scheduled = True
            self._ctx.wake.set()
            await self._computed(lease, up_to=_stays_here)
        except BaseException as error:
            if self._local.is_pending(self.name):
                is_cancelled = isinstance(error, asyncio.CancelledError)
                self._local.give_up(self.name, "cancelled" if is_cancelled else "prefill_failed")
                self._leave_schedule()
            else:  # its first token came before this task could say so
                self._handed_off(began)
            raise
        self._handed_off(began)

    def _handed_off(self, began: float) -> None:
        seconds = self._ctx.clock() - began
        self._say_last("handed_off", bytes=0, seconds=round(seconds, 6), path=LOCAL)
        self.progress.put_nowait(values.PrefillHandedOff(self._usage, 0, seconds))


def _stays_here(_position: int) -> None:
    """No unit travels."""


class LocalPrefillServicer(PrefillServicer):
    """Prompts whose requests decode here."""

    def __init__(self, parts: WorkerContext, local: LocalHandoffs) -> None:
        super().__init__(parts)
        self._local = local

    def _attempt(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> PromptAttempt:
        decode = order.decode
        if (decode.worker_id, decode.epoch) != (self._me.worker_id, self._me.epoch):
            raise InvalidRequest(
                f"this worker decodes what it prefills; {decode.worker_id} cannot", "decode"
            )
        return LocalAttempt(order, self._local, self._ctx, grammar)


class BothServicer:
    """One worker that prefills and decodes. All of it runs on the event loop, so it needs no
    locks."""

    def __init__(self, parts: WorkerContext) -> None:
        self._parts = parts
        self._lifecycles = {role: parts.lifecycle.as_role(role) for role in (PREFILL, DECODE)}
        for_decode = self._parts_of(DECODE)
        self._decode = decode = DecodeServicer(for_decode)
        self._local = LocalHandoffs(for_decode, decode.requests, decode.receiver.table)
        self._prefill = LocalPrefillServicer(self._parts_of(PREFILL), self._local)

    def _parts_of(self, role: str) -> WorkerContext:
        """The same parts; the lifecycle log hears of two publishers, as of any hand-off."""
        return replace(self._parts, lifecycle=self._lifecycles[role], planes=NO_NIXL)

    def register(self, server: Any) -> None:
        self._prefill.register(server)
        self._decode.register(server)

    def listens_at(self, address: str) -> None:
        self._prefill.listens_at(address)
        self._decode.listens_at(address)

    def on_events(self, events: list[Event]) -> None:
        """Called by the step loop. An event may concern an attempt and its request."""
        for event in events:
            self._local.on_event(event)
            self._prefill.deliver(event)
        self._decode.on_events(events)

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return (*self._prefill.jobs(), *self._decode.jobs())

    async def prepare_drain(self) -> None:
        """Needs nothing for it: its requests leave by gRPC."""

    async def drain(self) -> None:
        """Refuses new prompts, and waits until the last request has ended and is read."""
        await self._prefill.drain()
        await self._decode.drain()
        for lifecycle in self._lifecycles.values():
            lifecycle.flush_gaps()

    def load(self) -> WorkerLoad:
        """The load for the heartbeat: each request counts once, wherever it is."""
        statistics = self._parts.engine.scheduler.statistics()
        outside = self._prefill.prompts_outside()
        return WorkerLoad(
            is_ready=not self._prefill.is_draining,
            num_running=statistics.prefilling + statistics.decoding,
            num_queued=statistics.waiting + statistics.reserved + len(outside),
            queue_tokens=statistics.tokens_to_prefill + sum(outside),
            node=self._parts.host.node_id,
            planes=(LOCAL,),
        )
