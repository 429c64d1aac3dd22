"""The parts of the router that a running request uses. `components` joins them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.wire.redis.index import PrefixIndex
from ferryman_router.request.attempt_result import RetryBudget
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.probation import Probation
from ferryman_router.request.worker_client import WorkerClient
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.fleet_listener import Liveness
from ferryman_router.routing.quotas import Quotas
from ferryman_router.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The parts that a request needs. `outlive` runs what must go on when the request has ended;
    `ask_again` has a decode worker send again from all cursors, when tokens are missing."""

    router_id: str
    model: ServedModel
    fleet: Fleet
    dispatcher: Dispatcher
    budget: RetryBudget
    probation: Probation
    workers: WorkerClient
    liveness: Liveness
    ask_again: Callable[[WorkerName], None]
    lifecycle: LifecyclePublisher
    index: PrefixIndex
    metrics: RouterMetrics
    quotas: Quotas
    clock: Callable[[], float]
    outlive: Callable[[Coroutine[Any, Any, None]], object]
    num_in_flight: Callable[[], int]
