"""The decode worker as prefill sees it: reserve, write, commit, abort."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from ferryman.cache.manifest import StateManifest, manifest_to_json
from ferryman.errors import CorruptState
from ferryman.handoff.values import Reservation
from ferryman.wire.codec.handoff import (
    ReserveAnswer,
    abort_order_to_wire,
    commit_order_to_wire,
    reserve_answer_from_wire,
    reserve_order_to_wire,
)
from ferryman.wire.data_plane import OutgoingUnit, Sent, send_units
from ferryman.wire.nixl_plane import FailedWrites, NotMet
from ferryman.wire.planes import GrpcPlane, NixlGrant, Plane, PlaneOffer
from ferryman.wire.rpc import Channels, tags_for, tags_to_metadata
from ferryman.wire.status import typed_errors
from ferryman.wire.v1 import decode_pb2, decode_pb2_grpc
from ferryman.wire.values import (
    AbortOrder,
    CommitOrder,
    PrefillOrder,
    ReserveOrder,
    WorkerAddress,
)
from ferryman_prefill.holding import Word
from ferryman_prefill.writing import Writing

CALL_SECONDS = 10.0
ABORT_SECONDS = 2.0


class DecodeSide:
    """One attempt's dealings with its decode worker. Errors come typed.

    `why_grpc` says in a few words what spoke against NIXL on this side; it is empty if nothing did.
    """

    why_grpc = ""

    def __init__(
        self,
        order: PrefillOrder,
        channels: Channels,
        writer: WorkerAddress,
        manifest: StateManifest,
        writing: Writing,
    ) -> None:
        self._order = order
        self._writing = writing
        self._plane: Plane = GrpcPlane()
        self._writer = writer
        self._manifest = manifest
        self._stub = decode_pb2_grpc.DecodeServiceStub(channels.to(order.decode.address))
        context = order.context
        tags = tags_for(context)
        self._metadata = tags_to_metadata(tags)

    async def offer(self) -> PlaneOffer:
        """How this worker can write; `why_grpc` is in a few words what it had to leave out."""
        offered = await self._writing.offer_to(self._order.decode.worker_id)
        self.why_grpc = offered.why
        return offered.offer

    async def reserve(self, offer: PlaneOffer, deadline_seconds: float) -> ReserveAnswer:
        """Slots for all that decode lacks. Raises what decode says, OutOfSlots among it.

        `deadline_seconds` are left: less than the order said, for it has waited here.
        """
        order = self._order
        wish = ReserveOrder(
            context=replace(order.context, deadline_seconds=deadline_seconds),
            worker_epoch=order.decode.epoch,
            writer=self._writer,
            router_id=order.router_id,
            request=order.request,
            manifest_digest=self._manifest.digest,
            manifest_json=manifest_to_json(self._manifest),
            offer=offer,
        )
        with typed_errors():
            answer = await self._stub.Reserve(
                reserve_order_to_wire(wish),
                timeout=min(CALL_SECONDS, deadline_seconds),
                metadata=self._metadata,
            )
        found = reserve_answer_from_wire(answer, order.context.attempt)
        self._plane = found.plane
        return found

    async def renew(self, reservation: Reservation) -> None:
        request = decode_pb2.RenewRequest(
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
        )
        with typed_errors():
            await self._stub.Renew(request, timeout=CALL_SECONDS)

    async def write(
        self, reservation: Reservation, batches: AsyncIterator[Sequence[OutgoingUnit]]
    ) -> Sent:
        """Writes units as they come, on the plane decode chose; what was sent, once it is there.

        A grant that leads nowhere costs nothing: before the first write gRPC takes over.
        """
        if isinstance(self._plane, NixlGrant):
            try:
                return await self._writing.writer.send(self._plane, reservation, batches)
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

    def _nixl_failed(self, error: Exception) -> None:
        self._plane = GrpcPlane()
        self.why_grpc = "prefill: decode's NIXL agent is out of reach"
        self._writing.failed(self._order.decode.worker_id, error)

    async def commit(self, commit: CommitOrder) -> None:
        """Raises CorruptState when decode found gaps or other bytes."""
        try:
            with typed_errors():
                await self._stub.Commit(
                    commit_order_to_wire(commit), timeout=CALL_SECONDS, metadata=self._metadata
                )
        except CorruptState as error:
            if isinstance(self._plane, NixlGrant):
                self._nixl_failed(error)
            raise

    async def abort(self, reservation: Reservation, cause: str, word: Word) -> None:
        """Says that nothing more will be written. Decode being away is its own answer."""
        order = AbortOrder(
            request_id=self._order.context.request_id,
            attempt=reservation.attempt,
            cause=cause,
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            is_writer_done=word.is_stopped,
            has_failed_writes=word.has_failed_writes,
        )
        with typed_errors():
            await self._stub.Abort(abort_order_to_wire(order), timeout=ABORT_SECONDS)
