"""Prefill's client of the decode worker: reserve, write, commit, abort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from ferryman.cache.manifest import StateManifest
from ferryman.errors import (
    CorruptState,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    NotFound,
    Stale,
    Unavailable,
)
from ferryman.handoff.effects import fence_of
from ferryman.handoff.values import Reservation
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    abort_order_to_wire,
    commit_order_to_wire,
    reserve_answer_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.codec.pieces import WriteHeader
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.handoff.grpc_plane import Sent, send_units
from ferryman.wire.handoff.memory_plane import FrameStore, send_units_by_memory
from ferryman.wire.handoff.nixl_writer import FailedWrites, GrantMisfit, NotMet
from ferryman.wire.handoff.outgoing_units import AnyUnit
from ferryman.wire.plane_values import GrpcOnly, MemoryGrant, NixlGrant, Plane, PlaneOffer
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman.wire.values import (
    CommitOrder,
    PrefillOrder,
    ReserveOrder,
    WorkerAddress,
    WriterAbort,
)
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.send_leases import WriterStatus

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
ABORT_SECONDS = 2.0
# How long, and how often, a Commit with an unknown result is repeated.
UNKNOWN_SECONDS = 5.0
COMMIT_AGAIN_SECONDS = 0.2
# Errors of a Commit that decode itself raises; all others may come from the network.
_ANSWERS = (CorruptState, Stale, InvalidRequest, ManifestMismatch, NotFound)


class DecodeClient:
    """One attempt's calls to its decode worker. Errors are typed.

    `why_grpc` gives in a few words why this side used gRPC; it is empty if it did not decide so.
    """

    why_grpc = ""

    def __init__(
        self,
        order: PrefillOrder,
        channels: Channels,
        writer: WorkerAddress,
        manifest: StateManifest,
        transport: HandoffTransport,
        drawn_token_id: int | None = None,
    ) -> None:
        """`drawn_token_id` is the token behind those of an order about a request that moves."""
        self._order, self._drawn_token_id = order, drawn_token_id
        self._transport = transport
        self._plane: Plane = GrpcOnly()
        self._writer = writer
        self._manifest = manifest
        self._stub = decode_pb2_grpc.DecodeServiceStub(channels.to(order.decode.address))

    async def reserve(self, offer: PlaneOffer, deadline_seconds: float) -> ReserveAnswer:
        """Reserves slots for every unit that decode lacks. Raises decode's errors, such as
        OutOfSlots.

        `deadline_seconds` is the time left: less than in the order, which has waited here.
        """
        order = self._order
        self.why_grpc = offer.why if isinstance(offer, GrpcOnly) else ""
        wish = ReserveOrder(
            context=replace(order.context, deadline_seconds=deadline_seconds),
            worker_epoch=order.decode.epoch,
            writer=self._writer,
            router_id=order.router_id,
            request=order.request,
            manifest_digest=self._manifest.digest,
            manifest_json=self._manifest.text,
            offer=offer,
            signature=order.signature,
            drawn_token_id=self._drawn_token_id,
        )
        with typed_errors():
            answer = await self._stub.Reserve(
                reserve_order_to_wire(wish),
                timeout=min(CALL_SECONDS, deadline_seconds),
            )
        reservation = reserve_answer_from_wire(answer, order.context.attempt)
        self._plane = reservation.plane
        return reservation

    async def renew(self, reservation: Reservation) -> None:
        request = decode_pb2.RenewRequest(
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
        )
        with typed_errors():
            await self._stub.Renew(request, timeout=CALL_SECONDS)

    async def write(
        self, reservation: Reservation, batches: AsyncIterator[Sequence[AnyUnit]]
    ) -> Sent:
        """Writes units as they come, on the plane that decode chose; returns when all have arrived.

        If the memory that decode lends, or its NIXL agent, is out of reach, or its grant does not
        fit, gRPC takes over before the first write.
        """
        if isinstance(self._plane, MemoryGrant) and (store := await self._borrowed(self._plane)):
            header = self._header(reservation)
            try:
                with typed_errors():
                    return await send_units_by_memory(
                        self._stub, reservation, header, batches, store
                    )
            except CorruptState as error:
                # The memory does not carry what was put into it, so the next attempt leaves it out.
                self._transport.failed(self._order.decode.worker_id, error)
                raise
        if isinstance(self._plane, NixlGrant):
            try:
                return await self._transport.writer.send(self._plane, reservation, batches)
            except GrantMisfit as error:
                self._nixl_failed(error, "decode's grant does not fit")
            except NotMet as error:
                self._nixl_failed(error)
            except FailedWrites as error:
                self._nixl_failed(error)
                raise
        request_id = self._order.context.request_id
        with typed_errors():
            return await send_units(
                self._stub, reservation, request_id, self._manifest.digest, batches
            )

    def _header(self, reservation: Reservation) -> WriteHeader:
        request_id = self._order.context.request_id
        return WriteHeader(fence_of(reservation), request_id, self._manifest.digest)

    async def _borrowed(self, grant: MemoryGrant) -> FrameStore | None:
        try:
            return await self._transport.memories.of(grant)
        except Unavailable as error:
            log.warning("no memory from %s: %s", self._order.decode.worker_id, error)
            self._plane = GrpcOnly()
            self.why_grpc = "prefill: decode's memory is out of reach"
            return None

    def _nixl_failed(
        self, error: Exception, why: str = "decode's NIXL agent is out of reach"
    ) -> None:
        self._plane = GrpcOnly()
        self.why_grpc = f"prefill: {why}"
        self._transport.failed(self._order.decode.worker_id, error)

    async def commit(self, commit: CommitOrder) -> None:
        """Commits, and repeats until decode has answered. Raises CorruptState for gaps or other
        bytes.

        The effect of a broken call is unknown, and decode answers a repetition as the first call.
        So the call is repeated for a while; if that does not help, its error is raised.
        """
        clock = asyncio.get_running_loop().time
        end: float | None = None
        while True:
            try:
                return await self._commit_once(commit)
            except _ANSWERS:
                raise
            except FerrymanError:
                # Counted from the first failure, because this process may have been stopped during
                # the call.
                end = clock() + UNKNOWN_SECONDS if end is None else end
                if clock() >= end:
                    raise
            await asyncio.sleep(COMMIT_AGAIN_SECONDS)

    async def _commit_once(self, commit: CommitOrder) -> None:
        try:
            with typed_errors():
                await self._stub.Commit(commit_order_to_wire(commit), timeout=CALL_SECONDS)
        except CorruptState as error:
            # The bytes may be wrong on this plane alone, so the next attempt does not use it.
            if isinstance(self._plane, NixlGrant):
                self._nixl_failed(error)
            elif isinstance(self._plane, MemoryGrant):
                self._transport.failed(self._order.decode.worker_id, error)
            raise

    async def abort(self, reservation: Reservation, cause: str, word: WriterStatus) -> bool:
        """Reports to decode that the writes have ended; returns whether the request was committed,
        and goes on.

        Raises Unreachable or another error when decode does not answer.
        """
        request_id = self._order.context.request_id
        order = WriterAbort(request_id, fence_of(reservation), cause, word.has_failed_writes)
        with typed_errors():
            answer = await self._stub.Abort(abort_order_to_wire(order), timeout=ABORT_SECONDS)
        return bool(answer.is_committed)
