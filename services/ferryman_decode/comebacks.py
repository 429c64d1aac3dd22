"""Retracted requests: what they would resume from goes to the host tier, and comes back from there.

The tree keeps its copy as long as nobody needs the room; the host's copy is there when it is gone,
and computing anew is there when both are.
"""

from __future__ import annotations

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
    """The host leases of requests that wait to come back, by the schedule's name for them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._leases: dict[str, HostLease] = {}
        parts.host.keep_retracted()

    def heard(self, event: Event, tags: CallTags) -> None:
        """Every event of the schedule. A lease ends when its loads are done, or will never be."""
        match event:
            case Retracted(request=request):
                self._parts.background.start(self._put_away(request, tags))
            case Admitted(plan=plan):
                if not plan.loads:
                    self._release(event.request_id)
            case LoadsDone() | Finished():
                self._release(event.request_id)
            case LoadCorrupt():
                self._release(event.request_id, was_corrupt=True)

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
