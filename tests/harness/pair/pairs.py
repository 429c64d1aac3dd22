"""The ways to build a pair: on fake engines, on tiny models, on any engines, or as one worker."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine.host_fed import PAGE_SIZE
from tests.harness.pair.calls import WorkerPair, paired
from tests.harness.pair.fake_engine import fake_engine
from tests.harness.pair.worker import MakeService, held_by, open_gate, worker, worker_on
from tests.waiting import until

from ferryman.engine.engine import Engine, build_engine
from ferryman.schedule.batch import StepPlan
from ferryman.schedule.limits import IN_TURNS
from ferryman.settings.engine import EngineOptions
from ferryman.wire.plane_values import PlaneChoice
from ferryman_both.server import BothServicer
from ferryman_decode.server import DecodeServicer
from ferryman_prefill.server import PrefillServicer


@asynccontextmanager
async def pair_of_workers(
    make_decode: MakeService = DecodeServicer,
    num_slots: int = 60,
    planes: PlaneChoice = "grpc",
    *,
    make_prefill: MakeService = PrefillServicer,
) -> AsyncIterator[WorkerPair]:
    """Both workers on fake engines, ready for hand-offs on the plane that is asked for."""
    async with (
        worker("prefill", make_prefill, num_slots, planes) as prefill,
        worker("decode", make_decode, num_slots, planes) as decode,
        paired(prefill, decode, planes) as pair,
    ):
        yield pair


@asynccontextmanager
async def pair_of_engines(
    for_prefill: Engine,
    for_decode: Engine,
    planes: PlaneChoice = "grpc",
    *,
    make_prefill: MakeService = PrefillServicer,
    make_decode: MakeService = DecodeServicer,
) -> AsyncIterator[WorkerPair]:
    """Both workers on engines that run, once hand-offs can travel."""
    async with (
        worker_on(for_prefill, "prefill", make_prefill, planes) as prefill,
        worker_on(for_decode, "decode", make_decode, planes) as decode,
        paired(prefill, decode, planes) as pair,
    ):
        yield pair


@asynccontextmanager
async def pair_with(
    prefills: EngineOptions,
    decodes: EngineOptions,
    planes: PlaneChoice = "grpc",
    *,
    make_prefill: MakeService = PrefillServicer,
    make_decode: MakeService = DecodeServicer,
) -> AsyncIterator[WorkerPair]:
    """Both workers on models, with options of their own."""
    with build_engine(prefills) as for_prefill, build_engine(decodes) as for_decode:
        async with pair_of_engines(
            for_prefill, for_decode, planes, make_prefill=make_prefill, make_decode=make_decode
        ) as pair:
            yield pair


@asynccontextmanager
async def pair_on(
    folder: Path, planes: PlaneChoice, ranks: tuple[int, int] = (1, 1), **both: Any
) -> AsyncIterator[WorkerPair]:
    """A prefill worker that takes small chunks, and a decode worker, with options of `both`."""
    prefills = worker_options(folder, chunk_tokens=32, tp_size=ranks[0], decodes=False, **both)
    decodes = worker_options(folder, chunk_tokens=64, tp_size=ranks[1], **both)
    async with pair_with(prefills, decodes, planes) as pair:
        yield pair


@asynccontextmanager
async def one_worker(
    num_slots: int = 60, steps: list[StepPlan] | None = None
) -> AsyncIterator[WorkerPair]:
    """A worker that does both, on a fake engine, as a pair of workers that are one.

    `steps` gets all plans that run. At the end nothing is leased but by the tree.
    """
    gate = open_gate()

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
    """The same on an engine that runs."""
    async with (
        worker_on(engine, "both", BothServicer, gate=gate) as worker,
        paired(worker, worker) as pair,
    ):
        yield pair


def worker_options(
    folder: Path, chunk_tokens: int = 64, tp_size: int = 1, **others: Any
) -> EngineOptions:
    return EngineOptions(
        model=folder,
        dtype="float64",
        page_size=PAGE_SIZE,
        chunk_tokens=chunk_tokens,
        max_running=4,
        max_prealloc=4,
        max_waiting=8,
        memory_bytes=64 << 20,
        recurrent_slots=0,
        prefix_cache=True,
        overlap=True,
        num_threads=1,
        tp_size=tp_size,
        **others,
    )
