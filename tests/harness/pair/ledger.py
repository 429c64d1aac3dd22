"""The ledger of a worker: all that its requests take, which is back when they have ended.

A call of the wiring that gives something back fails no test of the parts if it is left out. So
every worker of this harness ends here, in two looks:

    at once     what is under way is aborted; then neither schedule, slots, reservations, sends,
                loads, leases nor tasks are a request's
    later       the clock goes on by more than any memory of ended requests lasts; then none is left

A worker whose test fails, or that ends by itself, is not looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from ferryman.runtime.background import Background
from ferryman.schedule.scheduler import Scheduler
from ferryman.wire.handoff.lent_memory import FRAME_BYTES
from ferryman.wire.handoff.memory_lender import MAX_CALLERS, MemoryLender
from ferryman.worker.handoff_transport import HandoffTransport
from ferryman.worker.host import HostTierBridge
from ferryman.worker.send_leases import SendLeases
from ferryman.worker.worker_app import WorkerContext
from ferryman_both.server import BothServicer
from ferryman_decode.departures import Departures
from ferryman_decode.handoff_receiver import HandoffReceiver
from ferryman_decode.nixl_receiver import NixlReceiver
from ferryman_decode.requests import Requests
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer

# A writer that decode gave up is asked every half second, and a send has two to end.
SETTLING_SECONDS = 20.0
# Longer than a request, an attempt or a reservation that has ended is remembered.
LATER_SECONDS = 3600.0
# Jobs that belong to a writer's life, not to a request.
STANDING_JOBS = {
    "MemoryLender._answer",
    "NixlReceiver._hear",
    "NixlReceiver._watch_writer_death",
    "NixlReceiver._open",
}

Held = dict[str, Any]


class WorkerLedger:
    """All that the requests of one worker hold, by holder."""

    def __init__(
        self, service: object, parts: WorkerContext, put_forward: Callable[[float], None]
    ) -> None:
        """`put_forward` moves the worker's clock on by so many seconds."""
        self._services = tuple(_services(service))
        self._parts, self._put_forward = parts, put_forward

    async def settle(self) -> None:
        """Aborts all requests; fails with what the worker holds then, or remembers for too long."""
        for service in self._services:
            if isinstance(service, DecodeServicer):
                _abort_all(service)
        self._parts.wake.set()
        await self._until_back("not given back", self.held)
        self._put_forward(LATER_SECONDS)
        await self._until_back("never forgotten", lambda: {**self.held(), **self.remembered()})

    async def _until_back(self, complaint: str, held: Callable[[], Held]) -> None:
        end = time.monotonic() + SETTLING_SECONDS
        while taken := held():
            assert time.monotonic() < end, f"{complaint} by {self._parts.worker_id}: {taken}"
            await asyncio.sleep(0.002)

    def held(self) -> Held:
        entries = {
            **_of_schedule(self._parts.engine.scheduler),
            **_of_host(self._parts.host),
            "jobs": list(_jobs(self._parts.background)),
        }
        for service in self._services:
            match service:
                case BothServicer():
                    entries["hand-offs within the worker"] = list(service._local._usage)
                case PrefillServicer():
                    entries |= _of_prefill(service)
                case DecodeServicer():
                    entries |= _of_decode(service)
        return _some(entries)

    def remembered(self) -> Held:
        """Requests that ended long ago."""
        entries: Held = {}
        for service in self._services:
            if isinstance(service, DecodeServicer):
                requests, table = service.requests, service.receiver.table
                entries |= {
                    "requests": list(requests._by_name),
                    "attempts": list(requests._attempts),
                    "times of their ends": list(requests._ended),
                    "tombstones": len(table._tombstones),
                }
        return _some(entries)


def _services(service: object) -> Iterator[object]:
    """A worker's service, and those that it consists of."""
    yield service
    if isinstance(service, BothServicer):
        yield service._prefill
        yield service._decode


def _some(entries: Held) -> Held:
    return {holder: taken for holder, taken in entries.items() if taken}


def _abort_all(service: DecodeServicer) -> None:
    """As their routers do it. State that waits for a router to move it is given up, too."""
    under_way = [one for one in service.requests._by_name.values() if not one.is_over]
    for context in (request.context for request in under_way):
        service.requests.abort(context.request_id, context.attempt, "the test has ended")
        service._aborts.free_reservation(context.request_id, context.attempt)
    departures = service._departures
    for held in tuple(departures._held.values()):
        if held.departure is None:
            departures._leave(held)


def _of_schedule(scheduler: Scheduler) -> Held:
    table, ledgers = scheduler.sequences, scheduler.ledgers()
    holders = {kind: set(ledger.by_role) - {"tree"} for kind, ledger in ledgers.items()}
    return {
        "slots": {str(kind): roles for kind, roles in holders.items() if roles},
        "slots that are neither free nor leased": [
            str(kind) for kind, ledger in ledgers.items() if not ledger.balances
        ],
        "requests that wait for slots": len(table.waiting),
        "requests with slots": list(table.by_id),
        "reserved requests": list(table.reserved),
        "steps under way": scheduler.num_in_flight,
        "an audit": scheduler.audits.name,
    }


def _of_host(host: object) -> Held:
    """Leases in the host tier, and reports to it that nobody sent."""
    if not isinstance(host, HostTierBridge):
        return {}
    attachment = host._client.attachment
    is_attached = attachment.link is not None
    return {
        "leases of the host tier": list(attachment._held),
        "reports to the host tier": attachment._releases if is_attached else [],
        "stores that wait for their turn": host._client._num_waiting,
    }


def _jobs(background: Background) -> Iterator[str]:
    for task in background._tasks:
        name = getattr(task.get_coro(), "__qualname__", "")
        if name not in STANDING_JOBS:
            yield name


def _of_prefill(service: PrefillServicer) -> Held:
    ctx = service._ctx
    max_running = ctx.engine.scheduler.limits.concurrency.max_running
    return {
        "attempts": list(service._attempts),
        "places of running attempts": max_running - ctx.run_limit._value,
        "grammars to compile": service._grammars._num_waiting,
        **_of_writer("prefill", service._send_leases, service._transport),
    }


def _of_writer(writer: str, leases: SendLeases, transport: HandoffTransport) -> Held:
    memories = transport.memories
    used = {
        ticket.hex()[:8]: store.memory.content.nbytes
        for ticket, store in memories._stores.items()
        if store.num_free < len(store.memory.content) // FRAME_BYTES
    }
    return {
        f"sends of {writer}": list(leases._held),
        f"holds of {writer}": list(leases._table._entries),
        f"farewells of {writer}": list(leases._leaving),
        f"memory that {writer} fetches": list(memories._fetching),
        f"frames that {writer} fills": used,
    }


def _of_decode(service: DecodeServicer) -> Held:
    return {
        **_of_requests(service.requests),
        **_of_receiver(service.receiver),
        **_of_departures(service._departures),
        **_of_agents(service._nixl_receiver),
        **_of_lender(service.lender),
        "loads of reservations": list(service._host_loads._running),
        "grammars to compile": service._grammars._num_waiting,
        "streams": list(service._streams._open),
        "tokens to send": list(service._streams._gathered),
    }


def _of_requests(requests: Requests) -> Held:
    names, preempted = requests._by_name, requests._preempted
    attempts = [one.name for mine in requests._attempts.values() for one in mine]
    return {
        "requests under way": list(requests._deadlines),
        "requests without an end": sorted(set(names) - set(requests._ended)),
        "attempts that are no requests": sorted(set(attempts) ^ set(names)),
        "grammars": [name for name, request in names.items() if request.grammar is not None],
        "tokens to tell": list(requests._told),
        "retracted requests": list(preempted._away),
        "leases of retracted requests": list(preempted._leases),
        "plans of admitted requests": list(preempted._plans),
        "a request that keeps the worker busy": requests.is_busy or not requests._idle.is_set(),
    }


def _of_receiver(receiver: HandoffReceiver) -> Held:
    table = receiver.table
    return {
        "reservations": {
            entry.reservation.reservation_id: str(entry.state) for entry in table._live.values()
        },
        "slots of reservations": list(receiver._slots),
        "digests of reservations": list(receiver._hashed._open),
        "grants": list(receiver.granted),
        "ended reservations beyond the bound": max(
            0, len(table._closed) - table._limits.max_closed
        ),
    }


def _of_departures(departures: Departures) -> Held:
    side = departures._side
    return {
        "requests that are to leave": list(departures._wanted),
        "state that is to leave": list(departures._held),
        "a departure that keeps the worker": not departures._idle.is_set(),
        **_of_writer("decode", side.send_leases, side.transport),
    }


def _of_agents(receiver: NixlReceiver) -> Held:
    agents = [one for life in receiver._lives.values() for one in life.writer_agents]
    return {
        "openings of agents": list(receiver._openings),
        "agents that listen": [one.writer for one in agents if one.agent._num_listening],
    }


def _of_lender(lender: MemoryLender) -> Held:
    """Callers that have shown no ticket yet; one place is that of the next."""
    places = MAX_CALLERS - (1 if lender.place else 0)
    return {
        "callers for memory": places - lender._callers._value,
        "loans without their tickets": [
            loan.writer for ticket, loan in lender._loans.items() if loan.ticket != ticket
        ],
    }
