"""DecodeService: reserve, write, commit, abort, and the streams of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from ferryman.cache.manifest import manifest_from_json
from ferryman.errors import (
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    Unavailable,
    WrongEpoch,
)
from ferryman.grammar.compiler import BackgroundCompiler, CompiledGrammar
from ferryman.handoff.effects import StopWriter, WriteFence, WriterId
from ferryman.handoff.values import Reservation, units_of
from ferryman.runtime.background import seconds_to_tick
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import Event
from ferryman.security.credentials import ClusterRole
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    abort_order_from_wire,
    commit_order_from_wire,
    hand_off_order_from_wire,
    hand_off_progress_to_wire,
    reserve_answer_to_wire,
    reserve_order_from_wire,
)
from ferryman.wire.codec.prefill import stop_answer_to_wire, stop_order_from_wire
from ferryman.wire.codec.tokens import cursor_from_wire, request_tokens_to_wire
from ferryman.wire.grpc.role_tokens import check_caller
from ferryman.wire.grpc.status import take_failure
from ferryman.wire.handoff.grpc_plane import receive_pages
from ferryman.wire.handoff.lent_memory import socket_name
from ferryman.wire.handoff.memory_lender import MemoryLender
from ferryman.wire.handoff.memory_plane import receive_landed
from ferryman.wire.handoff.nixl_writer import landed_from_bytes
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.plane_values import (
    GRPC,
    MEMORY,
    NIXL,
    GrpcOnly,
    MemoryGrant,
    MemoryOffer,
    NixlOffer,
    memory_at,
)
from ferryman.wire.signed_orders import SignatureCheck
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from ferryman.wire.values import (
    PrefillAdmitted,
    PrefillQueued,
    ReserveOrder,
    RouterAbort,
    WriterAbort,
)
from ferryman.worker.loop import memory_ready
from ferryman.worker.order_check import OrderCheck
from ferryman.worker.planes import MemorySide, NixlSide
from ferryman.worker.send_leases import StopOrders
from ferryman.worker.summary import held_tokens
from ferryman.worker.telemetry import WorkerLoad
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.aborts import Aborts, Quarantine
from ferryman_decode.decode_request import DecodeRequest
from ferryman_decode.departures import Departures
from ferryman_decode.handoff_receiver import LEASE_SECONDS, HandoffReceiver
from ferryman_decode.host_loads import LOAD_FAILED, HostLoads
from ferryman_decode.nixl_receiver import NixlReceiver, WriterAgent
from ferryman_decode.requests import Requests
from ferryman_decode.token_streams import RouterStreams

log = logging.getLogger(__name__)

Way = WriterAgent | MemoryGrant | GrpcOnly

SERVICE = "ferryman.wire.v1.DecodeService"
# The longest delay between the end of a lease or deadline and its handling.
EXPIRY_SECONDS = 0.1
IDLE_SECONDS = 1.0  # … of what is left when no request is under way


class StopWritingServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The part of PrefillService that a decode worker serves, because it writes the requests that
    leave it. It refuses to prefill (UNIMPLEMENTED)."""

    def __init__(self, stops: StopOrders) -> None:
        self._stops = stops

    async def StopWriting(
        self, request: prefill_pb2.StopWritingRequest, context: Any
    ) -> prefill_pb2.StopWritingResponse:
        return stop_answer_to_wire(await self._stops.obey(stop_order_from_wire(request)))


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """One decode worker. All of it runs on the event loop, so it needs no locks. Its `requests` and
    its `receiver` are for a worker that prefills, too."""

    def __init__(self, parts: WorkerContext) -> None:
        self._parts = parts
        self._streams = RouterStreams(parts.epoch)
        self._order_check = OrderCheck(parts.engine)
        self._signature_check = SignatureCheck(parts.access, parts.worker_id, parts.epoch)
        self._address = ""
        self._departures = Departures(parts, self._order_check, self._signature_check)
        self.requests = Requests(parts, self._streams, self._departures)
        self._host_loads = HostLoads(parts, self.requests.loaded, self._load_failed)
        self.receiver = HandoffReceiver(
            parts.engine,
            parts.epoch,
            parts.clock,
            self.requests.freed,
            self._ask_to_stop,
            self._host_loads.when_over,
        )
        parts.metrics.watch("reservations", self.receiver.table.statistics)
        parts.metrics.watch("departures", self._departures.statistics)
        self._nixl_receiver = NixlReceiver(
            parts.planes,
            f"{parts.worker_id}.{parts.epoch}",
            parts.background,
            self.receiver.writer_died,
            self._on_landed,
        )
        side = parts.planes
        self.lender = MemoryLender(
            side.folder if isinstance(side, MemorySide) else None,
            socket_name(parts.worker_id, parts.epoch),
            parts.background,
        )
        parts.metrics.watch("lent_memories", self.lender.statistics)
        self._quarantine = Quarantine(self.receiver, self._nixl_receiver, parts.channels)
        self._unit_bytes = {each.kind: each.slot_bytes for each in parts.engine.manifest.layouts}
        self._grammars = BackgroundCompiler(parts.engine.grammars)
        self._aborts = Aborts(
            self.requests, self._departures, self.receiver, self._quarantine, parts.clock
        )
        self._is_draining = False

    def _ask_to_stop(self, order: StopWriter) -> None:
        self._parts.background.start(self._quarantine.until_stopped(order))

    def listens_at(self, address: str) -> None:
        """Stores the address that routers name, at which the taker of a request may ask for a
        stop."""
        self._address = address
        self._departures.listens_at(address)

    def register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        # A worker that prefills, too, serves the whole of that service, and never writes by NIXL.
        if isinstance(self._parts.planes, NixlSide):
            stops = StopWritingServicer(self._departures.stops)
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(stops, server)

    # Hand-off.

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Any
    ) -> decode_pb2.ReserveResponse:
        order = self._checked(reserve_order_from_wire(request))
        grammar = await self._grammars.checked(
            order.request.sampling.grammar, within=order.context.deadline_seconds
        )
        way = await self._way_for(order)
        reservation = self._promised(order)
        if reservation is None:
            reservation = await self._reserved(order, way, grammar)
        plane = way if isinstance(way, MemoryGrant) else self.receiver.plane_of(reservation)
        return reserve_answer_to_wire(ReserveAnswer(reservation, plane))

    async def _way_for(self, order: ReserveOrder) -> Way:
        """Memory to lend to the writer; or the agent for its direct writes, if it has NIXL and its
        life can be watched."""
        writer = WriterId(order.writer.worker_id, order.writer.epoch)
        if isinstance(order.offer, MemoryOffer):
            return self.lender.grant(writer, order.offer)
        await self._nixl_receiver.close_other_lives(writer)
        if not (isinstance(order.offer, NixlOffer) and order.writer.address):
            return GrpcOnly("prefill offers gRPC")
        left = order.context.deadline_seconds
        return await self._nixl_receiver.agent_for(writer, order.offer.presence, left)

    def _promised(self, order: ReserveOrder) -> Reservation | None:
        """The earlier promise for this attempt, if any; looked up in the same tick as the
        answer."""
        context = order.context
        self.requests.check_owner(context, order.router_id)
        promised = self.receiver.table.reserved(context.request_id, context.attempt)
        if promised is not None:
            self.requests.check_repeated(order)
        return promised

    async def _reserved(
        self,
        order: ReserveOrder,
        way: Way,
        grammar: CompiledGrammar | None,
    ) -> Reservation:
        """The promise, after a look into the host tier; another Reserve may have made it
        meanwhile."""
        await memory_ready(self._parts.engine, order.request.prompt_len)
        lease = await self._host_loads.lease_for(order)
        try:
            if promised := self._promised(order):
                self._host_loads.release(lease)
                return promised
            reservation = self._promise(order, way, grammar, lease)
        except BaseException:
            self._host_loads.release(lease)
            raise
        request_id, reservation_id = order.context.request_id, reservation.reservation_id
        loads = self._parts.engine.scheduler.reservations.loads_of(reservation_id)
        self._host_loads.begin(request_id, reservation, loads, lease)
        return reservation

    def _promise(
        self,
        order: ReserveOrder,
        way: Way,
        grammar: CompiledGrammar | None,
        lease: HostLease,
    ) -> Reservation:
        """A new reservation. Ends an earlier attempt that still decodes here, because its tokens
        are not read any more."""
        self.requests.check_new(order)
        reservation = self.receiver.reserve(order, lease.view)
        chosen: dict[str, Fact] = {
            f"wanted_{span.kind}": [span.first, span.end] for span in reservation.ranges
        }
        chosen["path"] = GRPC
        match way:
            case GrpcOnly(why):
                chosen["why"] = why
            case MemoryGrant() if reservation.wanted:
                chosen["path"] = MEMORY
            case WriterAgent() if reservation.wanted:
                self.receiver.grant(reservation, order, way)
                chosen["path"] = NIXL
        reservations = self._parts.engine.scheduler.reservations
        if num_copied := reservations.num_copied(reservation.reservation_id):
            chosen["copied"] = num_copied
        plan = reservations.plan_of(reservation.reservation_id)
        held = held_tokens(self._parts.engine.manifest, plan)
        if held.total:
            chosen["held"] = {tier: tokens for tier, tokens in held.by_tier.items() if tokens}
        context = order.context
        # Behind all that can refuse: the earlier attempt goes on where this one has no place.
        self.requests.supersede(context, order.router_id)
        self.requests.reserved(DecodeRequest(order, grammar, held), chosen)
        return reservation

    def _checked(self, order: ReserveOrder) -> ReserveOrder:
        """Checks the order before anything is taken: first, that a router gave it."""
        self._check_epoch(order.worker_epoch)
        self._signature_check.check_reserve(order, self._address)
        if self._is_draining:
            raise Unavailable("this decode worker is draining")
        if order.context.deadline_seconds <= 0:
            raise DeadlineExceeded("the deadline had passed when decode was asked")
        if order.manifest_digest != self._parts.engine.manifest.digest:
            raise ManifestMismatch(_differences(self._parts, order))
        asked = order.context
        request = self._order_check.checked(order.request, asked.tenant_salt, asked.adapter)
        return replace(order, request=request)

    def _load_failed(self, name: str, fence: WriteFence) -> None:
        # Before freeing its slots, which forgets the request: the cause is the load.
        self.requests.given_up(name, LOAD_FAILED)
        self.receiver.load_failed(fence)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._parts.epoch:
            raise WrongEpoch(f"this is epoch {self._parts.epoch}, the message is for {epoch}")

    async def Renew(
        self, request: decode_pb2.RenewRequest, context: Any
    ) -> decode_pb2.RenewResponse:
        fence = WriteFence(request.epoch, request.reservation_id, request.attempt)
        self.receiver.table.renew(fence, self._parts.clock())
        return decode_pb2.RenewResponse(lease_ms=int(LEASE_SECONDS * 1000))

    async def WritePages(
        self, request_iterator: AsyncIterator[decode_pb2.WritePagesRequest], context: Any
    ) -> decode_pb2.WritePagesResponse:
        num_bytes = await receive_pages(request_iterator, self._unit_bytes, self.receiver)
        return decode_pb2.WritePagesResponse(bytes_received=num_bytes)

    async def LandPages(
        self, request_iterator: AsyncIterator[decode_pb2.LandPagesRequest], context: Any
    ) -> AsyncIterator[decode_pb2.LandPagesResponse]:
        landed = receive_landed(
            request_iterator, self._unit_bytes, self.receiver, self.lender.memory_of
        )
        async with aclosing(landed):
            async for num_bytes in landed:
                yield decode_pb2.LandPagesResponse(bytes_received=num_bytes)

    async def Commit(
        self, request: decode_pb2.CommitRequest, context: Any
    ) -> decode_pb2.CommitResponse:
        order = commit_order_from_wire(request)
        self._order_check.check_drawn(order.first)
        self.requests.check_commit(order)
        fence = WriteFence(order.epoch, order.reservation_id, order.context.attempt)
        await self.receiver.verify_all(fence)
        await self._host_loads.check_over(fence.reservation_id)
        if self.receiver.commit(fence, order):
            self.requests.committed(order)
        return decode_pb2.CommitResponse()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: Any
    ) -> decode_pb2.AbortResponse:
        match abort_order_from_wire(request):
            case RouterAbort() as order:
                check_caller(ClusterRole.ROUTER)
                self._signature_check.check_abort(order)
                return self._aborts.by_router(order)
            case WriterAbort() as order:
                check_caller(ClusterRole.PREFILL, ClusterRole.DECODE, ClusterRole.BOTH)
                self._check_epoch(order.fence.epoch)
                return await self._aborts.by_writer(order)

    # Requests that leave.

    async def Detach(
        self, request: decode_pb2.DetachRequest, context: Any
    ) -> decode_pb2.DetachResponse:
        self._check_epoch(request.worker_epoch)
        named = request.request_id, request.attempt, request.router_id
        self._signature_check.check_detach(*named, request.signature)
        self.requests.detach(*named)
        return decode_pb2.DetachResponse()

    async def HandOff(
        self, request: decode_pb2.HandOffRequest, context: Any
    ) -> AsyncIterator[decode_pb2.HandOffResponse]:
        departure = self._departures.begin(hand_off_order_from_wire(request))
        running = asyncio.create_task(departure.run(), name="hand-off")
        # A callback, because a second cancellation would skip the `finally` below.
        running.add_done_callback(lambda _: self._departures.ended(departure))
        running.add_done_callback(take_failure)
        try:
            yield hand_off_progress_to_wire(PrefillQueued())
            yield hand_off_progress_to_wire(PrefillAdmitted(departure.usage))
            yield hand_off_progress_to_wire(await asyncio.shield(running))
        finally:
            running.cancel()
            await asyncio.wait([running])

    # Tokens.

    async def Tokens(
        self, request: decode_pb2.TokensRequest, context: Any
    ) -> AsyncIterator[decode_pb2.TokensResponse]:
        self._check_epoch(request.worker_epoch)
        if not request.router_id:
            raise InvalidRequest("a token stream belongs to a router", "router_id")
        self._signature_check.check_tokens(request.router_id, request.signature)
        # At once, so that a router knows that it is connected, though no token may come for long.
        await context.send_initial_metadata(())
        outlet = self._streams.open(request.router_id)
        cursors = [cursor_from_wire(cursor) for cursor in request.resume]
        if missing := self.requests.since(cursors):
            outlet.send([request_tokens_to_wire(tokens) for tokens in missing])
        try:
            while True:
                # gRPC ignores a write to a router that has gone, so gRPC must do the write.
                yield await outlet.next_frame()
        finally:
            self._streams.forget(request.router_id, outlet)

    # Calls of the shell.

    def on_events(self, events: list[Event]) -> None:
        self.requests.on_events(events)

    def load(self) -> WorkerLoad:
        statistics = self._parts.engine.scheduler.statistics()
        return WorkerLoad(
            is_ready=not self._is_draining,
            num_running=statistics.decoding + statistics.prefilling,
            num_queued=statistics.waiting + statistics.reserved,
            queue_tokens=statistics.tokens_to_prefill,
            node=self._parts.host.node_id,
            planes=self._planes(),
        )

    def _planes(self) -> tuple[str, ...]:
        """The data planes that a writer can be granted now."""
        if place := self.lender.place:
            return (memory_at(place), GRPC)
        return self._nixl_receiver.planes

    async def prepare_drain(self) -> None:
        """Makes ready to send running requests elsewhere; new ones are still taken meanwhile."""
        if self.requests.is_busy:
            await self._departures.prepare()

    async def drain(self) -> None:
        """Refuses new reservations; waits until running requests have ended and are read."""
        self._is_draining = True
        await self.requests.idle()
        await self._departures.idle()
        self._streams.close(Unavailable("this decode worker has drained"))

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Jobs beside the servers; the worker ends when one of them ends."""
        return (
            self._expire(),
            self._nixl_receiver.run(),
            self.lender.run(),
            self._departures.run(),
        )

    def _on_landed(self, message: bytes) -> None:
        """Verifies units that a writer reports as landed, while it goes on writing."""
        self._parts.background.start(self._examine(message))

    async def _examine(self, message: bytes) -> None:
        """Drops a malformed message, or one about an ended reservation: the commit decides."""
        with suppress(ValueError, FerrymanError):
            fence, ranges = landed_from_bytes(message)
            await self.receiver.verify(fence, units_of(ranges))

    async def _expire(self) -> None:
        """Ends leases and deadlines, by this process's own monotonic clock."""
        while True:
            if await self.requests.becomes_busy(seconds_to_tick(IDLE_SECONDS)):
                await asyncio.sleep(EXPIRY_SECONDS)
            now = self._parts.clock()
            self.receiver.carry_out(self.receiver.table.expire(now))
            self._parts.engine.scheduler.reservations.expire(now)
            self._departures.expire(now)
            for context in self.requests.expire(now):
                self._aborts.free_reservation(context.request_id, context.attempt)
            self._streams.flush()


def _differences(parts: WorkerContext, order: ReserveOrder) -> tuple[str, ...]:
    try:
        theirs = manifest_from_json(order.manifest_json)
    except (ValueError, KeyError, TypeError):
        return (f"digest: {parts.engine.manifest.digest} here, {order.manifest_digest} there",)
    return parts.engine.manifest.differences(theirs)
