"""`ferryman bench requests`: whole requests, by the offline engine and through a cluster.

A round sends all requests at once to one engine after the other. Prompts are new in each round, so
nothing is reused. The cluster is one prefill and one decode worker with a router, and its client is
this repository's own. Developers set other engines beside the two (tools/bench).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman_bench.bench_cluster import BenchCluster, bench_cluster, bench_options
from ferryman_bench.engine_process import BenchModel, EngineProcess
from ferryman_bench.hardware import machine_now
from ferryman_bench.offline_engine import (
    MAX_RUNNING,
    MEMORY_BYTES,
    engine_fields,
    offline_engine,
)
from ferryman_bench.random_model import make_random_model, write_tokenizer
from ferryman_bench.report import figure, print_json, titled_table
from ferryman_bench.shape import VOCAB_SIZE, shape_named

CLUSTER = "cluster 1+1"
DEADLINE_SECONDS = 600.0
OpenEngines = Callable[[BenchModel], AbstractContextManager[Sequence[EngineProcess]]]


@dataclass(frozen=True, slots=True)
class RequestBenchOptions:
    """`concurrent`: how many requests are sent at once, one figure after the other."""

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    threads: int = 2
    rounds: int = 3
    concurrent: tuple[int, ...] = (1, 8)
    prompt_len: int = 512
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class ServedRound:
    """One round of one engine: seconds until the last token, and each request's arrivals in seconds
    after the start (none where an engine answers at once)."""

    seconds: float
    arrivals: tuple[tuple[float, ...], ...]

    @property
    def firsts(self) -> list[float]:
        return [tokens[0] for tokens in self.arrivals]

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens of one request."""
        return [after - before for tokens in self.arrivals for before, after in pairwise(tokens)]


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """All rounds of one engine under `concurrent` requests of `max_tokens`."""

    engine: str
    concurrent: int
    max_tokens: int
    rounds: tuple[ServedRound, ...]

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the rounds."""
        return self.concurrent * self.max_tokens / median(one.seconds for one in self.rounds)

    def ratio(self, peer: ServedLoad) -> float:
        """The speed as a multiple of the peer's, the median over the rounds."""
        pairs = zip(self.rounds, peer.rounds, strict=True)
        return median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": f"{self.engine}, {self.concurrent} at once",
            "unit": "tok/s",
            "median": self.rate,
            **{
                f"{name}_{part}_ms": value
                for name, values in (("first", self._firsts), ("gap", self._gaps))
                for part, value in zip(("p50", "p99"), percentiles(values), strict=True)
            },
            "seconds": [one.seconds for one in self.rounds],
        }

    @property
    def row(self) -> list[str]:
        """Cells of the table behind the engine's name and its ratio."""
        return [shown_pair(self._firsts), shown_pair(self._gaps)]

    @property
    def _firsts(self) -> list[float]:
        return [seconds for one in self.rounds for seconds in one.firsts]

    @property
    def _gaps(self) -> list[float]:
        return [seconds for one in self.rounds for seconds in one.gaps]


def run_bench_requests(
    choice: RequestBenchOptions, *, as_json: bool, engines: OpenEngines = offline_engine
) -> int:
    """Measures the `engines` and the cluster. Ratios are against the last of the engines."""
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name:
        model = BenchModel(Path(name), choice.dtype, choice.threads)
        parameters = make_random_model(shape_named(choice.shape), choice.dtype, model.folder)
        write_tokenizer(model.folder)
        with engines(model) as processes:
            peer = processes[-1].name
            loads = asyncio.run(_loads(choice, model, processes))
    title = (
        f"{choice.shape}, {parameters / 1e6:.1f} M parameters, {choice.dtype}, {choice.threads} "
        f"threads; {choice.prompt_len} tokens in, {choice.max_tokens} out"
    )
    if as_json:
        print_json(title, (load.to_json() for load in loads))
    else:
        show_loads(title, loads, peer, Console())
    return 0


def show_loads(title: str, loads: Sequence[ServedLoad], peer: str, console: Console) -> None:
    """The table; ratios are against the engine `peer`."""
    table = titled_table(title)
    table.add_column("")
    for column in ("tok/s", "ratio", "first ms", "gap ms"):
        table.add_column(column, justify="right", no_wrap=True)
    peers = {load.concurrent: load for load in loads if load.engine == peer}
    for load in loads:
        ratio = "" if load.engine == peer else f"{load.ratio(peers[load.concurrent]):.2f}"
        table.add_row(f"{load.engine}, {load.concurrent}", figure(load.rate), ratio, *load.row)
    console.print(table)
    console.print(f"ratio: against {peer}; first token and gap between tokens: p50 / p99")
    console.print(str(machine_now()))


async def _loads(
    choice: RequestBenchOptions, model: BenchModel, engines: Sequence[EngineProcess]
) -> list[ServedLoad]:
    loads: list[ServedLoad] = []
    async with _cluster(model) as cluster:
        for concurrent in choice.concurrent:
            loads += await _rounds(choice, concurrent, engines, cluster.client)
    return loads


async def _rounds(
    choice: RequestBenchOptions,
    concurrent: int,
    engines: Sequence[EngineProcess],
    client: Client,
) -> list[ServedLoad]:
    """The loads of all engines; the first round warms up and does not count."""
    rounds: dict[str, list[ServedRound]] = {
        name: [] for name in (*(one.name for one in engines), CLUSTER)
    }
    for number in range(choice.rounds + 1):
        prompts = random_prompts(concurrent, choice.prompt_len, seed=1_000 * concurrent + number)
        for engine in engines:
            said = await asyncio.to_thread(
                engine.ask, prompts=prompts, max_tokens=choice.max_tokens
            )
            arrivals = tuple(tuple(tokens) for tokens in said["arrivals"])
            rounds[engine.name].append(ServedRound(said["seconds"], arrivals))
        rounds[CLUSTER].append(await served(client, prompts, choice.max_tokens))
    return [
        ServedLoad(name, concurrent, choice.max_tokens, tuple(each[1:]))
        for name, each in rounds.items()
    ]


async def served(client: Client, prompts: Sequence[Sequence[int]], max_tokens: int) -> ServedRound:
    """One round through the cluster's router."""
    began = perf_counter()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def one(prompt: Sequence[int]) -> tuple[float, ...]:
        arrivals: list[float] = []
        events = client.generate(list(prompt), sampling, deadline_seconds=DEADLINE_SECONDS)
        async for event in events:
            if isinstance(event, TokenChunk):
                arrivals += [perf_counter() - began] * len(event.token_ids)
        return tuple(arrivals)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return ServedRound(perf_counter() - began, tuple(task.result() for task in tasks))


def _cluster(model: BenchModel) -> AbstractAsyncContextManager[BenchCluster]:
    """One prefill and one decode worker, for the length of a block."""
    fields = {
        "model": model.folder,
        "num_threads": model.threads,
        "memory_bytes": MEMORY_BYTES,
        "max_running": MAX_RUNNING,
        **engine_fields(model.dtype),
    }
    return bench_cluster(bench_options(fields), model.folder / "state")


def random_prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    found: list[list[int]] = random.integers(VOCAB_SIZE, size=(count, length)).tolist()
    return found


def percentiles(seconds: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """p50 and p99 in milliseconds, if there are any times."""
    if not seconds:
        return None, None
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99)).tolist()
    return p50, p99


def shown_pair(seconds: Sequence[float]) -> str:
    return " / ".join(map(figure, percentiles(seconds))) if seconds else ""
