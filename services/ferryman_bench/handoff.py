"""`ferryman bench handoff`: the time from Reserve to Commit, beside a prefill alone.

Real prefill and decode services run on loopback, without a router. They are child processes with
their own broker. Prompts are new each time, so nothing is reused and every page is sent.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import StateManifest
from ferryman.errors import Unavailable
from ferryman.runtime.embedded import nats_command, started
from ferryman.schedule.request import Request, SamplingParams
from ferryman.settings.sources import as_environment
from ferryman.wire.codec.prefill import prefill_order_to_wire, progress_from_wire
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.grpc.status import typed_errors
from ferryman.wire.v1.prefill_pb2_grpc import PrefillServiceStub
from ferryman.wire.values import PrefillHandedOff, PrefillOrder, RequestContext, WorkerAddress
from ferryman_bench.model_room import load_bench_model, make_room
from ferryman_bench.random_model import make_random_model
from ferryman_bench.report import ReportRow, show
from ferryman_bench.shape import shape_named
from ferryman_bench.timer import seconds_of
from ferryman_launcher.readiness import ready_event

HAND_OFFS = 6
MEMORY_BYTES = 512 << 20
DEADLINE_SECONDS = 120.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """The model and the settings of both workers."""

    folder: Path
    dtype: str
    threads: int
    manifest: StateManifest
    vocab_size: int


def hand_offs(engine: BenchEngine, prompt_len: int) -> list[PrefillHandedOff]:
    """Prefill's reports on HAND_OFFS hand-offs in sequence, without the first, which warms up."""
    with started(nats_command, engine.folder / "nats") as nats, _workers(engine, nats.url) as found:
        return asyncio.run(_hand_offs(engine, found, prompt_len))[1:]


@contextmanager
def _workers(engine: BenchEngine, nats_url: str) -> Iterator[Mapping[str, WorkerAddress]]:
    children = {role: _start(role, engine, nats_url) for role in ("prefill", "decode")}
    try:
        yield {role: _address(role, child) for role, child in children.items()}
    finally:
        for child in children.values():
            child.terminate()
        for child in children.values():
            _end(child)


def _start(role: str, engine: BenchEngine, nats_url: str) -> subprocess.Popen[str]:
    settings = {
        "model": engine.folder,
        "dtype": engine.dtype,
        "page_size": engine.manifest.page_size,
        "max_running": 4,
        "memory_bytes": MEMORY_BYTES,
        "num_threads": engine.threads,
        "nats_url": nats_url,
        "parent_pid": os.getpid(),
        "drain_seconds": STOP_SECONDS,
    }
    environment = {**os.environ, **as_environment(settings, role)}
    log = (engine.folder / f"{role}.log").open("w")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", f"ferryman_{role}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def _address(role: str, child: subprocess.Popen[str]) -> WorkerAddress:
    assert child.stdout is not None
    for line in child.stdout:
        if said := ready_event(line):
            return WorkerAddress(said["worker_id"], said["address"], said["epoch"])
    raise Unavailable(f"the {role} worker ended with status {child.wait()} before it was ready")


def _end(child: subprocess.Popen[str]) -> None:
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()


async def _hand_offs(
    engine: BenchEngine, workers: Mapping[str, WorkerAddress], prompt_len: int
) -> list[PrefillHandedOff]:
    async with Channels() as channels:
        stub = PrefillServiceStub(channels.to(workers["prefill"].address))
        orders = [_order(engine, workers, prompt_len, index) for index in range(HAND_OFFS)]
        return [await _handed_off(stub, order) for order in orders]


async def _handed_off(stub: Any, order: PrefillOrder) -> PrefillHandedOff:
    with typed_errors():
        async for message in stub.Prefill(prefill_order_to_wire(order), timeout=DEADLINE_SECONDS):
            progress = progress_from_wire(message)
            if isinstance(progress, PrefillHandedOff):
                return progress
    raise Unavailable("the prefill worker said nothing of a hand-off")


def _order(
    engine: BenchEngine, workers: Mapping[str, WorkerAddress], prompt_len: int, index: int
) -> PrefillOrder:
    manifest = engine.manifest
    drawn = np.random.default_rng(index).integers(0, engine.vocab_size, prompt_len)
    tokens = as_token_ids(drawn)
    keys = page_keys(root_key(manifest), tokens, manifest.page_size)
    request_id = f"bench-{index}"
    return PrefillOrder(
        context=RequestContext(request_id, 1, DEADLINE_SECONDS),
        worker_epoch=workers["prefill"].epoch,
        decode=workers["decode"],
        router_id="bench",
        request=Request(request_id, tokens, keys, SamplingParams(max_tokens=1, temperature=0.0)),
        manifest_digest=manifest.digest,
    )


@dataclass(frozen=True, slots=True)
class HandOffBenchOptions:
    """The model, and the length of the prompts."""

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    threads: int = 2
    prompt_len: int = 2048
    repeats: int = 4


def run_bench_handoff(choice: HandOffBenchOptions, *, as_json: bool) -> int:
    torch.set_num_threads(choice.threads)
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name, torch.inference_mode():
        folder = Path(name)
        millions = make_random_model(shape_named(choice.shape), choice.dtype, folder) / 1e6
        row = _hand_off_row(folder, choice)
    title = f"{choice.shape}, {millions:.1f} M parameters, {choice.dtype}"
    show(f"ferryman bench handoff: {title}, {choice.threads} threads", [row], as_json=as_json)
    return 0


def _hand_off_row(folder: Path, choice: HandOffBenchOptions) -> ReportRow:
    """The time from Reserve to Commit beside that of a prefill alone, which it includes."""
    model = load_bench_model(folder, choice.dtype)
    room = make_room(model, 1, choice.prompt_len)
    alone = seconds_of(
        lambda: room.prefill(torch.randint(model.vocab_size, (choice.prompt_len,))),
        choice.repeats,
    )
    engine = BenchEngine(folder, choice.dtype, choice.threads, model.manifest, model.vocab_size)
    found = hand_offs(engine, choice.prompt_len)
    millis = [done.seconds * 1e3 for done in found]
    name = f"hand-off of {choice.prompt_len}, {found[0].num_bytes / 1e6:.0f} MB"
    prefill = (alone.median * 1e3, alone.least * 1e3)
    ratio = prefill[1] / min(millis)
    return ReportRow(name, "ms", median(millis), min(millis), "prefill alone", *prefill, ratio)
