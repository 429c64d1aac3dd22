"""The ledger of a router: all that its requests take, which is back when they have ended.

A call of the wiring that gives something back fails no test of the parts if it is left out. So
every cluster ends here: what is under way is cancelled, and then the router, and its workers,
hold nothing. `left_behind` is the same for routers that are gone, however a test built them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.harness.router.fake_worker import FakeRouterWorker

from ferryman_router.components import Components
from ferryman_router.intake.body_intake import BodyMemory
from ferryman_router.intake.frontend import Frontend
from ferryman_router.request.token_streams import WorkerStreams
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet_listener import FleetListener

# The longest farewell of a call that has ended; an abort and a prefetch take two seconds at most.
SETTLING_SECONDS = 20.0
# Jobs that belong to a worker, or to the time in which a reader may come back.
STANDING_JOBS = {
    "TokenStream.run",
    "FleetListener._ask_snapshot",
    "Liveness._prove",
    "Liveness._find_out",
    "Frontend._linger",
}

# Tasks that a request starts beside its own: a call to prefill, and a look whether its client left.
REQUEST_TASKS = {"PrefillCall._follow", "_disconnected"}

Held = dict[str, Any]


class RouterLedger:
    """All that the requests of one router hold, by holder."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def held(self) -> Held:
        parts = self._components
        entries = {
            **_of_requests(parts.frontend),
            **_of_queue(parts.dispatcher),
            **_of_workers(parts.listener, _streams(parts)),
            "claims on workers": {
                worker.name.worker_id: worker.claims for worker in parts.fleet if worker.claims
            },
        }
        return _some(entries)

    async def settle(self, workers: Iterable[FakeRouterWorker] = ()) -> None:
        """Cancels all requests; fails with what the router, or a worker that lives, holds then."""
        frontend = self._components.frontend
        for runner in frontend.requests:
            frontend.cancel(runner, "the test has ended")
        living = [worker for worker in workers if not worker.dead.is_set()]
        end = time.monotonic() + SETTLING_SECONDS
        while held := _some({**self.held(), **_jobs(self._components), **_at_workers(living)}):
            assert time.monotonic() < end, f"not given back: {held}"
            await asyncio.sleep(0.002)


def _some(entries: Held) -> Held:
    return {holder: taken for holder, taken in entries.items() if taken}


def _of_requests(frontend: Frontend) -> Held:
    ctx, requests = frontend.ctx, frontend.requests
    ended = [runner for _, runner in requests._ended.values()]
    uses = ctx.quotas._uses.items()
    return {
        "requests": list(requests.under_way),
        "tasks of requests": list(frontend._tasks),
        "readers": [one.asked.request_id for one in ended if one.output_log.num_listeners],
        "requests of tenants": {name: n for name, use in uses if (n := use.num_in_flight)},
        "retries": ctx.budget._retrying,
        "a suspect's turn": ctx.probation._tried or ctx.probation._lock.locked(),
        "the end of a turn": ctx.probation._end_of_turn,
        "prefetches": ctx.workers._num_prefetches,
    }


def _of_queue(dispatcher: Dispatcher) -> Held:
    queue = dispatcher._queue
    return {
        "places in the queue": len(queue),
        "lines of tenants": list(queue._lines),
        "tokens in the queue": queue.cost,
        "waits": list(dispatcher._waiting),
        "time in which requests wait": dispatcher.forecast.rate._waiting_since,
        "rows that decode": dispatcher.forecast.pace.num_rows,
    }


def _streams(components: Components) -> WorkerStreams:
    """The token streams, which the context reaches by one call alone."""
    streams = components.frontend.ctx.ask_again.__self__  # type: ignore[attr-defined]
    assert isinstance(streams, WorkerStreams)
    return streams


def _of_workers(listener: FleetListener, streams: WorkerStreams) -> Held:
    """The things that are kept for workers that have left."""
    fleet = listener._fleet
    lists = {
        "token streams": streams._streams,
        "wanted snapshots": listener._asking,
    }
    probes = listener._liveness._probes.items()
    ended = [name for name, probe in probes if probe.done()]
    return {"probes that have ended": ended} | {
        f"{what} of workers that left": gone
        for what, names in lists.items()
        if (gone := [name for name in names if fleet.get(name) is None])
    }


def _jobs(components: Components) -> Held:
    """Calls and other tasks of a request that go on after it."""
    tasks = [name for name in map(_name, asyncio.all_tasks()) if name in REQUEST_TASKS]
    jobs = [_name(task) for task in components.frontend._background._tasks]
    streams = _streams(components)._streams
    return {
        "tasks": tasks,
        "jobs": [job for job in jobs if job not in STANDING_JOBS],
        "token streams beside one of each worker": jobs.count("TokenStream.run") - len(streams),
    }


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


def _at_workers(workers: Iterable[FakeRouterWorker]) -> Held:
    return {worker.worker_id: worker.held() for worker in workers}


@contextmanager
def left_behind() -> Iterator[None]:
    """All routers that are built in the block hold nothing at its end, nor do the memories for
    bodies."""
    ledgers: list[RouterLedger] = []
    memories: list[BodyMemory] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Components, "__init__", _noting(Components, ledgers, RouterLedger))
        patch.setattr(BodyMemory, "__init__", _noting(BodyMemory, memories, lambda made: made))
        yield
    held = [held for ledger in ledgers if (held := ledger.held())]
    assert not held, f"not given back: {held}"
    assert not any(memory.num_bytes for memory in memories), "bodies are still counted"


def _noting(cls: Any, notes: list[Any], entry: Any) -> Any:
    """The constructor of a class, which also notes what it makes."""
    make = cls.__init__

    def note(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        notes.append(entry(self))

    return note
