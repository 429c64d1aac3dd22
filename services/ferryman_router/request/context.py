"""The parts that running requests share, with the budget of retries and the turns of suspects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ferryman.runtime.lifecycle import LifecyclePublisher
from ferryman.wire.redis.index import PrefixIndex
from ferryman_router.request.metrics import RouterMetrics
from ferryman_router.request.worker_client import WorkerClient
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Fleet, WorkerName
from ferryman_router.routing.fleet_listener import Liveness
from ferryman_router.routing.quotas import Quotas
from ferryman_router.served_model import ServedModel

TURN_SECONDS = 2.0


class RetryBudget:
    """At most `share` of the requests in flight may be second or third tries, but a few always.

    It is for requests that fail one by one. The death of a worker or a broken connection is not
    charged, for many share it: a budget that counts it would fail most of a dead worker's requests.
    """

    def __init__(self, share: float = 0.1, floor: int = 4) -> None:
        self._share, self._floor = share, floor
        self._retrying: set[str] = set()

    def __len__(self) -> int:
        return len(self._retrying)

    def try_take(self, request_id: str, num_in_flight: int) -> bool:
        """Whether this request may be tried again; a request counts once until it ends."""
        if request_id in self._retrying:
            return True
        if len(self._retrying) >= max(self._floor, int(num_in_flight * self._share)):
            return False
        self._retrying.add(request_id)
        return True

    def give_back(self, request_id: str) -> None:
        self._retrying.discard(request_id)


class Probation:
    """Suspects one at a time: requests that ran on a worker when it died.

        a worker dies            all that ran on it are suspects: one may have killed it
        a suspect is tried       no other one is sent to a worker before it has drawn a token
        it kills that one too    it fails; the suspects that wait were not there
        it draws a token         it goes on as any other, and the next suspect is tried

    Together they would die together again, and all would fail for what one of them did. A turn has
    an end, for most deaths are chance: a suspect with a long prompt is computed while the next one
    is tried. It begins when workers are found, since the one that died may be the only one.

    Turns are given in the order of arrival. A suspect waits for its turn as long as its deadline
    lets it.
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS) -> None:
        self._turn_seconds = turn_seconds
        self._lock = asyncio.Lock()
        self._tried = ""
        self._end_of_turn: asyncio.TimerHandle | None = None

    async def enter(self, request_id: str) -> None:
        """Waits for this suspect's turn, which lasts until `leave`."""
        await self._lock.acquire()
        self._tried = request_id

    def sent(self, request_id: str) -> None:
        """Workers have the request; if it has a turn, that ends in a while by itself."""
        if self._tried == request_id:
            loop = asyncio.get_running_loop()
            self._end_of_turn = loop.call_later(self._turn_seconds, self.leave, request_id)

    def leave(self, request_id: str) -> None:
        """Ends the turn of this request, if it has one."""
        if self._tried != request_id:
            return
        if self._end_of_turn is not None:
            self._end_of_turn.cancel()
        self._tried, self._end_of_turn = "", None
        self._lock.release()


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The parts that a request needs; `components` joins them. `outlive` runs what must go on when
    the request has ended; `ask_again` has a decode worker send again from all cursors, when tokens
    are missing."""

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
