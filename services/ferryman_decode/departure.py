"""One attempt to hand a request off that leaves this worker, by its router's order."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ferryman.errors import DeadlineExceeded, FerrymanError
from ferryman.runtime.lifecycle import Fact
from ferryman.schedule.batch import Sampled
from ferryman.wire.grpc.status import failure_of
from ferryman.wire.values import PrefillHandedOff, PrefillOrder, Usage, WorkerAddress
from ferryman.worker.decode_client import DecodeClient
from ferryman.worker.handoff_writer import (
    HandoffDone,
    HandoffSource,
    HandoffWriter,
    SendingSide,
)
from ferryman.worker.send_leases import OutgoingUnits
from ferryman.worker.worker_app import WorkerContext
from ferryman_decode.decode_request import DecodeRequest


class Departure:
    """One attempt to hand a detached request off, by the router's order."""

    def __init__(
        self,
        order: PrefillOrder,
        request: DecodeRequest,
        side: SendingSide,
        parts: WorkerContext,
        me: WorkerAddress,
    ) -> None:
        """`me` is this worker as a writer."""
        self.order = order
        self._request, self._parts = request, parts
        manifest = parts.engine.manifest
        seen = without_last(order, manifest.page_size)
        drawn = int(order.request.token_ids[-1])
        decode = DecodeClient(seen, parts.channels, me, manifest, side.transport, drawn)
        source = HandoffSource(
            held_as=request.name,
            deadline=parts.clock() + order.context.deadline_seconds,
            fill=self._fill,
            usage=lambda: request.usage,
            leave=_stays,
            done=self._handed_off,
        )
        self._writer = HandoffWriter(seen, decode, side, source)
        self._done: HandoffDone | None = None

    @property
    def usage(self) -> Usage:
        """The account of its prompt: nothing of it is computed here."""
        return self._request.usage

    @property
    def is_handed_off(self) -> bool:
        return self._done is not None

    def refuse(self, reservation_id: str) -> None:
        """The other worker gave up the reservation."""
        self._writer.refuse(reservation_id)

    async def run(self) -> PrefillHandedOff:
        """Returns when the other worker has the request. Raises the error that ended it."""
        to = self.order.decode.worker_id
        self._say("moving", to=to, tokens=self.order.request.prompt_len - 1)
        try:
            async with asyncio.timeout(self.order.context.deadline_seconds):
                await self._writer.run()
        except asyncio.CancelledError:
            self._say_failed("cancelled")
            raise
        except TimeoutError as error:
            self._say_failed("failed", reason="DeadlineExceeded")
            raise DeadlineExceeded("the deadline passed while the request moved") from error
        except Exception as error:
            self._say_failed("failed", reason=failure_of(error).reason)
            raise
        if self._done is None:
            raise FerrymanError("a hand-off ended without an end")
        return PrefillHandedOff(self._done.usage, self._done.num_bytes, self._done.seconds)

    async def _fill(self, _outgoing: OutgoingUnits) -> Sampled:
        """All units are ready, and the token behind them is drawn."""
        return self._request.last

    def _handed_off(self, done: HandoffDone) -> None:
        self._done = done
        self._say("handed_off", bytes=done.num_bytes, seconds=round(done.seconds, 6), **done.facts)

    def _say_failed(self, event: str, **facts: Fact) -> None:
        if self._done is None:
            self._say(event, **facts)

    def _say(self, event: str, **facts: Fact) -> None:
        context = self.order.context
        self._parts.lifecycle.publish(
            context.request_id, context.attempt, event, traceparent=context.traceparent, **facts
        )


def _stays() -> None:
    """The state stays until it is handed off: another attempt may follow one that fails."""


def without_last(order: PrefillOrder, page_size: int) -> PrefillOrder:
    """The order as the receiving worker sees it: the last token drawn is not consumed, and becomes
    the first one of its hand-off."""
    request = order.request
    token_ids = request.token_ids[:-1]
    shorter = replace(
        request,
        token_ids=token_ids,
        keys=request.keys[: len(token_ids) // page_size],
        num_generated=request.num_generated - 1,
    )
    return replace(order, request=shorter)
