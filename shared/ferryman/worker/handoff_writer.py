"""One hand-off by the worker that holds the state: reserve, send units as they are ready, commit.

A prefill worker hands off prompts while it computes them; a decode worker hands off the requests
that leave it. The recurrent state goes last, then the commit with the token drawn after it. Every
end, also an error, gives back the slots here and the reservation there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from ferryman.engine.engine import Engine
from ferryman.errors import FerrymanError, LeaseLost
from ferryman.handoff.holder import Hold
from ferryman.handoff.offer import UnitsToSend, offered_ranges
from ferryman.handoff.values import Reservation, ranges_of
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.batch import Sampled
from ferryman.wire.handoff.grpc_plane import Sent
from ferryman.wire.values import CommitOrder, PrefillOrder, Usage
from ferryman.worker.decode_client import DecodeClient
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.loop import DecayingMean
from ferryman.worker.send_leases import OutgoingUnits, SendLeases

RENEWALS_PER_LEASE = 3


@dataclass(frozen=True, slots=True)
class SendingSide:
    """The parts with which a worker hands state off; all its hand-offs share them. `tail_seconds`
    are those from a prompt's last token to decode's word that it has all."""

    engine: Engine
    wake: asyncio.Event
    send_leases: SendLeases
    transport: HandoffTransport
    clock: Callable[[], float]
    tail_seconds: DecayingMean = field(default_factory=DecayingMean)


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Decode has the request: the bytes sent, and the seconds from Reserve to Commit's answer.
    `facts` are for the lifecycle log."""

    usage: Usage
    num_bytes: int
    seconds: float
    facts: dict[str, Fact]


@dataclass(frozen=True, slots=True)
class HandoffSource:
    """The request whose state is handed off, as its owner offers it.

    `held_as` is its name in the schedule, `deadline` the time by the worker's clock. `fill` sends
    its units as they become ready, and returns the token after them; `usage` then has what their
    tokens were made from. `leave` frees all that the request has here, but for slots being sent.
    `done` is called once, at the hand-off.
    """

    held_as: str
    deadline: float
    fill: Callable[[OutgoingUnits], Awaitable[Sampled]]
    usage: Callable[[], Usage]
    leave: Callable[[], None]
    done: Callable[[HandoffDone], None]


@dataclass(frozen=True, slots=True)
class _Committing:
    """Every unit was sent, and a Commit is on its way: from here on decode may have committed."""

    order: CommitOrder
    sent: Sent
    began: float
    filled: float


class HandoffWriter:
    """One attempt's hand-off to the decode worker of `order`."""

    def __init__(
        self, order: PrefillOrder, decode: DecodeClient, side: SendingSide, source: HandoffSource
    ) -> None:
        self._order, self._decode = order, decode
        self._side, self._source = side, source
        self._num_superfluous = 0
        self._refused: set[str] = set()
        self._committing: _Committing | None = None
        self._is_done = False

    async def run(self) -> None:
        """Returns when decode has the request. Raises decode's errors, such as OutOfSlots, those of
        `fill`, or LeaseLost."""
        began = self._side.clock()
        async with self._reserved() as reservation:
            first, sent, filled = await self._hand_off(reservation)
            order = self._commit_order(reservation, first, sent)
            self._committing = _Committing(order, sent, began, filled)
            await self._decode.commit(order)
            self._handed_off(self._committing)

    def refuse(self, reservation_id: str) -> None:
        """Decode gave up the reservation, perhaps before its answer to Reserve has arrived."""
        self._refused.add(reservation_id)

    def _handed_off(self, committed: _Committing) -> None:
        """Decode has the request. Called too if its answer to Commit was lost and it confirms it
        later."""
        sent = committed.sent
        facts: dict[str, Fact] = {"path": sent.path, "superfluous": self._num_superfluous}
        if self._decode.why_grpc:
            facts["why"] = self._decode.why_grpc
        now = self._side.clock()
        seconds = now - committed.began
        self._side.tail_seconds.add(now - committed.filled)
        self._is_done = True
        self._source.done(HandoffDone(committed.order.usage, sent.num_bytes, seconds, facts))

    @asynccontextmanager
    async def _reserved(self) -> AsyncIterator[Reservation]:
        """Reserves slots at decode and here. On any error decode is informed that the writes have
        ended."""
        side = self._side
        offer = await side.transport.offer_to(self._order.decode.worker_id)
        answer = await self._decode.reserve(offer, self._source.deadline - side.clock())
        reservation = answer.reservation
        self._begin(reservation)
        try:
            yield reservation
        except BaseException as error:
            self._source.leave()
            cause = "cancelled" if isinstance(error, asyncio.CancelledError) else "prefill_failed"
            await side.send_leases.leave(self._abort_reservation(reservation, cause))
            if self._is_done and isinstance(error, FerrymanError):
                return  # it was committed, so the error of the call is no failure
            raise
        self._source.leave()
        side.send_leases.answered(reservation.reservation_id, reservation.epoch)
        side.wake.set()

    def _begin(self, reservation: Reservation) -> None:
        """Raises LeaseLost when decode gave up the reservation before its answer came."""
        if reservation.reservation_id in self._refused:
            raise LeaseLost("decode gave up the reservation before it was known here")
        context = self._order.context
        hold = Hold(
            context.request_id,
            context.attempt,
            reservation.reservation_id,
            reservation.epoch,
            reservation.lease_seconds,
        )
        self._side.send_leases.begin(hold)

    async def _abort_reservation(self, reservation: Reservation, cause: str) -> None:
        """Waits until no send is running, however long that takes, then informs decode.

        If decode has committed, the request is handed off and belongs to decode.
        """
        word = await self._side.send_leases.released(reservation.reservation_id)
        self._side.wake.set()
        with suppress(FerrymanError):
            is_committed = await self._decode.abort(reservation, cause, word)
            if is_committed and self._committing is not None and not self._is_done:
                self._handed_off(self._committing)

    async def _hand_off(self, reservation: Reservation) -> tuple[Sampled, Sent, float]:
        """Fills and sends at the same time; ends when decode has every unit. The last value is the
        time at which all of them were ready."""
        engine, send_leases = self._side.engine, self._side.send_leases
        offered = offered_ranges(engine.manifest, self._order.request.prompt_len)
        units = UnitsToSend(reservation, offered, engine.manifest.page_size)
        self._num_superfluous = units.num_superfluous
        reservation_id = reservation.reservation_id
        held_as = self._source.held_as
        outgoing = OutgoingUnits(engine, send_leases, held_as, reservation_id, units)
        async with asyncio.TaskGroup() as group:
            writing = self._decode.write(reservation, outgoing.batches())
            sending = group.create_task(send_leases.send(reservation_id, writing))
            renewing = group.create_task(self._renew(reservation))
            first = await self._source.fill(outgoing)
            filled = self._side.clock()
            outgoing.finish()
            sent = await sending
            renewing.cancel()
        return first, sent, filled

    async def _renew(self, reservation: Reservation) -> None:
        while True:
            await asyncio.sleep(reservation.lease_seconds / RENEWALS_PER_LEASE)
            await self._decode.renew(reservation)
            self._side.send_leases.renew(reservation.reservation_id)

    def _commit_order(self, reservation: Reservation, first: Sampled, sent: Sent) -> CommitOrder:
        return CommitOrder(
            context=self._order.context,
            reservation_id=reservation.reservation_id,
            epoch=reservation.epoch,
            written=ranges_of(digest.name for digest in sent.digests),
            digests=sent.digests,
            first=first,
            usage=self._source.usage(),
            signature=self._order.signature.value,
        )
