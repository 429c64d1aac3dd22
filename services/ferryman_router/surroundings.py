"""What a journey needs of the world, as the few calls it makes. The service provides them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.wire.beats import Beat
from ferryman.wire.index import PrefixIndex
from ferryman.wire.values import AbortOrder, PrefillOrder, PrefillProgress
from ferryman_router.budget import RetryBudget
from ferryman_router.dispatch import Dispatcher
from ferryman_router.fleet import Fleet, WorkerName
from ferryman_router.metrics import RouterMetrics
from ferryman_router.orders import PrefetchOrder
from ferryman_router.served import ServedModel


class Workers(Protocol):
    """Calls to workers; failures are FerrymanErrors, a broken connection is WorkerGone."""

    def prefill(self, name: WorkerName, order: PrefillOrder) -> AsyncIterator[PrefillProgress]: ...

    async def abort(self, name: WorkerName, order: AbortOrder) -> None: ...

    def prefetch(self, host: Beat, order: PrefetchOrder) -> None:
        """Has the host-cache begin; nobody waits for it, and it can only be in vain."""
        ...

    def ask_again(self, name: WorkerName) -> None:
        """Tokens are lacking: have the decode worker send from all cursors on."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The router around a journey. `outlive` runs what must go on when the journey has ended."""

    router_id: str
    model: ServedModel
    fleet: Fleet
    dispatcher: Dispatcher
    budget: RetryBudget
    workers: Workers
    lifecycle: LifecyclePublisher
    index: PrefixIndex
    metrics: RouterMetrics
    clock: Callable[[], float]
    outlive: Callable[[Coroutine[Any, Any, None]], None]
    num_in_flight: Callable[[], int]
