"""Retracted requests: their resume sets go to the host tier, and come back from there.

The tree keeps its copy until the slots are needed. If that copy is gone, the host's is loaded; if
both are gone, the state is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ferryman.cache.resume import ResumePlan
from ferryman.schedule.events import (
    Event,
    Finished,
    LoadCorrupt,
    LoadsDone,
    RequestFailed,
    Retracted,
    SequenceAdmitted,
)
from ferryman.schedule.request import Request
from ferryman.schedule.scheduler import Scheduler
from ferryman.wire.grpc.rpc import CallTags
from ferryman.wire.hostcache.client import HostLease
from ferryman.worker.host import HostTier


class PreemptedRequests:
    """Requests that were retracted, by their id in the schedule, and their host leases.

    `start` runs a coroutine while the caller goes on; `wake` makes the step loop look for work.
    """

    def __init__(
        self,
        host: HostTier,
        scheduler: Scheduler,
        start: Callable[[Coroutine[Any, Any, None]], object],
        wake: Callable[[], None],
    ) -> None:
        self._host, self._scheduler, self._start, self._wake = host, scheduler, start, wake
        self._away: set[str] = set()
        self._plans: dict[str, ResumePlan] = {}
        self._leases: dict[str, HostLease] = {}
        host.pin_retracted()

    def on_event(self, event: Event, tags: CallTags) -> ResumePlan | None:
        """Takes every event of the schedule; returns the plan if the event brings a request back.

        A lease ends when its loads are done, or will not happen. A request with loads is back when
        they have arrived; corrupt loads make it plan again.
        """
        name = event.request_id
        match event:
            case Retracted(request=request):
                self._away.add(name)
                self._start(self._offload(request, tags))
            case SequenceAdmitted(plan=plan):
                self._plans[name] = plan
                return None if plan.loads else self._is_back(name)
            case LoadsDone():
                return self._is_back(name)
            case LoadCorrupt():
                self._release(name, was_corrupt=True)
            case Finished() | RequestFailed():
                self._is_back(name)
        return None

    def _is_back(self, name: str) -> ResumePlan | None:
        """None for a request that was not away."""
        self._release(name)
        plan = self._plans.pop(name, None)
        was_away = name in self._away
        self._away.discard(name)
        return plan if was_away else None

    async def _offload(self, request: Request, tags: CallTags) -> None:
        lease = await self._host.offload_retracted(request, tags)
        if self._scheduler.offer_host(request.request_id, lease.view):
            self._release(request.request_id)
            self._leases[request.request_id] = lease
            self._wake()
        else:
            self._host.release(lease)  # it no longer waits

    def _release(self, name: str, *, was_corrupt: bool = False) -> None:
        if (lease := self._leases.pop(name, None)) is not None:
            self._host.release(lease, was_corrupt=was_corrupt)
