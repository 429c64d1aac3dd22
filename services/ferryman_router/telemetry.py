"""Heartbeats of a router, and its answers to orders.

Other routers do not need them: people do, and `ferryman roll`, which restarts routers one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ferryman.errors import InvalidRequest
from ferryman.wire.nats.bus import Bus, BusMessage
from ferryman.wire.nats.heartbeat import (
    HEARTBEAT_SECONDS,
    NO_STATE,
    ROUTER,
    Heartbeat,
    heartbeat_to_bytes,
)
from ferryman.wire.nats.subjects import ControlSubject, Subjects
from ferryman_router.frontend import Frontend


@dataclass(frozen=True, slots=True)
class RouterLife:
    """One life of a router, and its gRPC door."""

    worker_id: str
    epoch: int
    address: str


class RouterTelemetry:
    """Sends a heartbeat each second; takes orders from the control subject."""

    def __init__(
        self,
        life: RouterLife,
        frontend: Frontend,
        bus: Bus,
        subjects: Subjects,
        *,
        max_in_flight: int,
        is_ready: Callable[[], bool],
        order_drain: Callable[[], None],
    ) -> None:
        self._life, self._frontend = life, frontend
        self._bus, self._subjects = bus, subjects
        self._max_in_flight, self._is_ready = max_in_flight, is_ready
        self._order_drain = order_drain

    async def run(self) -> None:
        """Sends heartbeats and takes orders, for ever."""
        subject = self._subjects.beat(ROUTER, self._life.worker_id)
        pattern = self._subjects.all_control_of(self._life.worker_id)
        async with self._bus.answering(pattern, self._obey):
            while True:
                self._bus.offer(subject, heartbeat_to_bytes(self._beat()))
                await asyncio.sleep(HEARTBEAT_SECONDS)

    def _beat(self) -> Heartbeat:
        """A router that hears of no workers yet is not ready: another one must not go before."""
        ctx = self._frontend.ctx
        num_queued = len(ctx.dispatcher)
        return Heartbeat(
            role=ROUTER,
            worker_id=self._life.worker_id,
            epoch=self._life.epoch,
            address=self._life.address,
            is_ready=self._is_ready(),
            state=ctx.fleet.state() or NO_STATE,
            max_len=self._frontend.max_prompt_len + 1,
            num_running=max(0, len(self._frontend.requests) - num_queued),
            max_running=self._max_in_flight,
            num_queued=num_queued,
        )

    async def _obey(self, message: BusMessage) -> bytes:
        subject = self._subjects.parse(message.subject)
        assert isinstance(subject, ControlSubject), "only control subjects are answered"
        if subject.verb != "drain":
            raise InvalidRequest(f"no order to a router is called {subject.verb!r}", "verb")
        self._order_drain()
        return b'{"draining": true}'
