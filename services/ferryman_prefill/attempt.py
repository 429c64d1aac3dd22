"""One attempt at one prompt: queued → reserved → admitted → chunks sent as they finish → committed.

The recurrent state goes last, then the commit with the first token. Whatever ends the attempt, its
slots, its host lease and its reservation are given back on the way out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from ferryman.cache.resume import ResumePlan
from ferryman.engine.assembly import Engine
from ferryman.errors import Cancelled, DeadlineExceeded, FerrymanError, LeaseLost
from ferryman.handoff.holder import Hold
from ferryman.handoff.offer import offered_ranges
from ferryman.handoff.values import Reservation, WantedUnit, ranges_of
from ferryman.runtime.lifecycle import Fact, LifecyclePublisher
from ferryman.schedule.batch import Sampled
from ferryman.schedule.events import (
    Admitted,
    ChunkDone,
    Event,
    Finished,
    Held,
    LoadCorrupt,
    LoadsDone,
)
from ferryman.schedule.sequence import Goal
from ferryman.tiers.prefetch_values import NOTHING_BROUGHT, Prefetched
from ferryman.wire import values
from ferryman.wire.data_plane import OutgoingUnit, Sent
from ferryman.wire.host_client import HostLease
from ferryman.wire.rpc import tags_for
from ferryman.wire.status import failure_of
from ferryman.wire.values import CommitOrder, PrefillOrder, PrefillProgress, Usage
from ferryman.worker.host import HostTierClient
from ferryman.worker.reuse import Reuse
from ferryman.worker.summary import plan_facts, plan_summary, prefetch_facts, prompt_usage
from ferryman_prefill.decode_side import DecodeSide
from ferryman_prefill.holding import Holding
from ferryman_prefill.outgoing import Outgoing

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every attempt on this worker shares. `turnstile` lets the next in line through."""

    engine: Engine
    bell: asyncio.Event
    host: HostTierClient
    reuse: Reuse
    lifecycle: LifecyclePublisher
    turnstile: asyncio.Semaphore
    holding: Holding
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Over:
    """No further progress; the attempt's own result says why."""


class Attempt:
    """Runs in a task of its own; `progress` is what its caller is told, `inbox` what it hears."""

    def __init__(self, order: PrefillOrder, decode: DecodeSide, around: Surroundings) -> None:
        self.order = order
        self.name = f"{order.context.request_id}.{order.context.attempt}"
        self.progress: asyncio.Queue[PrefillProgress | Over] = asyncio.Queue()
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._decode = decode
        self._around = around
        self._usage = Usage(prompt_tokens=order.request.prompt_len)
        self._num_chunks = 0
        self._num_superfluous = 0
        self._tags = tags_for(order.context)
        self._refused: set[str] = set()
        self._end = around.clock() + order.context.deadline_seconds
        self.is_scheduled = False
        self._is_leased = False

    async def run(self, position: int) -> None:
        """From the queue to the hand-off, within the deadline. Raises what ended it."""
        self._say("queued", position=position)
        self.progress.put_nowait(values.Queued(position))
        try:
            async with asyncio.timeout(self.order.context.deadline_seconds):
                await self._run()
        except asyncio.CancelledError:
            self._say("cancelled")
            raise
        except TimeoutError as error:
            self._say("failed", reason="DeadlineExceeded")
            raise DeadlineExceeded("the deadline passed during prefill") from error
        except Exception as error:
            self._say("failed", reason=failure_of(error).reason)
            raise
        finally:
            self.progress.put_nowait(Over())

    async def _run(self) -> None:
        async with self._around.turnstile, self._leased() as lease:
            began = self._around.clock()
            async with self._reserved() as reservation:
                first, sent = await self._hand_off(reservation, lease)
                await self._decode.commit(self._commit_order(reservation, first, sent))
            seconds = self._around.clock() - began
        facts: dict[str, Fact] = {"path": sent.path, "superfluous": self._num_superfluous}
        if self._decode.why_grpc:
            facts["why"] = self._decode.why_grpc
        self._say("handed_off", bytes=sent.num_bytes, seconds=round(seconds, 6), **facts)
        self.progress.put_nowait(
            values.HandedOff(
                reservation.reservation_id, first, self._usage, sent.num_bytes, seconds, sent.path
            )
        )

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[HostLease]:
        brought = await self._prefetched()
        lease = await self._around.host.lease_for(self.order.request, self._tags, brought)
        self._is_leased = True
        try:
            yield lease
        finally:
            self._release(lease)

    async def _prefetched(self) -> Prefetched:
        """What slower tiers bring into the host tier, if they are worth asking."""
        host, request = self._around.host, self.order.request
        if not host.wants_prefetch(request):
            return NOTHING_BROUGHT
        self._say("prefetching", prompt_len=request.prompt_len)
        seconds_left = self._end - self._around.clock()
        brought = await host.prefetch(request, self._tags, seconds_left=seconds_left)
        page_size = self._around.engine.manifest.page_size
        self._say("prefetched", **prefetch_facts(brought, page_size))
        self._around.reuse.prefetched(brought)
        return brought

    def _release(self, lease: HostLease, *, was_corrupt: bool = False) -> None:
        """Once: as soon as the loads are done, or when the attempt ends without any."""
        if self._is_leased:
            self._is_leased = False
            self._around.host.release(lease, was_corrupt=was_corrupt)

    @asynccontextmanager
    async def _reserved(self) -> AsyncIterator[Reservation]:
        """Slots at decode and here; on any error decode hears that nothing more will be written."""
        offer = await self._decode.offer()
        answer = await self._decode.reserve(offer, self._end - self._around.clock())
        reservation, holding = answer.reservation, self._around.holding
        self._begin(reservation)
        try:
            yield reservation
        except BaseException as error:
            self._leave_schedule()
            cause = "cancelled" if isinstance(error, asyncio.CancelledError) else "prefill_failed"
            await holding.leave(self._bow_out(reservation, cause))
            raise
        self._leave_schedule()
        holding.answered(reservation.reservation_id, reservation.epoch)
        self._around.bell.set()

    def _begin(self, reservation: Reservation) -> None:
        """Raises LeaseLost when decode gave it up before its answer came."""
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
        self._around.holding.begin(hold)

    def refuse(self, reservation_id: str) -> None:
        """Decode gave it up, and maybe its answer to Reserve is still on its way."""
        self._refused.add(reservation_id)

    async def _bow_out(self, reservation: Reservation, cause: str) -> None:
        """Waits until nothing is being sent, however long that takes, then tells decode so."""
        word = await self._around.holding.released(reservation.reservation_id)
        self._around.bell.set()
        with suppress(FerrymanError):
            await self._decode.abort(reservation, cause, word)

    def _leave_schedule(self) -> None:
        """Everything held here but what is being sent."""
        self._around.engine.scheduler.cancel(self.name, self._around.clock())
        self._around.bell.set()

    async def _hand_off(self, reservation: Reservation, lease: HostLease) -> tuple[Sampled, Sent]:
        """Computes and sends side by side; ends when decode has every unit."""
        salt = self.order.context.tenant_salt
        request = replace(self.order.request, request_id=self.name, tenant_salt=salt)
        manifest = self._around.engine.manifest
        offered = offered_ranges(manifest, request.prompt_len)
        outgoing = Outgoing(reservation, offered, manifest.page_size)
        self._num_superfluous = outgoing.num_superfluous
        self._around.engine.scheduler.submit(request, Goal.HAND_OFF, lease.view)
        self.is_scheduled = True
        self._around.bell.set()
        ready: asyncio.Queue[list[OutgoingUnit]] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            writing = self._decode.write(reservation, _batches_from(ready))
            held = self._around.holding.send(reservation.reservation_id, writing)
            sending = group.create_task(held)
            renewing = group.create_task(self._renew(reservation))
            first = await self._computed(reservation, outgoing, ready, lease)
            sent = await sending
            renewing.cancel()
        return first, sent

    async def _renew(self, reservation: Reservation) -> None:
        while True:
            await asyncio.sleep(reservation.lease_seconds / RENEWALS_PER_LEASE)
            await self._decode.renew(reservation)
            self._around.holding.renew(reservation.reservation_id)

    async def _computed(
        self,
        reservation: Reservation,
        outgoing: Outgoing,
        ready: asyncio.Queue[list[OutgoingUnit]],
        lease: HostLease,
    ) -> Sampled:
        """Follows the schedule's events until the prompt is held; the first token."""
        page_size = self._around.engine.manifest.page_size
        plan: ResumePlan | None = None
        while True:
            match await self.inbox.get():
                case Admitted(plan=plan):
                    self._admitted(plan)
                    self._offer(reservation, ready, outgoing.up_to(plan.anchor_pages * page_size))
                case ChunkDone() as chunk:
                    self._chunk(chunk)
                    self._offer(reservation, ready, outgoing.up_to(chunk.end))
                case LoadsDone():
                    self._release(lease)
                case LoadCorrupt():
                    self._release(lease, was_corrupt=True)
                case Held(first=first):
                    assert plan is not None, "what is held has been admitted"
                    self._around.reuse.planned(plan)  # its last: a spoilt load has it plan again
                    self._offer(reservation, ready, outgoing.rest())
                    ready.put_nowait([])
                    return first
                case Finished():
                    raise Cancelled("the prompt was given up by this worker")

    def _offer(
        self,
        reservation: Reservation,
        ready: asyncio.Queue[list[OutgoingUnit]],
        units: list[WantedUnit],
    ) -> None:
        """Leases the slots to the transfer until decode has answered, whatever the tree does."""
        engine, holding = self._around.engine, self._around.holding
        found = []
        for unit in units:
            ((_, handle),) = engine.scheduler.units_at(
                self.name, unit.kind, unit.index, unit.index + 1
            )
            holding.lease(reservation.reservation_id, handle)
            content = engine.transfer.read(unit.kind, handle.slot)
            place = engine.places.get(unit.kind)
            found.append(OutgoingUnit(unit, content, place.address_of(handle.slot) if place else 0))
        if found:
            ready.put_nowait(found)

    def _admitted(self, plan: ResumePlan) -> None:
        manifest = self._around.engine.manifest
        request = replace(self.order.request, request_id=self.name)
        self._around.host.planned(request, plan, self._tags)
        summary = plan_summary(manifest, plan)
        self._usage = prompt_usage(manifest, plan)
        self._say("admitted", **plan_facts(summary))
        self.progress.put_nowait(values.Admitted(summary))

    def _chunk(self, chunk: ChunkDone) -> None:
        self._num_chunks += 1
        step_tokens = self._around.engine.scheduler.limits.chunk_tokens
        left = -(-(chunk.prompt_len - chunk.end) // step_tokens)
        index, count = self._num_chunks, self._num_chunks + left
        self._say("chunk", index=index, count=count, start=chunk.start, end=chunk.end)
        self.progress.put_nowait(values.ChunkDone(index, count, chunk.start, chunk.end))

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

    def _say(self, event: str, **facts: Fact) -> None:
        context = self.order.context
        self._around.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )


async def _batches_from(
    ready: asyncio.Queue[list[OutgoingUnit]],
) -> AsyncIterator[list[OutgoingUnit]]:
    """Units as they become ready; an empty batch is the end."""
    while batch := await ready.get():
        yield batch
