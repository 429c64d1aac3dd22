"""One attempt at one prompt: queued → reserved → admitted → chunks sent as they finish → committed.

The prompt is computed under its own name in the schedule, while its hand-off sends what is ready.
"""

from __future__ import annotations

from functools import partial

from ferryman.grammar.compiler import CompiledGrammar
from ferryman.schedule.batch import Sampled
from ferryman.schedule.sequence import Goal
from ferryman.wire import values
from ferryman.wire.hostcache.client import HostLease
from ferryman.wire.values import PrefillOrder
from ferryman.worker.decode_client import DecodeClient
from ferryman.worker.handoff_writer import HandoffDone, HandoffSource, HandoffWriter
from ferryman.worker.send_leases import OutgoingUnits
from ferryman_prefill.prompt_attempt import PrefillContext, PromptAttempt


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
        self._writer: HandoffWriter | None = None

    async def _run(self, lease: HostLease) -> None:
        source = HandoffSource(
            held_as=self.name,
            deadline=self._end,
            fill=partial(self._fill, lease),
            usage=lambda: self._usage,
            leave=self._leave_schedule,
            done=self._handed_off,
        )
        self._writer = HandoffWriter(self.order, self._decode, self._ctx.sending, source)
        await self._writer.run()

    def refuse(self, reservation_id: str) -> None:
        """Decode gave up the reservation, perhaps before its answer to Reserve has arrived."""
        if self._writer is not None:  # otherwise nothing was asked for yet
            self._writer.refuse(reservation_id)

    async def _fill(self, lease: HostLease, outgoing: OutgoingUnits) -> Sampled:
        """Computes the prompt; its pages are sent chunk by chunk."""
        self._ctx.engine.scheduler.submit(self._request, Goal.HAND_OFF, lease.view)
        self.is_scheduled = True
        self._ctx.wake.set()
        return await self._computed(lease, outgoing.up_to)

    def _handed_off(self, done: HandoffDone) -> None:
        seconds = round(done.seconds, 6)
        self._say_last("handed_off", bytes=done.num_bytes, seconds=seconds, **done.facts)
        self.progress.put_nowait(values.PrefillHandedOff(done.usage, done.num_bytes, done.seconds))
