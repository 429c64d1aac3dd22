"""Retracted requests: what they would resume from goes to the host tier, and comes back from there.

The tree keeps its copy as long as nobody needs the room; the host's copy is there when it is gone,
and computing anew is there when both are.
"""

from __future__ import annotations

from ferryman.cache.resume import ResumePlan
from ferryman.schedule.events import (
    Admitted,
    Event,
    Finished,
    LoadCorrupt,
    LoadsDone,
    Retracted,
)
from ferryman.schedule.request import Request
from ferryman.wire.host_client import HostLease
from ferryman.wire.rpc import CallTags
from ferryman.worker.shell import Parts


class Comebacks:
    """Requests that are away, by the schedule's name for them, and their host leases."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._away: set[str] = set()
        self._plans: dict[str, ResumePlan] = {}
        self._leases: dict[str, HostLease] = {}
        parts.host.keep_retracted()

    def heard(self, event: Event, tags: CallTags) -> ResumePlan | None:
        """Every event of the schedule; the plan by which this one has a request come back.

        A lease ends when its loads are done, or will never be. With loads to come, a request is
        back when they are there: spoilt ones have it plan again.
        """
        name = event.request_id
        match event:
            case Retracted(request=request):
                self._away.add(name)
                self._parts.background.start(self._put_away(request, tags))
            case Admitted(plan=plan):
                self._plans[name] = plan
                return None if plan.loads else self._is_back(name)
            case LoadsDone():
                return self._is_back(name)
            case LoadCorrupt():
                self._release(name, was_corrupt=True)
            case Finished():
                self._is_back(name)
        return None

    def _is_back(self, name: str) -> ResumePlan | None:
        """None for who was never away."""
        self._release(name)
        plan = self._plans.pop(name, None)
        was_away = name in self._away
        self._away.discard(name)
        return plan if was_away else None

    async def _put_away(self, request: Request, tags: CallTags) -> None:
        lease = await self._parts.host.put_away(request, tags)
        if self._parts.engine.scheduler.offer_host(request.request_id, lease.view):
            self._release(request.request_id)
            self._leases[request.request_id] = lease
            self._parts.bell.set()
        else:
            self._parts.host.release(lease)  # it did not wait so long

    def _release(self, name: str, *, was_corrupt: bool = False) -> None:
        if (lease := self._leases.pop(name, None)) is not None:
            self._parts.host.release(lease, was_corrupt=was_corrupt)
