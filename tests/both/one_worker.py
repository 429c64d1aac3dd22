"""A worker that prefills and decodes, in this process, over real gRPC on loopback."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.worker.fake_engine import fake_engine
from tests.worker.pair import WorkerPair, held_by, paired, until, worker_on

from ferryman.engine.engine import Engine
from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry, Violation, check
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.step_order import IN_TURNS
from ferryman_both.server import BothServicer


@asynccontextmanager
async def one_worker(
    num_slots: int = 60, steps: list[StepPlan] | None = None
) -> AsyncIterator[WorkerPair]:
    """As a pair of workers that are one, on stamps; `steps` gets all plans that run. At the end
    nothing is leased but by the tree."""
    gate = threading.Event()
    gate.set()

    def pace(plan: StepPlan) -> None:
        if steps is not None:
            steps.append(plan)
        held_by(gate)

    with fake_engine(num_slots=num_slots, pace=pace, order=IN_TURNS) as engine:
        async with one_worker_on(engine, gate) as pair:
            yield pair
            await until(lambda: not pair.decode.leased())


@asynccontextmanager
async def one_worker_on(
    engine: Engine, gate: threading.Event | None = None
) -> AsyncIterator[WorkerPair]:
    async with (
        worker_on(engine, "both", BothServicer, gate=gate) as worker,
        paired(worker, worker) as pair,
    ):
        yield pair


def said_by(pair: WorkerPair) -> list[LifecycleEntry]:
    """All lifecycle events of the worker, in order."""
    bus: Any = pair.decode.parts.lifecycle._bus
    return [decode_event(payload) for _subject, payload in bus.said]


def violations(pair: WorkerPair, *finished: str) -> list[Violation]:
    """The findings of `ferryman trace --check` in all events of the worker.

    A router adds its own, for all requests, and for those that it has seen `finished`.
    """
    said = said_by(pair)
    return check([*said, *_by_router({event.request_id for event in said}, finished)])


def _by_router(request_ids: set[str], finished: tuple[str, ...]) -> list[LifecycleEntry]:
    found = []
    for request_id in request_ids:
        one = LifecycleEntry(ROUTER, "router-1", 1, request_id, 1, 1, "received", {})
        found += [one, replace(one, seq=2, name="routed")]
        if request_id in finished:
            found.append(replace(one, seq=3, name="finished", facts={"reason": "length"}))
    return found
