"""Asking a writer to stop, until it says that it has, or is known to be dead.

A reservation that is given up while somebody may write into it by himself keeps its slots leased:
that is its quarantine. No clock ends it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ferryman.errors import FerrymanError, WrongEpoch
from ferryman.handoff.effects import Fence, StopWriter
from ferryman.handoff.reservation import ReservationState
from ferryman.wire.rpc import Channels
from ferryman.wire.status import typed_errors
from ferryman.wire.v1 import prefill_pb2, prefill_pb2_grpc
from ferryman_decode.landing import Landing
from ferryman_decode.receiving import Receiving

log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
ASK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The reservations of one decode worker whose writers have yet to answer."""

    receiving: Receiving
    landing: Landing
    channels: Channels

    async def until_stopped(self, order: StopWriter) -> None:
        """Asks, again and again; ends when the reservation's slots are free."""
        log.info("quarantine reservation=%s", order.reservation.reservation_id)
        while self._is_waited_for(order):
            answer = await self._ask(order)
            if answer.is_stopped:
                reservation = order.reservation
                fence = Fence(reservation.epoch, reservation.reservation_id, reservation.attempt)
                await self.writer_done(fence, has_failed=answer.has_failed_writes)
                return
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def writer_done(self, fence: Fence, *, has_failed: bool) -> None:
        """The writer's word. Writes that it lost sight of end with the agent they were made to."""
        strip = self.receiving.strip_of(fence.reservation_id)
        if has_failed and strip is not None:
            await self.landing.close(strip)
        self.receiving.writer_stopped(fence)

    def _is_waited_for(self, order: StopWriter) -> bool:
        state = self.receiving.table.state_of(order.reservation.reservation_id)
        return state is ReservationState.EXPIRING

    async def _ask(self, order: StopWriter) -> prefill_pb2.StopWritingResponse:
        """No answer is none: dead or stopped, the watch on it will tell."""
        address = self.receiving.address_of(order.reservation.reservation_id)
        stub = prefill_pb2_grpc.PrefillServiceStub(self.channels.to(address))
        request = prefill_pb2.StopWritingRequest(
            request_id=order.request_id,
            attempt=order.reservation.attempt,
            reservation_id=order.reservation.reservation_id,
            worker_epoch=order.writer.epoch,
        )
        try:
            with typed_errors():
                answer: prefill_pb2.StopWritingResponse = await stub.StopWriting(
                    request, timeout=ASK_SECONDS
                )
        except WrongEpoch:
            log.info("somebody else lives at %s", address)
            return prefill_pb2.StopWritingResponse()
        except FerrymanError as error:
            log.debug("writer %s did not answer: %s", order.writer.worker_id, error)
            return prefill_pb2.StopWritingResponse()
        return answer
