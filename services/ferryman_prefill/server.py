"""PrefillService: orders in, progress out. Cancelling a call ends its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from ferryman.errors import (
    InvalidRequest,
    ManifestMismatch,
    QueueFull,
    Stale,
    Unavailable,
    WrongEpoch,
)
from ferryman.handoff.effects import Writer
from ferryman.schedule.events import Cached, Event
from ferryman.wire.codec.prefill import prefill_order_from_wire, progress_to_wire
from ferryman.wire.rpc import NO_TAGS, CallTags, tags_for
from ferryman.wire.v1 import prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import PrefillOrder, WorkerAddress
from ferryman.worker.shell import Parts
from ferryman.worker.telemetry import Load
from ferryman_prefill.attempt import Attempt, Over, Surroundings
from ferryman_prefill.decode_side import DecodeSide
from ferryman_prefill.holding import Holding
from ferryman_prefill.writing import writing_of

SERVICE = "ferryman.wire.v1.PrefillService"
# How long a decode worker that asks for a stop is kept waiting for it; then it asks again.
STOP_SECONDS = 1.0


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """All attempts of one prefill worker."""

    def __init__(self, parts: Parts) -> None:
        limits = parts.engine.scheduler.limits
        self._around = Surroundings(
            engine=parts.engine,
            bell=parts.bell,
            host=parts.host,
            reuse=parts.reuse,
            lifecycle=parts.lifecycle,
            turnstile=asyncio.Semaphore(limits.concurrency.max_running),
            holding=Holding(parts.engine.scheduler, parts.clock),
            clock=parts.clock,
        )
        self._channels = parts.channels
        self._me = WorkerAddress(parts.worker_id, "", parts.epoch)
        self._writing = writing_of(parts.planes, Writer(parts.worker_id, parts.epoch), parts.clock)
        self._max_queued = limits.max_waiting
        self._attempts: dict[str, Attempt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def register(self, server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def listens_at(self, address: str) -> None:
        """Where decode may ask for a stop."""
        self._me = replace(self._me, address=address)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        attempt = self._begin(prefill_order_from_wire(request))
        running = asyncio.create_task(attempt.run(len(self._attempts) - 1), name=attempt.name)
        # Not in the `finally` below: a second cancellation would skip it, and drain wait for ever.
        running.add_done_callback(lambda _: self._end(attempt))
        try:
            while not isinstance(progress := await attempt.progress.get(), Over):
                yield progress_to_wire(progress)
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    def _begin(self, order: PrefillOrder) -> Attempt:
        self._check(order)
        manifest = self._around.engine.manifest
        decode = DecodeSide(order, self._channels, self._me, manifest, self._writing)
        attempt = Attempt(order, decode, self._around)
        if attempt.name in self._attempts:
            raise Stale(f"attempt {order.context.attempt} of this request runs here already")
        self._attempts[attempt.name] = attempt
        self._idle.clear()
        return attempt

    async def StopWriting(
        self, request: prefill_pb2.StopWritingRequest, context: Any
    ) -> prefill_pb2.StopWritingResponse:
        if request.worker_epoch != self._me.epoch:
            raise WrongEpoch(f"this is epoch {self._me.epoch}, not {request.worker_epoch}")
        # Before its answer to Reserve has come, an attempt does not know the reservation's name.
        if attempt := self._attempts.get(f"{request.request_id}.{request.attempt}"):
            attempt.refuse(request.reservation_id)
        word = await self._around.holding.word_on(request.reservation_id, STOP_SECONDS)
        return prefill_pb2.StopWritingResponse(
            is_stopped=word.is_stopped, has_failed_writes=word.has_failed_writes
        )

    def _check(self, order: PrefillOrder) -> None:
        """At the door, before anything is taken."""
        if order.worker_epoch != self._me.epoch:
            raise WrongEpoch(f"this is epoch {self._me.epoch}, not {order.worker_epoch}")
        if self.is_draining:
            raise Unavailable("this prefill worker is draining")
        if len(self._attempts) >= self._max_queued:
            raise QueueFull(f"{len(self._attempts)} prompts are queued here")
        digest = self._around.engine.manifest.digest
        if order.manifest_digest != digest:
            raise ManifestMismatch((f"digest: {digest} here, {order.manifest_digest} there",))
        self._around.engine.scheduler.check(order.request)
        largest = int(order.request.token_ids.max())
        if largest >= self._around.engine.vocab_size:
            raise InvalidRequest(f"token id {largest} is beyond the vocabulary", "prompt")

    def _end(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.name, None)
        if not self._attempts:
            self._idle.set()

    def on_events(self, events: list[Event]) -> None:
        """From the step loop: each attempt hears what is its own; the host tier what is cached."""
        for event in events:
            attempt = self._attempts.get(event.request_id)
            if isinstance(event, Cached):
                self._around.host.cached(event, _tags(attempt))
            elif attempt is not None:
                attempt.inbox.put_nowait(event)

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Attempts have tasks and deadlines of their own."""
        return (self._around.holding.expiring(), self._writing.run())

    async def drain(self) -> None:
        """Takes no further order, and waits until every attempt has ended."""
        self.is_draining = True
        await self._idle.wait()

    def load(self) -> Load:
        """For the beat: what runs, what waits, and how many tokens that is."""
        statistics = self._around.engine.scheduler.statistics()
        in_schedule = statistics.prefilling + statistics.held + statistics.waiting
        queued = [a for a in self._attempts.values() if not a.is_scheduled]
        tokens = sum(attempt.order.request.prompt_len for attempt in queued)
        return Load(
            is_ready=not self.is_draining,
            num_running=in_schedule,
            num_queued=len(queued),
            queue_tokens=tokens + statistics.tokens_to_prefill,
            node=self._around.host.node_id,
            planes=self._writing.planes,
        )


def _tags(attempt: Attempt | None) -> CallTags:
    if attempt is None:
        return NO_TAGS
    return tags_for(attempt.order.context)
