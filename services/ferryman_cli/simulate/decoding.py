"""Decode's side of requests: tokens counted, retracted ones put away and brought back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from ferryman.schedule.events import (
    Admitted,
    Cached,
    Drawn,
    Event,
    Finished,
    LoadsDone,
    Retracted,
)
from ferryman.schedule.request import Request
from ferryman.wire.host_client import HostLease
from ferryman.wire.rpc import CallTags
from ferryman_cli.simulate.clock import now
from ferryman_cli.simulate.result import Tally
from ferryman_cli.simulate.worker import SimulatedWorker


class UnderWay(Protocol):
    """A request as decode sees it."""

    @property
    def arrived(self) -> float: ...

    @property
    def tags(self) -> CallTags: ...

    @property
    def finished(self) -> asyncio.Event: ...


class Decoding:
    """Hears the decode worker's events, in the order of `ferryman_decode.requests`."""

    def __init__(
        self,
        worker: SimulatedWorker,
        tally: Tally,
        attempts: Mapping[str, UnderWay],
        background: asyncio.TaskGroup,
    ) -> None:
        self._worker, self._tally, self._attempts = worker, tally, attempts
        self._background = background
        self._leases: dict[str, HostLease] = {}
        worker.on_events = self._on_events
        worker.host.keep_retracted()

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            attempt = self._attempts.get(event.request_id)
            tags = attempt.tags if attempt else CallTags()
            self._heard(event, tags)
            if isinstance(event, Cached):
                self._worker.host.cached(event, tags)
            elif attempt is not None:
                self._count(event, attempt)

    def _count(self, event: Event, attempt: UnderWay) -> None:
        match event:
            case Drawn(offset=0):
                self._tally.first_seconds.append(now() - attempt.arrived)
            case Retracted():
                self._tally.num_retracted += 1
            case Finished(request_id=name, num_generated=count):
                self._worker.host.ended(name, attempt.tags)
                self._tally.output_tokens += count
                del self._worker.tokens[name]
                attempt.finished.set()

    # Retracted requests.

    def _heard(self, event: Event, tags: CallTags) -> None:
        match event:
            case Retracted(request=request):
                self._background.create_task(self._put_away(request, tags))
            case Admitted(plan=plan):
                if not plan.loads:
                    self._release(event.request_id)
            case LoadsDone() | Finished():
                self._release(event.request_id)

    async def _put_away(self, request: Request, tags: CallTags) -> None:
        lease = await self._worker.host.put_away(request, tags)
        if self._worker.scheduler.offer_host(request.request_id, lease.view):
            self._release(request.request_id)
            self._leases[request.request_id] = lease
            self._worker.ring()
        else:
            self._worker.host.release(lease)

    def _release(self, name: str) -> None:
        if (lease := self._leases.pop(name, None)) is not None:
            self._worker.host.release(lease)
