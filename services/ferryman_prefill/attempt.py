"""One attempt at one prompt: queued → reserved → admitted → chunks sent as they finish → committed.

The recurrent state goes last, then the commit with the first token. Every end of the attempt, also
an error, gives back its slots, its host lease and its reservation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ferryman.errors import FerrymanError, LeaseLost
from ferryman.grammar.compiler import CompiledGrammar
from ferryman.handoff.holder import Hold
from ferryman.handoff.offer import UnitsToSend, offered_ranges
from ferryman.handoff.values import Reservation, ranges_of
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.batch import Sampled
from ferryman.schedule.sequence import Goal
from ferryman.wire import values
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import CommitOrder, PrefillOrder
from ferryman_prefill.decode_client import DecodeClient
from ferryman_prefill.prompt_attempt import PrefillContext, PromptAttempt
from ferryman_prefill.send_leases import OutgoingUnits

RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True)
class _Committing:
    """Every unit was sent, and a Commit is on its way: from here on decode may have committed."""

    order: CommitOrder
    sent: Sent
    began: float


class PrefillAttempt(PromptAttempt):
    """Sends the state of each chunk to decode as soon as it is computed."""

    def __init__(
        self,
        order: PrefillOrder,
        decode: DecodeClient,
        ctx: PrefillContext,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        super().__init__(order, ctx, grammar)
        self._decode = decode
        self._num_superfluous = 0
        self._refused: set[str] = set()
        self._committing: _Committing | None = None

    async def _run(self, lease: HostLease) -> None:
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

    async def _hand_off(self, reservation: Reservation, lease: HostLease) -> tuple[Sampled, Sent]:
        """Computes and sends side by side; ends when decode has every unit."""
        request, manifest = self._request, self._ctx.engine.manifest
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
            first = await self._computed(lease, outgoing.up_to)
            outgoing.finish()
            sent = await sending
            renewing.cancel()
        return first, sent

    async def _renew(self, reservation: Reservation) -> None:
        while True:
            await asyncio.sleep(reservation.lease_seconds / RENEWALS_PER_LEASE)
            await self._decode.renew(reservation)
            self._ctx.send_leases.renew(reservation.reservation_id)

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
