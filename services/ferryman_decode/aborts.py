"""Aborts requested by other processes: of a request, of a reservation, and of a writer's writes.

The router that owns a request can end it in any state. The prefill worker that writes into a
reservation can end that reservation until it is committed: its abort may come late, after a commit
whose answer it never got. A writer that decode gives up is asked to stop until it confirms that it
has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ferryman.errors import FerrymanError, Stale, WrongEpoch
from ferryman.handoff.effects import StopWriter, WriteFence, fence_of
from ferryman.handoff.reservation import ReservationState
from ferryman.wire.codec.prefill import stop_answer_from_wire, stop_order_to_wire
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1 import decode_pb2, prefill_pb2_grpc
from ferryman.wire.values import RouterAbort, StopAnswer, StopOrder, WriterAbort
from ferryman_decode.decode_request import name_of
from ferryman_decode.departures import Departures
from ferryman_decode.handoff_receiver import HandoffReceiver
from ferryman_decode.nixl_receiver import NixlReceiver
from ferryman_decode.requests import Requests

log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
ASK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The reservations of one decode worker whose writers have yet to answer.

    A reservation that is given up while its writer may still write keeps its slots leased. No clock
    ends that: the writer must confirm that it has stopped, or be known to be dead.
    """

    receiver: HandoffReceiver
    nixl_receiver: NixlReceiver
    channels: Channels

    async def until_stopped(self, order: StopWriter) -> None:
        """Asks again and again; returns when the reservation's slots are free."""
        log.info("quarantine reservation=%s", order.reservation.reservation_id)
        while self._is_waited_for(order):
            answer = await self._ask(order)
            if answer.is_stopped:
                fence = fence_of(order.reservation)
                await self.writer_done(fence, has_failed=answer.has_failed_writes)
                return
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def writer_done(self, fence: WriteFence, *, has_failed: bool) -> None:
        """The writer has stopped. Closing the agent it wrote to ends writes whose end it does not
        know."""
        granted = self.receiver.granted.get(fence.reservation_id)
        if has_failed and granted is not None:
            await self.nixl_receiver.close(granted.writer_agent)
        self.receiver.writer_stopped(fence)

    def _is_waited_for(self, order: StopWriter) -> bool:
        state = self.receiver.table.state_of(order.reservation.reservation_id)
        return state is ReservationState.EXPIRING

    async def _ask(self, order: StopWriter) -> StopAnswer:
        """A missing answer means nothing: if the writer is dead, the watch on it notices."""
        reservation, writer = order.reservation, order.writer
        granted = self.receiver.granted.get(reservation.reservation_id)
        address = granted.writer_address if granted else ""
        unknown = StopAnswer(False, False, writer.epoch)
        asked = StopOrder(
            order.request_id, reservation.attempt, reservation.reservation_id, writer.epoch
        )
        stub = prefill_pb2_grpc.PrefillServiceStub(self.channels.to(address))
        try:
            with typed_errors():
                message = await stub.StopWriting(stop_order_to_wire(asked), timeout=ASK_SECONDS)
        except WrongEpoch:
            log.info("somebody else lives at %s", address)
            return unknown
        except FerrymanError as error:
            log.debug("writer %s did not answer: %s", writer.worker_id, error)
            return unknown
        answer = stop_answer_from_wire(message)
        if answer.worker_epoch != writer.epoch:
            # Another life of the writer does not know the writes of the one that was granted the
            # slots.
            log.warning("another life speaks for writer %s at %s", writer.worker_id, address)
            return unknown
        return answer


@dataclass(frozen=True, slots=True)
class Aborts:
    """Aborts of requests and reservations on this worker by other processes."""

    requests: Requests
    departures: Departures
    receiver: HandoffReceiver
    quarantine: Quarantine
    clock: Callable[[], float]

    def by_router(self, order: RouterAbort) -> decode_pb2.AbortResponse:
        """Ends the attempt and all before it, and refuses later messages for them."""
        request_id, attempt = order.request_id, order.attempt
        if self.requests.is_of_another(request_id, order.router_id):
            return decode_pb2.AbortResponse()
        was_known = self.requests.abort(request_id, attempt, order.cause)
        self.departures.unwanted(order)
        self.free_reservation(request_id, attempt)
        # Over gRPC the writer is this process, so it has stopped already.
        is_pending = self.receiver.table.is_quarantined(request_id, attempt)
        return decode_pb2.AbortResponse(has_pending_writes=is_pending, was_known=was_known)

    async def by_writer(self, order: WriterAbort) -> decode_pb2.AbortResponse:
        """Ends one reservation, unless it was committed; an unknown one has ended already."""
        fence, table = order.fence, self.receiver.table
        with suppress(Stale):
            table.check_request(fence, order.request_id)
            effects = table.give_up(fence)
            if effects:
                # Before freeing its slots, which forgets the request: the cause is the writer's.
                self.requests.given_up(name_of(order.request_id, fence.attempt), order.cause)
                self.receiver.carry_out(effects)
            await self.quarantine.writer_done(fence, has_failed=order.has_failed_writes)
            is_committed = table.state_of(fence.reservation_id) is ReservationState.COMMITTED
            return decode_pb2.AbortResponse(was_known=bool(effects), is_committed=is_committed)
        return decode_pb2.AbortResponse()

    def free_reservation(self, request_id: str, attempt: int) -> None:
        """Gives up uncommitted reservations of the attempt and of all before it."""
        answer = self.receiver.table.abort(request_id, attempt, self.clock())
        self.receiver.carry_out(answer.effects)
