"""A router's reports of itself: whether it is ready, its heartbeat, its gauges.

Other routers do not need its heartbeats: people do, and `ferryman roll`, which restarts routers one
by one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ferryman.runtime.membership import Membership
from ferryman.wire.nats.heartbeat import NO_STATE, Heartbeat
from ferryman.wire.redis.index import PrefixIndex
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.metrics import RouterStatistics
from ferryman_router.request.request_table import RequestTable
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import SERVING


class RouterTelemetry:
    """The readiness and the heartbeat of a router."""

    def __init__(self, member: Membership, frontend: Frontend, max_in_flight: int) -> None:
        self.member, self._frontend = member, frontend
        self._max_in_flight = max_in_flight

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        """Ready with one usable worker of each role; degraded while the broker is away. Until then
        it says what is done for each role that has none."""
        now, is_draining = time.monotonic(), self._frontend.is_draining
        workers = {role: len(self._frontend.ctx.fleet.usable(role, now)) for role in SERVING}
        is_ready = all(workers.values()) and not is_draining
        is_connected = self.member.bus.is_connected
        patience = self._frontend.ctx.dispatcher.patience
        lacking = "starting" if patience.is_first_start else "waiting for workers"
        state = "draining" if is_draining else "ready" if is_ready else lacking
        if is_ready and not is_connected:
            state = "degraded"
        starts = list(patience.under_way(now))
        return is_ready, {
            "status": state,
            "workers": workers,
            "broker": is_connected,
            "starts": starts,
        }

    def beat(self, address: str) -> Heartbeat:
        """The heartbeat of the router at this gRPC address. One that hears of no workers yet is not
        ready: another one must not be restarted before."""
        ctx = self._frontend.ctx
        num_queued = len(ctx.dispatcher)
        is_ready, _ = self.readiness()
        return Heartbeat(
            role=self.member.role,
            worker_id=self.member.worker_id,
            epoch=self.member.epoch,
            address=address,
            is_ready=is_ready,
            state=ctx.fleet.state() or NO_STATE,
            max_len=self._frontend.max_prompt_len + 1,
            num_running=max(0, len(self._frontend.requests) - num_queued),
            max_running=self._max_in_flight,
            num_queued=num_queued,
        )


def router_statistics(
    index: PrefixIndex, dispatcher: Dispatcher, requests: RequestTable
) -> RouterStatistics:
    """The gauges that each scrape reads."""
    now = index.statistics()
    return RouterStatistics(
        index_away=now.is_away,
        index_misses_away=now.num_misses_away,
        index_forged=now.num_forged,
        index_refused=now.num_refused,
        queue_requests=len(dispatcher),
        queue_seconds=dispatcher.queue_seconds(),
        in_flight_requests=len(requests),
    )
