"""Requests that leave this worker with their state, because it drains.

    decoding ──Detach──► detached ──HandOff──► handed off
                            └── no order in time, or it failed: the slots are freed

Between two steps a request of n tokens has consumed n - 1 of them. So it leaves as any prompt of
n - 1 tokens is handed off whose first token is the last one drawn (docs/decisions/0084). Nothing of
it is computed again. The router orders both steps, because attempts are numbered by it alone; if
it does not come for the state, another attempt computes the request as after a worker's death.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ferryman.errors import LeaseLost, Stale, WrongEpoch
from ferryman.handoff.attempt_window import AttemptWindows
from ferryman.handoff.effects import WriterId
from ferryman.handoff.offer import offered_ranges
from ferryman.wire.plane_values import GrpcOnly
from ferryman.wire.signed_orders import SignatureCheck
from ferryman.wire.values import PrefillOrder, RouterAbort, StopOrder, WorkerAddress
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.handoff_writer import SendingSide
from ferryman.worker.order_check import OrderCheck
from ferryman.worker.planes import NixlSide
from ferryman.worker.send_leases import SendLeases, StopOrders
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import DecodeRequest
from ferryman_decode.departure import Departure

# How long a detached request's state waits for the order to hand it off.
HOLD_SECONDS = 10.0
# The first write by NIXL from one worker to another sets a connection up. For less than so many
# bytes gRPC is done before that.
MIN_NIXL_BYTES = 32 << 20
SMALL = GrpcOnly("the state of this request is small")
# How long a drain waits for a NIXL agent: requests go on meanwhile, and new ones are taken.
PREPARE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DepartureStatistics:
    """Counts for the gauges. `held` wait now; the others are since the start."""

    held: int
    detached: int
    handed_off: int
    given_up: int


@dataclass(slots=True)
class _DetachedState:
    request: DecodeRequest
    until: float
    departure: Departure | None = None
    is_wanted: bool = True


class Departures:
    """The requests of one worker that are about to leave it, by request id."""

    def __init__(
        self, parts: WorkerContext, order_check: OrderCheck, signature_check: SignatureCheck
    ) -> None:
        self._parts = parts
        self._order_check, self._signature_check = order_check, signature_check
        self._windows = AttemptWindows()
        self._wanted: dict[str, DecodeRequest] = {}
        self._held: dict[str, _DetachedState] = {}
        self._num_detached = self._num_handed_off = self._num_given_up = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_needed = asyncio.Event()
        self._me = WorkerAddress(parts.worker_id, "", parts.epoch)
        writer = WriterId(parts.worker_id, parts.epoch)
        self._side = SendingSide(
            parts.engine,
            parts.wake,
            SendLeases(parts.engine.scheduler, parts.clock),
            HandoffTransport(parts.planes, parts.engine.shares, writer, parts.clock),
            parts.clock,
        )
        by_grpc = HandoffTransport(SMALL, parts.engine.shares, writer, parts.clock)
        self._small_side = replace(self._side, transport=by_grpc)
        self.stops = StopOrders(parts.epoch, self._side.send_leases, self._refuse)

    def listens_at(self, address: str) -> None:
        """Stores the address at which another decode worker may ask for a stop."""
        self._me = replace(self._me, address=address)

    async def run(self) -> None:
        """Keeps an agent for NIXL from when requests are about to leave."""
        # A worker drains once in its life, and an agent takes memory.
        await self._is_needed.wait()
        await self._side.transport.run()

    async def prepare(self) -> None:
        """Has an agent made, and waits for it a moment. Without one, requests leave by gRPC."""
        self._is_needed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(PREPARE_SECONDS):
                await self._side.transport.made()

    # Detaching.

    def detach(self, request: DecodeRequest) -> None:
        """Has the request stand still as soon as it can; `detached` follows."""
        if request.context.request_id not in self._held:
            self._wanted[request.name] = request
            self._idle.clear()
            self._is_needed.set()
            self.retry()

    def retry(self) -> None:
        """Called behind each step: a request may have to run one more before it can stop."""
        if not self._wanted:
            return
        scheduler, now = self._parts.engine.scheduler, self._parts.clock()
        for name, request in tuple(self._wanted.items()):
            if request.is_over or scheduler.detach(name, now):
                del self._wanted[name]
                self._parts.wake.set()
        self._ring_if_idle()

    def detached(self, request: DecodeRequest) -> None:
        """The request stands still. Its state is kept until an order comes for it, or too late."""
        until = self._parts.clock() + HOLD_SECONDS
        self._held[request.context.request_id] = _DetachedState(request, until)
        self._num_detached += 1
        self._idle.clear()

    def expire(self, now: float) -> None:
        """Gives up requests for which no order came in time, and sends that nobody renews."""
        self._side.send_leases.expire()
        late = [held for held in self._held.values() if now >= held.until and not held.departure]
        for held in late:
            self._give_up(held)

    def unwanted(self, order: RouterAbort) -> None:
        """Frees the state of a request whose router will not order it again: it ended an attempt
        after the one that decoded here. An abort of that one itself may be late, and says
        nothing."""
        held = self._held.get(order.request_id)
        if held is None or order.attempt <= held.request.context.attempt:
            return
        held.is_wanted = False
        if held.departure is None:
            self._give_up(held)

    def _give_up(self, held: _DetachedState) -> None:
        self._num_given_up += 1
        self._leave(held)

    def has(self, request: DecodeRequest) -> bool:
        """Whether the state of a request that stands still is kept here."""
        held = self._held.get(request.context.request_id)
        return held is not None and held.request is request

    async def idle(self) -> None:
        """Waits until no request is about to leave."""
        await self._idle.wait()

    def statistics(self) -> DepartureStatistics:
        return DepartureStatistics(
            len(self._held), self._num_detached, self._num_handed_off, self._num_given_up
        )

    # Handing off.

    def begin(self, order: PrefillOrder) -> Departure:
        """The hand-off of a detached request by its router's order.

        Raises WrongEpoch for an order to an earlier life of this worker; PermissionDenied for one
        that no router signed for it; LeaseLost when its state is no longer kept; Stale when it is
        that of other tokens or of another router's request, an attempt for it runs, or it was here
        before; and as prefill for an order that is not for this worker and its model.
        """
        # Before the signature: that of an order to an earlier life is for that one.
        if order.worker_epoch != self._parts.epoch:
            raise WrongEpoch(f"this is epoch {self._parts.epoch}, not {order.worker_epoch}")
        self._signature_check.check_move(order, self._me)
        held = self._held.get(order.context.request_id)
        if held is None:
            raise LeaseLost(f"the state of {order.context.request_id} is not kept here")
        name = held.request.name
        if held.departure or order.context.attempt <= held.request.context.attempt:
            raise Stale(f"attempt {order.context.attempt} comes too late for {name}")
        order = self._order_check.checked_order(order)
        # The order's tokens become the other worker's: it would go on behind them, from this state.
        known = self._parts.engine.scheduler.known_tokens(name)
        is_same = np.array_equal(known, order.request.token_ids)
        if not is_same or held.request.router_id != order.router_id:
            raise Stale(f"{name} has other tokens here, or another router, than in the order")
        side = self._side_for(order)
        self._begin_once(order)
        held.departure = Departure(order, held.request, side, self._parts, self._me)
        return held.departure

    def _begin_once(self, order: PrefillOrder) -> None:
        """Raises Stale for an order that was here before: the state may still be."""
        serial, lifetime = order.signature.serial, order.signature.lifetime_ms / 1000
        self._windows.begin_once(order.router_id, serial, lifetime, self._parts.clock())

    def _side_for(self, order: PrefillOrder) -> SendingSide:
        planes, manifest = self._parts.planes, self._parts.engine.manifest
        if not isinstance(planes, NixlSide) or planes.is_required:
            return self._side
        offered = offered_ranges(manifest, order.request.prompt_len)
        sizes = (manifest.layout(span.kind).slot_bytes * len(span) for span in offered)
        return self._side if sum(sizes) >= MIN_NIXL_BYTES else self._small_side

    def ended(self, departure: Departure) -> None:
        """The attempt is over. If it failed, the state is as it was, and another one may come,
        unless its router has said that none will."""
        held = self._held[departure.order.context.request_id]
        if departure.is_handed_off:
            self._num_handed_off += 1
            self._leave(held)
        elif not held.is_wanted:
            self._give_up(held)
        else:
            held.departure, held.until = None, self._parts.clock() + HOLD_SECONDS

    def _refuse(self, order: StopOrder) -> None:
        held = self._held.get(order.request_id)
        departure = held.departure if held else None
        if departure is not None and departure.order.context.attempt == order.attempt:
            departure.refuse(order.reservation_id)

    def _leave(self, held: _DetachedState) -> None:
        """Frees its slots, but for those that are still being sent."""
        del self._held[held.request.context.request_id]
        # It is not here any more if an error of its own has ended it.
        self._parts.engine.scheduler.cancel(held.request.name, self._parts.clock())
        self._parts.wake.set()
        self._ring_if_idle()

    def _ring_if_idle(self) -> None:
        if not (self._wanted or self._held):
            self._idle.set()
