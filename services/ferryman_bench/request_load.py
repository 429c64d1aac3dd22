"""`ferryman bench requests`: whole requests, by the offline engine and through a cluster.

A round sends all requests at once to one engine after the other. Prompts are new in each round, so
nothing is reused. A cluster is a router with one prefill and one decode worker, or with one worker
that does both; its client is this repository's own. Developers set other engines beside them
(tools/bench).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman.errors import ConfigError
from ferryman_bench.bench_cluster import bench_cluster, bench_options
from ferryman_bench.engine_process import MAX_RUNNING, MEMORY_BYTES, BenchModel, EngineProcess
from ferryman_bench.hardware import machine_now
from ferryman_bench.offline_engine import model_fields, offline_engine
from ferryman_bench.report import figure, print_json, titled_table
from ferryman_bench.shape import VOCAB_SIZE
from ferryman_bench.subject import ModelFolder, RandomModel

# The names of clusters in the table, by the choice of `ferryman up --worker`.
CLUSTERS: Mapping[str, str] = MappingProxyType({"apart": "cluster 1+1", "both": "one for both"})
DEADLINE_SECONDS = 600.0
OpenEngines = Callable[[BenchModel], AbstractContextManager[Sequence[EngineProcess]]]


@dataclass(frozen=True, slots=True)
class RequestBenchOptions:
    """`concurrent`: how many requests are sent at once, one figure after the other. `clusters` are
    among CLUSTERS. Each engine, and each worker, has `memory_bytes` for state."""

    model: RandomModel | ModelFolder
    dtype: str = "bfloat16"
    threads: int = 2
    rounds: int = 3
    concurrent: tuple[int, ...] = (1, 8)
    prompt_len: int = 512
    max_tokens: int = 64
    clusters: tuple[str, ...] = ("apart",)
    device: str = "cpu"
    memory_bytes: int = MEMORY_BYTES
    max_running: int = MAX_RUNNING


def cluster_names(text: str) -> tuple[str, ...]:
    """The clusters between commas. Raises ConfigError for others than those of CLUSTERS."""
    names = tuple(text.split(","))
    if not set(names) <= CLUSTERS.keys():
        raise ConfigError(f"--worker {text}: give {' or '.join(CLUSTERS)}, or both with a comma")
    return names


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
    """Measures the `engines` and the clusters. Ratios are against the last of the engines."""
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name:
        scratch = Path(name)
        prepared = choice.model.prepared(choice.dtype, scratch)
        room = choice.device, choice.memory_bytes, choice.max_running
        model = BenchModel(prepared.folder, choice.dtype, choice.threads, *room)
        with engines(model) as processes:
            peer = processes[-1].name
            bench = RequestBench(choice, model, prepared.vocab_size, processes)
            loads = asyncio.run(bench.loads(scratch))
    title = (
        f"{prepared.title}, {choice.dtype} on {choice.device}, {choice.threads} threads; "
        f"{choice.prompt_len} tokens in, {choice.max_tokens} out"
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


@dataclass(frozen=True, slots=True)
class RequestBench:
    """The offline engines, which run all the time, and the measurement of clusters beside them."""

    choice: RequestBenchOptions
    model: BenchModel
    vocab_size: int
    engines: Sequence[EngineProcess]

    async def loads(self, scratch: Path) -> list[ServedLoad]:
        """All clusters stand at once; state and logs of each are in `scratch`."""
        loads: list[ServedLoad] = []
        async with AsyncExitStack() as stack:
            clients = {
                CLUSTERS[worker]: await self._client(stack, worker, scratch)
                for worker in self.choice.clusters
            }
            for concurrent in self.choice.concurrent:
                loads += await self._rounds(concurrent, clients)
        return loads

    async def _client(self, stack: AsyncExitStack, worker: str, scratch: Path) -> Client:
        fields = {"model": self.model.folder, **model_fields(self.model)}
        options = bench_options(fields, cluster=f"bench-{worker}", worker=worker)
        cluster = await stack.enter_async_context(bench_cluster(options, scratch / worker))
        return cluster.client

    async def _rounds(self, concurrent: int, clients: Mapping[str, Client]) -> list[ServedLoad]:
        """The loads of all engines; the first round warms up and does not count."""
        choice, names = self.choice, (*(one.name for one in self.engines), *clients)
        rounds: dict[str, list[ServedRound]] = {name: [] for name in names}
        for number in range(choice.rounds + 1):
            prompts = random_prompts(
                concurrent,
                choice.prompt_len,
                seed=1_000 * concurrent + number,
                vocab_size=self.vocab_size,
            )
            for engine in self.engines:
                reply = await asyncio.to_thread(
                    engine.ask, prompts=prompts, max_tokens=choice.max_tokens
                )
                arrivals = tuple(tuple(tokens) for tokens in reply["arrivals"])
                rounds[engine.name].append(ServedRound(reply["seconds"], arrivals))
            for name, client in clients.items():
                rounds[name].append(await served(client, prompts, choice.max_tokens))
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


def random_prompts(
    count: int, length: int, *, seed: int, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    random = np.random.default_rng(seed)
    found: list[list[int]] = random.integers(vocab_size, size=(count, length)).tolist()
    return found


def percentiles(seconds: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """p50 and p99 in milliseconds, if there are any times."""
    if not seconds:
        return None, None
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99)).tolist()
    return p50, p99


def shown_pair(seconds: Sequence[float]) -> str:
    return " / ".join(map(figure, percentiles(seconds))) if seconds else ""
