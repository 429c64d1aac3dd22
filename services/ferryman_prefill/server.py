"""PrefillService: orders in, progress out. Cancelling a call ends its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from ferryman.errors import QueueFull, RequestIdInUse, Stale, Unavailable, WrongEpoch
from ferryman.grammar.compiler import BackgroundCompiler, CompiledGrammar
from ferryman.handoff.attempt_window import AttemptWindows
from ferryman.handoff.effects import WriterId
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import Cached, ChainDropped, Event, RequestFailed
from ferryman.schedule.sequence import Goal
from ferryman.wire import values
from ferryman.wire.codec.prefill import (
    prefill_order_from_wire,
    progress_to_wire,
    stop_answer_to_wire,
    stop_order_from_wire,
)
from ferryman.wire.grpc.rpc import NO_TAGS, CallTags, tags_for
from ferryman.wire.grpc.status import take_failure
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.signed_orders import SignatureCheck
from ferryman.wire.v1 import prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import PrefillOrder, StopOrder, WorkerAddress
from ferryman.worker.decode_client import DecodeClient
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.handoff_writer import HandoffDone, HandoffSource, HandoffWriter, SendingSide
from ferryman.worker.loop import hear_each
from ferryman.worker.order_check import OrderCheck
from ferryman.worker.send_leases import OutgoingUnits, SendLeases, StopOrders
from ferryman.worker.telemetry import WorkerLoad
from ferryman.worker.worker_app import WorkerContext
from ferryman_prefill.prompt_attempt import PrefillContext, PromptAttempt

SERVICE = "ferryman.wire.v1.PrefillService"


class PrefillAttempt(PromptAttempt):
    """One attempt at one prompt that another worker decodes: queued → reserved → admitted → chunks
    sent as they finish → committed.

    The prompt is computed under its own name in the schedule, while its hand-off sends what is
    ready.
    """

    def __init__(
        self,
        order: PrefillOrder,
        decode: DecodeClient,
        ctx: PrefillContext,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        super().__init__(order, ctx, grammar)
        self._decode = decode
        self._writer: HandoffWriter | None = None

    async def _run(self, lease: HostLease) -> None:
        source = HandoffSource(
            held_as=self.name,
            deadline=self._end,
            fill=partial(self._fill, lease),
            usage=lambda: self._usage,
            leave=self._leave_schedule,
            done=self._handed_off,
        )
        self._writer = HandoffWriter(self.order, self._decode, self._ctx.sending, source)
        await self._writer.run()

    def refuse(self, reservation_id: str) -> None:
        """Decode gave up the reservation, perhaps before its answer to Reserve has arrived."""
        if self._writer is not None:  # otherwise nothing was asked for yet
            self._writer.refuse(reservation_id)

    async def _fill(self, lease: HostLease, outgoing: OutgoingUnits) -> Sampled:
        """Computes the prompt; its pages are sent chunk by chunk."""
        self._ctx.engine.scheduler.submit(self._request, Goal.HAND_OFF, lease.view)
        self.is_scheduled = True
        self._ctx.wake.set()
        return await self._computed(lease, outgoing.up_to)

    def _handed_off(self, done: HandoffDone) -> None:
        seconds = round(done.seconds, 6)
        self._ctx.cache_metrics.handed_off(done.seconds)
        self._say_last("handed_off", bytes=done.num_bytes, seconds=seconds, **done.facts)
        self.progress.put_nowait(values.PrefillHandedOff(done.usage, done.num_bytes, done.seconds))


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """All attempts of one prefill worker."""

    def __init__(self, parts: WorkerContext) -> None:
        limits = parts.engine.scheduler.limits
        writer = WriterId(parts.worker_id, parts.epoch)
        self._transport = HandoffTransport(parts.planes, parts.engine.shares, writer, parts.clock)
        self._send_leases = SendLeases(parts.engine.scheduler, parts.clock)
        self._ctx = PrefillContext(
            engine=parts.engine,
            wake=parts.wake,
            host=parts.host,
            cache_metrics=parts.cache_metrics,
            lifecycle=parts.lifecycle,
            run_limit=asyncio.Semaphore(limits.concurrency.max_running),
            sending=SendingSide(
                parts.engine, parts.wake, self._send_leases, self._transport, parts.clock
            ),
            clock=parts.clock,
        )
        self._stops = StopOrders(parts.epoch, self._send_leases, self._refuse)
        self._channels = parts.channels
        self._numeric_watch = parts.numeric_watch
        self._me = WorkerAddress(parts.worker_id, "", parts.epoch)
        self._max_queued = limits.max_waiting
        self._order_check = OrderCheck(parts.engine)
        self._signature_check = SignatureCheck(parts.access, parts.worker_id, parts.epoch)
        self._windows = AttemptWindows()
        self._grammars = BackgroundCompiler(parts.engine.grammars)
        # By their names, in the order in which they came: the place in it is told as `queued`.
        self._attempts: dict[str, PromptAttempt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def register(self, server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def listens_at(self, address: str) -> None:
        """Stores the address at which decode may ask for a stop."""
        self._me = replace(self._me, address=address)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        order = prefill_order_from_wire(request)
        self._check_life(order)
        self._signature_check.check_prefill(order, self._me)
        grammar = await self._grammars.checked(
            order.request.sampling.grammar, within=order.context.deadline_seconds
        )
        attempt = self._begin(order, grammar)
        running = asyncio.create_task(attempt.run(len(self._attempts) - 1), name=attempt.name)
        # A callback, because a second cancellation would skip the `finally` below, and drain would
        # wait for ever.
        running.add_done_callback(lambda _: self._end(attempt))
        running.add_done_callback(take_failure)
        try:
            while (progress := await attempt.progress.get()) is not None:
                yield progress_to_wire(progress)
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    def _begin(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> PromptAttempt:
        attempt = self._attempt(self._checked(order), grammar)
        if known := self._attempts.get(attempt.name):
            message = f"attempt {order.context.attempt} of this request runs here already"
            is_own = known.order.router_id == order.router_id or order.context.taken_from
            raise Stale(message) if is_own else RequestIdInUse(f"{message}, for another router")
        self._begin_once(order)
        self._attempts[attempt.name] = attempt
        self._idle.clear()
        return attempt

    def _begin_once(self, order: PrefillOrder) -> None:
        serial, lifetime = order.signature.serial, order.signature.lifetime_ms / 1000
        self._windows.begin_once(order.router_id, serial, lifetime, self._ctx.clock())

    def _attempt(self, order: PrefillOrder, grammar: CompiledGrammar | None) -> PromptAttempt:
        manifest = self._ctx.engine.manifest
        decode = DecodeClient(order, self._channels, self._me, manifest, self._transport)
        return PrefillAttempt(order, decode, self._ctx, grammar)

    async def StopWriting(
        self, request: prefill_pb2.StopWritingRequest, context: Any
    ) -> prefill_pb2.StopWritingResponse:
        return stop_answer_to_wire(await self._stops.obey(stop_order_from_wire(request)))

    def _refuse(self, order: StopOrder) -> None:
        if attempt := self._attempts.get(f"{order.request_id}.{order.attempt}"):
            attempt.refuse(order.reservation_id)

    def _check_life(self, order: PrefillOrder) -> None:
        # Before the signature: that of an order to an earlier life is for that one.
        if order.worker_epoch != self._me.epoch:
            raise WrongEpoch(f"this is epoch {self._me.epoch}, not {order.worker_epoch}")

    def _checked(self, order: PrefillOrder) -> PrefillOrder:
        """Checks the order before anything is taken."""
        if self.is_draining:
            raise Unavailable("this prefill worker is draining")
        if len(self._attempts) >= self._max_queued:
            raise QueueFull(f"{len(self._attempts)} prompts are queued here")
        return self._order_check.checked_order(order)

    def _end(self, attempt: PromptAttempt) -> None:
        self._attempts.pop(attempt.name, None)
        if not self._attempts:
            self._idle.set()

    def on_events(self, events: list[Event]) -> None:
        """Called by the step loop: passes each attempt its events, and cached units to the host
        tier."""
        scheduler = self._ctx.engine.scheduler
        hear_each(scheduler, self._numeric_watch, events, self._hear, self._fail)

    def _fail(self, event: RequestFailed) -> None:
        if attempt := self._attempts.get(event.request_id):
            attempt.fail(event)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Cached):
            self._ctx.host.cached(event, _tags(self._attempts.get(event.request_id)))
        elif isinstance(event, ChainDropped):
            self._ctx.host.chain_dropped(event.first)
        else:
            self.deliver(event)

    def deliver(self, event: Event) -> None:
        """Passes an attempt its event; the host tier hears nothing."""
        if isinstance(event, RequestFailed):
            self._fail(event)
        elif attempt := self._attempts.get(event.request_id):
            attempt.inbox.put_nowait(event)

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Jobs beside the servers. Attempts have tasks and deadlines of their own."""
        return (self._send_leases.expiring(), self._transport.run())

    async def prepare_drain(self) -> None:
        """Needs nothing for it."""

    async def drain(self) -> None:
        """Refuses new orders, and waits until every attempt has ended."""
        self.is_draining = True
        await self._idle.wait()

    def prompts_outside(self) -> list[int]:
        """The lengths of the prompts that the schedule does not know yet."""
        queued = (attempt for attempt in self._attempts.values() if not attempt.is_scheduled)
        return [attempt.order.request.prompt_len for attempt in queued]

    def load(self) -> WorkerLoad:
        """The load for the heartbeat: running and waiting attempts, and their tokens."""
        statistics = self._ctx.engine.scheduler.statistics()
        in_schedule = statistics.prefilling + statistics.held + statistics.waiting
        queued = self.prompts_outside()
        return WorkerLoad(
            is_ready=not self.is_draining,
            num_running=in_schedule,
            num_queued=len(queued),
            queue_tokens=sum(queued) + statistics.tokens_to_prefill,
            node=self._ctx.host.node_id,
            planes=self._transport.planes,
            handoff_seconds=self._ctx.sending.tail_seconds.value,
        )


def _tags(attempt: PromptAttempt | None) -> CallTags:
    if attempt is None:
        return NO_TAGS
    return tags_for(attempt.order.context)
