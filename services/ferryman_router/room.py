"""The router's parts, joined. Nothing is served yet; that is `service`'s."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ferryman.runtime.background import Background
from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.wire.bus import Bus
from ferryman.wire.index import PrefixIndex
from ferryman.wire.rpc import Channels
from ferryman.wire.subjects import Subjects
from ferryman_router.attendance import Attendance
from ferryman_router.beats import Listener
from ferryman_router.budget import RetryBudget
from ferryman_router.calls import GrpcWorkers
from ferryman_router.desk import Desk, DeskLimits
from ferryman_router.dispatch import Dispatcher
from ferryman_router.fleet import Effect, Fleet
from ferryman_router.journeys import Journeys
from ferryman_router.metrics import RouterMetrics
from ferryman_router.policy import Costs
from ferryman_router.prefetches import Prefetches
from ferryman_router.queue import WaitQueue
from ferryman_router.served import ServedModel
from ferryman_router.settings import LimitSettings
from ferryman_router.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Room:
    """The parts that others need to reach."""

    fleet: Fleet
    desk: Desk
    dispatcher: Dispatcher
    listener: Listener


@dataclass(frozen=True, slots=True)
class Ways:
    """How the router reaches others."""

    bus: Bus
    subjects: Subjects
    channels: Channels
    lifecycle: LifecyclePublisher
    index: PrefixIndex


def make_room(
    limits: LimitSettings, model: ServedModel, router_id: str, ways: Ways, background: Background
) -> Room:
    """Builds everything from plain values and the ways to others."""
    clock = time.monotonic
    fleet, journeys, metrics = Fleet(limits.beat_timeout_seconds), Journeys(), RouterMetrics()
    dispatcher = Dispatcher(
        fleet,
        WaitQueue(limits.max_queued, limits.max_queued_per_tenant),
        costs=Costs(),
        patience=limits.no_worker_seconds,
        clock=clock,
    )
    attendance = Attendance(router_id, fleet, journeys, ways.channels, background, metrics)
    prefetches = Prefetches(
        ways.channels,
        outlive=background.outlive,
        count=lambda outcome: metrics.prefetches.labels(outcome).inc(),
    )
    around = Surroundings(
        router_id=router_id,
        model=model,
        fleet=fleet,
        dispatcher=dispatcher,
        budget=RetryBudget(limits.retry_share, limits.retry_floor),
        workers=GrpcWorkers(fleet, ways.channels, prefetches, attendance.ask_again),
        lifecycle=ways.lifecycle,
        index=ways.index,
        metrics=metrics,
        clock=clock,
        outlive=background.outlive,
        num_in_flight=journeys.__len__,
    )
    desk_limits = DeskLimits(limits.max_in_flight, limits.linger_seconds)
    desk = Desk(around, journeys, background, desk_limits)

    def happened(effect: Effect) -> None:
        attendance.happened(effect, dispatcher, limits.stream_patience_seconds)

    listener = Listener(
        ways.bus, ways.subjects, fleet, happened=happened, background=background, clock=clock
    )
    index = ways.index.statistics
    metrics.watch("index_away", "1 while Redis does not answer.", lambda: index().is_away)
    metrics.watch(
        "index_misses_away", "Lookups not answered so far.", lambda: index().num_misses_away
    )
    metrics.watch("queue_requests", "Requests that wait for a worker.", lambda: len(dispatcher))
    metrics.watch("in_flight_requests", "Requests under way.", lambda: len(journeys))
    return Room(fleet, desk, dispatcher, listener)
