"""Calls to workers over gRPC; here and in `tokens` alone the router sees generated classes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from ferryman.errors import FerrymanError
from ferryman.wire.beats import Beat
from ferryman.wire.codec.handoff import abort_order_to_wire
from ferryman.wire.codec.prefill import prefill_order_to_wire, progress_from_wire
from ferryman.wire.rpc import Channels, tags_for, tags_to_metadata
from ferryman.wire.status import REASON, typed
from ferryman.wire.v1 import decode_pb2_grpc, prefill_pb2_grpc
from ferryman.wire.values import AbortOrder, PrefillOrder, PrefillProgress
from ferryman_router.fleet import Fleet, WorkerName
from ferryman_router.orders import PrefetchOrder
from ferryman_router.prefetches import Prefetches
from ferryman_router.verdict import WorkerGone

log = logging.getLogger(__name__)

ABORT_SECONDS = 2.0
_MARGIN_SECONDS = 1.0


def understood(error: grpc.aio.AioRpcError, name: WorkerName) -> FerrymanError:
    """What a failed call says; a status that no worker sent means that the connection broke."""
    said = any(key == REASON for key, _ in error.trailing_metadata() or ())
    broke = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
    if not said and error.code() in broke:
        return WorkerGone(f"{name.worker_id} does not answer: {error.details()}")
    return typed(error)


class GrpcWorkers:
    """The fleet's addresses, one channel each. `ask_again` is the token streams' business."""

    def __init__(
        self,
        fleet: Fleet,
        channels: Channels,
        prefetches: Prefetches,
        ask_again: Callable[[WorkerName], None],
    ) -> None:
        self._fleet, self._channels = fleet, channels
        self._prefetches, self._ask_again = prefetches, ask_again

    async def prefill(
        self, name: WorkerName, order: PrefillOrder
    ) -> AsyncIterator[PrefillProgress]:
        """Progress until the hand-off; leaving the loop cancels the attempt at the worker."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channel(name))
        context = order.context
        tags = tags_for(context)
        call = stub.Prefill(
            prefill_order_to_wire(order),
            timeout=context.deadline_seconds + _MARGIN_SECONDS,
            metadata=tags_to_metadata(tags),
        )
        try:
            async for message in call:
                yield progress_from_wire(message)
        except grpc.aio.AioRpcError as error:
            raise understood(error, name) from error
        finally:
            call.cancel()

    async def abort(self, name: WorkerName, order: AbortOrder) -> None:
        """Tells decode; a worker that cannot be told is gone, or will notice by its lease."""
        if self._fleet.get(name) is None:
            return
        stub = decode_pb2_grpc.DecodeServiceStub(self._channel(name))
        try:
            await stub.Abort(abort_order_to_wire(order), timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning(
                "abort not delivered id=%s worker=%s: %s",
                order.request_id,
                name.worker_id,
                error.details(),
            )

    def prefetch(self, host: Beat, order: PrefetchOrder) -> None:
        self._prefetches.begin(host, order)

    def ask_again(self, name: WorkerName) -> None:
        self._ask_again(name)

    def _channel(self, name: WorkerName) -> grpc.aio.Channel:
        worker = self._fleet.get(name)
        if worker is None:
            raise WorkerGone(f"{name.worker_id} has left")
        return self._channels.to(worker.beat.address)
