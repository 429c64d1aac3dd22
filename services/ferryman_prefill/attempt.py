"""One attempt at one prompt: queued → reserved → admitted → chunks sent as they finish → committed.

The recurrent state goes last, then the commit with the first token. Every end of the attempt, also
an error, gives back its slots, its host lease and its reservation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from ferryman.cache.resume import ResumePlan
from ferryman.engine.engine import Engine
from ferryman.errors import Cancelled, DeadlineExceeded, FerrymanError, LeaseLost
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.handoff.holder import Hold
from ferryman.handoff.offer import UnitsToSend, offered_ranges
from ferryman.handoff.values import Reservation, ranges_of
from ferryman.runtime.lifecycle import Fact, LifecyclePublisher
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import (
    ChunkDone,
    Event,
    Finished,
    LoadCorrupt,
    LoadsDone,
    PromptScored,
    RequestFailed,
    SequenceAdmitted,
    SequenceHeld,
)
from ferryman.schedule.sequence import Goal
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire import values
from ferryman.wire.grpc.rpc import tags_for
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import CommitOrder, PrefillOrder, PrefillProgress, Usage
from ferryman.worker.cache_metrics import CacheMetrics
from ferryman.worker.host import HostTier
from ferryman.worker.summary import plan_facts, prefetch_facts, prompt_usage
from ferryman_prefill.decode_client import DecodeClient
from ferryman_prefill.handoff_transport import HandoffTransport
from ferryman_prefill.send_leases import OutgoingUnits, SendLeases

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True)
class PrefillContext:
    """The parts that all attempts of this worker share. `run_limit` bounds the running attempts."""

    engine: Engine
    wake: asyncio.Event
    host: HostTier
    cache_metrics: CacheMetrics
    lifecycle: LifecyclePublisher
    run_limit: asyncio.Semaphore
    send_leases: SendLeases
    transport: HandoffTransport
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Committing:
    """Every unit was sent, and a Commit is on its way: from here on decode may have committed."""

    order: CommitOrder
    sent: Sent
    began: float


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """The attempt makes no further progress; its own result says why."""


class PrefillAttempt:
    """Runs in a task of its own; `progress` has messages for its caller, `inbox` events for it.

    It holds the grammar of its request, so that the engine finds it compiled.
    """

    def __init__(
        self,
        order: PrefillOrder,
        decode: DecodeClient,
        ctx: PrefillContext,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.order = order
        self.grammar = grammar
        self.name = f"{order.context.request_id}.{order.context.attempt}"
        self.progress: asyncio.Queue[PrefillProgress | AttemptOver] = asyncio.Queue()
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._decode = decode
        self._ctx = ctx
        self._usage = Usage(prompt_tokens=order.request.prompt_len)
        self._num_chunks = 0
        self._num_superfluous = 0
        self._tags = tags_for(order.context)
        self._refused: set[str] = set()
        self._end = ctx.clock() + order.context.deadline_seconds
        self.is_scheduled = False
        self._is_leased = False
        self._committing: _Committing | None = None
        self._is_told = False

    def fail(self, event: RequestFailed) -> None:
        """The schedule has removed the request. Older events in the inbox name slots that are
        gone."""
        while not self.inbox.empty():
            self.inbox.get_nowait()
        self.inbox.put_nowait(event)

    async def run(self, position: int) -> None:
        """Runs from the queue to the hand-off, within the deadline. Raises the error that ended
        it."""
        self._say("queued", position=position)
        self.progress.put_nowait(values.PrefillQueued())
        try:
            async with asyncio.timeout(self.order.context.deadline_seconds):
                await self._run()
        except asyncio.CancelledError:
            self._say_last("cancelled")
            raise
        except TimeoutError as error:
            self._say_last("failed", reason="DeadlineExceeded")
            raise DeadlineExceeded("the deadline passed during prefill") from error
        except Exception as error:
            self._say_last("failed", reason=failure_of(error).reason)
            raise
        finally:
            self.progress.put_nowait(AttemptOver())

    async def _run(self) -> None:
        async with self._ctx.run_limit, self._leased() as lease:
            began = self._ctx.clock()
            async with self._reserved() as reservation:
                first, sent = await self._hand_off(reservation, lease)
                order = self._commit_order(reservation, first, sent)
                self._committing = _Committing(order, sent, began)
                await self._decode.commit(order)
                self._handed_off(self._committing)

    def _handed_off(self, done: _Committing) -> None:
        """Decode has the request. Called too if its answer to Commit was lost and it confirms it
        later."""
        order, sent = done.order, done.sent
        seconds = self._ctx.clock() - done.began
        facts: dict[str, Fact] = {"path": sent.path, "superfluous": self._num_superfluous}
        if self._decode.why_grpc:
            facts["why"] = self._decode.why_grpc
        self._say_last("handed_off", bytes=sent.num_bytes, seconds=round(seconds, 6), **facts)
        self.progress.put_nowait(values.PrefillHandedOff(order.usage, sent.num_bytes, seconds))

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[HostLease]:
        brought = await self._prefetched()
        lease = await self._ctx.host.lease_for(self.order.request, self._tags, brought)
        self._is_leased = True
        try:
            yield lease
        finally:
            self._release(lease)

    async def _prefetched(self) -> Prefetched:
        """Has slower tiers bring units into the host tier, if enough could be gained."""
        host, request = self._ctx.host, self.order.request
        if not host.wants_prefetch(request):
            return NOTHING_BROUGHT
        self._say("prefetching", prompt_len=request.prompt_len)
        seconds_left = self._end - self._ctx.clock()
        brought = await host.prefetch(request, self._tags, seconds_left=seconds_left)
        page_size = self._ctx.engine.manifest.page_size
        self._say("prefetched", **prefetch_facts(brought, page_size))
        self._ctx.cache_metrics.prefetched(brought)
        return brought

    def _release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Releases the lease once: as soon as the loads are done, or when the attempt ends without
        any."""
        if self._is_leased:
            self._is_leased = False
            self._ctx.host.release(lease, was_corrupt=was_corrupt)

    @asynccontextmanager
    async def _reserved(self) -> AsyncIterator[Reservation]:
        """Reserves slots at decode and here. On any error decode is told that the writes have
        ended."""
        offer = await self._ctx.transport.offer_to(self.order.decode.worker_id)
        answer = await self._decode.reserve(offer, self._end - self._ctx.clock())
        reservation, send_leases = answer.reservation, self._ctx.send_leases
        self._begin(reservation)
        try:
            yield reservation
        except BaseException as error:
            self._leave_schedule()
            cause = "cancelled" if isinstance(error, asyncio.CancelledError) else "prefill_failed"
            await send_leases.leave(self._abort_reservation(reservation, cause))
            if self._is_told and isinstance(error, FerrymanError):
                return  # it was committed, so the error of the call is no failure
            raise
        self._leave_schedule()
        send_leases.answered(reservation.reservation_id, reservation.epoch)
        self._ctx.wake.set()

    def _begin(self, reservation: Reservation) -> None:
        """Raises LeaseLost when decode gave up the reservation before its answer came."""
        if reservation.reservation_id in self._refused:
            raise LeaseLost("decode gave up the reservation before it was known here")
        context = self.order.context
        hold = Hold(
            context.request_id,
            context.attempt,
            reservation.reservation_id,
            reservation.epoch,
            reservation.lease_seconds,
        )
        self._ctx.send_leases.begin(hold)

    def refuse(self, reservation_id: str) -> None:
        """Decode gave up the reservation, perhaps before its answer to Reserve has arrived."""
        self._refused.add(reservation_id)

    async def _abort_reservation(self, reservation: Reservation, cause: str) -> None:
        """Waits until no send is running, however long that takes, then tells decode.

        If decode has committed, the request is handed off and belongs to decode.
        """
        word = await self._ctx.send_leases.released(reservation.reservation_id)
        self._ctx.wake.set()
        with suppress(FerrymanError):
            is_committed = await self._decode.abort(reservation, cause, word)
            if is_committed and self._committing is not None:
                self._handed_off(self._committing)

    def _leave_schedule(self) -> None:
        """Frees everything held here, except slots that are being sent."""
        self._ctx.engine.scheduler.cancel(self.name, self._ctx.clock())
        self._ctx.wake.set()

    async def _hand_off(self, reservation: Reservation, lease: HostLease) -> tuple[Sampled, Sent]:
        """Computes and sends side by side; ends when decode has every unit."""
        request = replace(self.order.request, request_id=self.name)
        manifest = self._ctx.engine.manifest
        offered = offered_ranges(manifest, request.prompt_len)
        units = UnitsToSend(reservation, offered, manifest.page_size)
        self._num_superfluous = units.num_superfluous
        send_leases, reservation_id = self._ctx.send_leases, reservation.reservation_id
        outgoing = OutgoingUnits(self._ctx.engine, send_leases, self.name, reservation_id, units)
        self._ctx.engine.scheduler.submit(request, Goal.HAND_OFF, lease.view)
        self.is_scheduled = True
        self._ctx.wake.set()
        async with asyncio.TaskGroup() as group:
            writing = self._decode.write(reservation, outgoing.batches())
            sending = group.create_task(send_leases.send(reservation_id, writing))
            renewing = group.create_task(self._renew(reservation))
            first = await self._computed(outgoing, lease)
            sent = await sending
            renewing.cancel()
        return first, sent

    async def _renew(self, reservation: Reservation) -> None:
        while True:
            await asyncio.sleep(reservation.lease_seconds / RENEWALS_PER_LEASE)
            await self._decode.renew(reservation)
            self._ctx.send_leases.renew(reservation.reservation_id)

    async def _computed(self, outgoing: OutgoingUnits, lease: HostLease) -> Sampled:
        """Follows the schedule's events until the prompt is held; returns the first token."""
        page_size = self._ctx.engine.manifest.page_size
        plan: ResumePlan | None = None
        while True:
            match await self.inbox.get():
                case SequenceAdmitted(plan=plan):
                    self._admitted(plan)
                    outgoing.up_to(plan.anchor_pages * page_size)
                case ChunkDone() as chunk:
                    self._chunk(chunk)
                    outgoing.up_to(chunk.end)
                case PromptScored(scores=scores):
                    for piece in scores.pieces():
                        self.progress.put_nowait(piece)
                case LoadsDone():
                    self._release(lease)
                case LoadCorrupt():
                    self._release(lease, was_corrupt=True)
                case SequenceHeld(first=first):
                    assert plan is not None, "what is held has been admitted"
                    # The last plan counts: a corrupt load causes a new plan.
                    self._ctx.cache_metrics.planned(plan)
                    outgoing.finish()
                    return first
                case RequestFailed(error=error):
                    raise error
                case Finished():
                    raise Cancelled("the prompt was given up by this worker")

    def _admitted(self, plan: ResumePlan) -> None:
        manifest = self._ctx.engine.manifest
        request = replace(self.order.request, request_id=self.name)
        self._ctx.host.planned(request, plan, self._tags)
        self._usage = prompt_usage(manifest, plan)
        self._say("admitted", **plan_facts(manifest, plan))
        self.progress.put_nowait(values.PrefillAdmitted(self._usage))

    def _chunk(self, chunk: ChunkDone) -> None:
        self._num_chunks += 1
        step_tokens = self._ctx.engine.scheduler.limits.chunk_tokens
        left = -(-(chunk.prompt_len - chunk.end) // step_tokens)
        index, count = self._num_chunks, self._num_chunks + left
        self._say("chunk", index=index, count=count, start=chunk.start, end=chunk.end)
        self.progress.put_nowait(values.PrefillChunkDone(chunk.end))

    def _commit_order(self, reservation: Reservation, first: Sampled, sent: Sent) -> CommitOrder:
        return CommitOrder(
            context=self.order.context,
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            written=ranges_of(digest.name for digest in sent.digests),
            digests=sent.digests,
            first=first,
            usage=self._usage,
        )

    def _say_last(self, event: str, **facts: Fact) -> None:
        """Reports only the first end of an attempt."""
        if not self._is_told:
            self._is_told = True
            self._say(event, **facts)

    def _say(self, event: str, **facts: Fact) -> None:
        context = self.order.context
        self._ctx.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )
