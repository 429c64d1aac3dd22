"""DecodeService: reserve, write, commit, abort, and the streams of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from ferryman.cache.manifest import manifest_from_json
from ferryman.errors import (
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    Stale,
    Unavailable,
    WrongEpoch,
)
from ferryman.handoff.effects import Fence, StopWriter, Writer
from ferryman.handoff.values import Reservation, units_of
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.events import Event
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    abort_order_from_wire,
    commit_order_from_wire,
    reserve_answer_to_wire,
    reserve_order_from_wire,
)
from ferryman.wire.codec.tokens import cursor_from_wire, step_frame_to_wire
from ferryman.wire.nixl_plane import landed_from_bytes
from ferryman.wire.page_intake import receive_pages
from ferryman.wire.planes import GRPC, NIXL, NixlOffer
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman.wire.values import AbortOrder, ReserveOrder
from ferryman.worker.shell import Parts
from ferryman.worker.telemetry import Load
from ferryman_decode.landing import NoStrip, Strip, landing_of
from ferryman_decode.outlets import Outlets
from ferryman_decode.quarantine import Quarantine
from ferryman_decode.receiving import LEASE_SECONDS, Receiving, Sink, reused_tokens
from ferryman_decode.requests import Requests
from ferryman_decode.running import RunningRequest, name_of

log = logging.getLogger(__name__)

SERVICE = "ferryman.wire.v1.DecodeService"
EXPIRY_SECONDS = 0.5
HEAR_SECONDS = 0.002


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """One decode worker. Everything here runs on the loop, so nothing needs a lock."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._outlets = Outlets(parts.epoch)
        self._requests = Requests(parts, self._outlets)
        self._receiving = Receiving(parts.engine, parts.epoch, parts.clock, self._requests.freed)
        parts.metrics.watch("reservations", self._receiving.table.statistics)
        self._landing = landing_of(
            parts.planes,
            f"{parts.worker_id}.{parts.epoch}",
            parts.background,
            self._receiving.writer_died,
        )
        self._quarantine = Quarantine(self._receiving, self._landing, parts.channels)
        self._receiving.on_stop(self._ask_to_stop)
        self._is_draining = False

    def _ask_to_stop(self, order: StopWriter) -> None:
        self._parts.background.start(self._quarantine.until_stopped(order))

    def listens_at(self, address: str) -> None:
        """Prefill is told by the router."""

    def register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    # Hand-off.

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Any
    ) -> decode_pb2.ReserveResponse:
        order = reserve_order_from_wire(request)
        self._check(order)
        strip = await self._strip_for(order)
        reservation = self._promised(order) or self._promise(order, strip)
        manifest = self._parts.engine.manifest
        reused = reused_tokens(manifest, reservation, order.request.prompt_len)
        plane = self._receiving.plane_of(reservation.reservation_id)
        return reserve_answer_to_wire(ReserveAnswer(reservation, manifest.digest, reused, plane))

    async def _strip_for(self, order: ReserveOrder) -> Strip | NoStrip:
        """Where the writer may write by itself, if it can and its life can be watched."""
        writer = Writer(order.writer.worker_id, order.writer.epoch)
        await self._landing.close_other_lives(writer)
        if not (isinstance(order.offer, NixlOffer) and order.writer.address):
            return NoStrip("prefill offers gRPC")
        left = order.context.deadline_seconds
        return await self._landing.strip_for(writer, order.offer.presence, left)

    def _promised(self, order: ReserveOrder) -> Reservation | None:
        return self._receiving.table.reserved(order.context.request_id, order.context.attempt)

    def _promise(self, order: ReserveOrder, strip: Strip | NoStrip) -> Reservation:
        """A new reservation; what an earlier attempt still decodes here is decoded for nobody."""
        reservation = self._receiving.reserve(order)
        chosen: dict[str, Fact] = {"path": GRPC}
        match strip:
            case NoStrip(why):
                chosen["why"] = why
            case Strip():
                if reservation.wanted:
                    self._receiving.grant(reservation, order, strip)
                    chosen["path"] = NIXL
        context = order.context
        self._requests.abort(context.request_id, context.attempt - 1, "superseded")
        self._requests.reserved(RunningRequest(order), reservation, chosen)
        return reservation

    def _check(self, order: ReserveOrder) -> None:
        self._check_epoch(order.worker_epoch)
        if self._is_draining:
            raise Unavailable("this decode worker is draining")
        if order.context.deadline_seconds <= 0:
            raise DeadlineExceeded("the deadline had passed when decode was asked")
        manifest = self._parts.engine.manifest
        if order.manifest_digest != manifest.digest:
            raise ManifestMismatch(_differences(self._parts, order))

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._parts.epoch:
            raise WrongEpoch(f"this is epoch {self._parts.epoch}, the message is for {epoch}")

    async def Renew(
        self, request: decode_pb2.RenewRequest, context: Any
    ) -> decode_pb2.RenewResponse:
        fence = Fence(request.epoch, request.reservation_id, request.attempt)
        self._receiving.table.renew(fence, self._parts.clock())
        return decode_pb2.RenewResponse(lease_ms=int(LEASE_SECONDS * 1000))

    async def WritePages(
        self, request_iterator: AsyncIterator[decode_pb2.WritePagesRequest], context: Any
    ) -> decode_pb2.WritePagesResponse:
        unit_bytes = {each.kind: each.slot_bytes for each in self._parts.engine.manifest.layouts}
        received = await receive_pages(request_iterator, unit_bytes, Sink(self._receiving))
        return decode_pb2.WritePagesResponse(
            bytes_received=received.num_bytes, units_received=received.num_units
        )

    async def Commit(
        self, request: decode_pb2.CommitRequest, context: Any
    ) -> decode_pb2.CommitResponse:
        order = commit_order_from_wire(request)
        fence = Fence(order.epoch, order.reservation_id, order.context.attempt)
        await self._receiving.examine_all(fence)
        if self._receiving.commit(fence, order):
            self._requests.committed(order)
        name = name_of(order.context.request_id, order.context.attempt)
        return decode_pb2.CommitResponse(accepted_tokens=self._requests.num_tokens(name))

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: Any
    ) -> decode_pb2.AbortResponse:
        order = abort_order_from_wire(request)
        if order.epoch:
            self._check_epoch(order.epoch)
        was_known = self._requests.abort(order.request_id, order.attempt, order.cause)
        self._free_reservation(order.request_id, order.attempt)
        if order.is_writer_done and order.reservation_id:
            await self._writer_done(order)
        # Over gRPC the writer stops within the tick in which it is told.
        is_pending = self._receiving.has_pending_writes(order.request_id, order.attempt)
        return decode_pb2.AbortResponse(has_pending_writes=is_pending, was_known=was_known)

    async def _writer_done(self, order: AbortOrder) -> None:
        """The writer's own word that it is done with a reservation."""
        fence = Fence(order.epoch, order.reservation_id, order.attempt)
        with suppress(Stale):
            await self._quarantine.writer_done(fence, has_failed=order.has_failed_writes)

    def _free_reservation(self, request_id: str, attempt: int) -> None:
        answer = self._receiving.table.abort(request_id, attempt, self._parts.clock())
        self._receiving.carry_out(answer.effects)

    # Tokens.

    async def Tokens(
        self, request: decode_pb2.TokensRequest, context: Any
    ) -> AsyncIterator[decode_pb2.TokensResponse]:
        self._check_epoch(request.worker_epoch)
        if not request.router_id:
            raise InvalidRequest("a token stream belongs to a router", "router_id")
        outlet = self._outlets.open(request.router_id)
        cursors = [cursor_from_wire(cursor) for cursor in request.resume]
        if missing := self._requests.since(cursors):
            outlet.send(missing)
        try:
            async with aclosing(outlet.frames()) as frames:
                async for frame in frames:
                    yield step_frame_to_wire(frame)
        finally:
            self._outlets.forget(request.router_id, outlet)

    # What the shell asks.

    def on_events(self, events: list[Event]) -> None:
        """From the step loop, once a step: everything of it leaves in one frame for each router."""
        self._requests.on_events(events)
        self._outlets.flush()

    def load(self) -> Load:
        statistics = self._parts.engine.scheduler.statistics()
        return Load(
            is_ready=not self._is_draining,
            num_running=statistics.decoding + statistics.prefilling,
            num_queued=statistics.waiting + statistics.reserved,
            queue_tokens=statistics.tokens_to_prefill,
            node=self._parts.host.node_id,
            planes=self._landing.planes,
        )

    async def drain(self) -> None:
        """No further reservations; what runs comes to its end, and is read."""
        self._is_draining = True
        await self._requests.idle()
        self._outlets.close(Unavailable("this decode worker has drained"))

    def jobs(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Run beside the servers; without them the worker ends."""
        return (self._expire(), self._landing.run(), self._hear())

    async def _hear(self) -> None:
        """What writers say has landed is examined while they go on writing."""
        while True:
            await asyncio.sleep(HEAR_SECONDS if self._landing.strips() else EXPIRY_SECONDS / 5)
            for strip in self._landing.strips():
                with suppress(Unavailable):
                    for message in await strip.agent.notifications():
                        self._parts.background.start(self._examine(message))

    async def _examine(self, message: bytes) -> None:
        """A message that is odd, or about what is over, is dropped: the commit decides."""
        with suppress(ValueError, FerrymanError):
            fence, ranges = landed_from_bytes(message)
            await self._receiving.examine(fence, units_of(ranges))

    async def _expire(self) -> None:
        """Leases and deadlines, by this process's own monotonic clock."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            now = self._parts.clock()
            self._receiving.carry_out(self._receiving.table.expire(now))
            for context in self._requests.expire(now):
                self._free_reservation(context.request_id, context.attempt)
            self._outlets.flush()


def _differences(parts: Parts, order: ReserveOrder) -> tuple[str, ...]:
    try:
        theirs = manifest_from_json(order.manifest_json)
    except (ValueError, KeyError, TypeError):
        return (f"digest: {parts.engine.manifest.digest} here, {order.manifest_digest} there",)
    return parts.engine.manifest.differences(theirs)
