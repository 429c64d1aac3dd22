"""`ferryman bench colocated`: running streams while long prompts arrive, by two roles or by one.

    1+1        a prefill and a decode worker
    both       workers that do both, with chunks as long, and with shorter ones; one and two of them

All clusters stand at once on the same cores and take turns, round by round; one that waits takes no
processor time. A round first lets the streams decode alone (quiet), then sends prompts one after
the other (busy). A token is good if it came within the limit after the one before it. Beside the
clock, gaps are counted in processor time of the worker that decodes: others on the machine make a
gap longer, and hardly change what is computed in it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman_bench.bench_cluster import BenchCluster, bench_cluster, bench_options
from ferryman_bench.engine_process import MAX_RUNNING, MEMORY_BYTES
from ferryman_bench.hardware import machine_now
from ferryman_bench.offline_engine import engine_fields
from ferryman_bench.report import figure, print_json, titled_table
from ferryman_bench.request_load import (
    DEADLINE_SECONDS,
    percentiles,
    random_prompts,
    shown_pair,
)
from ferryman_bench.subject import RandomModel

STREAM_PROMPT_LEN = 128
# More than any round lasts: streams are left when it ends.
STREAM_TOKENS = 16_384
WARM_UP_LEN = 512
LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class ColocationOptions:
    """`streams` decode in each round, first `quiet_tokens` alone, then while `prompts` arrive."""

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    rounds: int = 3
    streams: int = 4
    prompts: int = 2
    prompt_len: int = 8192
    quiet_tokens: int = 64
    chunk_tokens: tuple[int, ...] = (512, 128)
    gap_limit_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The workers of one cluster, and the longest chunk of each."""

    name: str
    chunk_tokens: int
    workers: Mapping[str, Any]


def setups_of(chunk_tokens: Sequence[int]) -> list[WorkerSetup]:
    """Two roles and one worker with each length of chunks; two workers with the first."""
    both = {"worker": "both"}
    found = [WorkerSetup(f"1+1, chunks of {n}", n, {}) for n in chunk_tokens[:1]]
    found += [WorkerSetup(f"both × 1, chunks of {n}", n, both) for n in chunk_tokens]
    first = chunk_tokens[0]
    return [*found, WorkerSetup(f"both × 2, chunks of {first}", first, {**both, "num_both": 2})]


@dataclass(frozen=True, slots=True)
class TokenGap:
    """From one token of a stream to the next: seconds, and processor seconds of its worker."""

    seconds: float
    processor: float


@dataclass(frozen=True, slots=True)
class ArrivalRound:
    """One round of one cluster: gaps of all streams alone, and while prompts arrive."""

    quiet: tuple[TokenGap, ...]
    busy: tuple[TokenGap, ...]
    first_tokens: tuple[float, ...]
    busy_seconds: float

    @property
    def slowdown(self) -> float:
        """The median gap while prompts arrive as a multiple of the quiet one."""
        return median(_seconds(self.busy)) / median(_seconds(self.quiet))

    @property
    def processor_slowdown(self) -> float:
        """As `slowdown`, by processor time, which the load of others hardly changes."""
        return median(_processor(self.busy)) / median(_processor(self.quiet))

    def rate(self, limit: float = float("inf")) -> float:
        """Tokens per second of all streams while prompts arrive, of gaps up to a limit."""
        return sum(gap.seconds <= limit for gap in self.busy) / self.busy_seconds


@dataclass(frozen=True, slots=True)
class ColocationResult:
    """All rounds of one cluster."""

    name: str
    rounds: tuple[ArrivalRound, ...]
    gap_limit: float

    def to_json(self) -> dict[str, Any]:
        rounds, limit = self.rounds, self.gap_limit
        spans = {"quiet": self._quiet, "busy": self._busy}
        gaps = {
            f"{span}_{name}_ms": percentiles(of(found))
            for span, found in spans.items()
            for name, of in (("gap", _seconds), ("processor_gap", _processor))
        }
        return {
            "name": self.name,
            "unit": "ms",
            "median": gaps["busy_gap_ms"][0],
            **gaps,
            "slowdown": median(one.slowdown for one in rounds),
            "processor_slowdown": median(one.processor_slowdown for one in rounds),
            "first_token_seconds": self._first_token,
            "stream_tokens_per_second": median(one.rate() for one in rounds),
            "good_tokens_per_second": median(one.rate(limit) for one in rounds),
            "gap_limit_ms": limit * 1e3,
            "slowdowns": [one.slowdown for one in rounds],
            "processor_slowdowns": [one.processor_slowdown for one in rounds],
        }

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the table: by the clock, then by processor time."""
        rounds = self.rounds
        by_clock = [
            self.name,
            shown_pair(_seconds(self._quiet)),
            shown_pair(_seconds(self._busy)),
            f"{median(one.slowdown for one in rounds):.2f}",
            figure(self._first_token),
            figure(median(one.rate() for one in rounds)),
            figure(median(one.rate(self.gap_limit) for one in rounds)),
        ]
        by_processor = [
            "  processor",
            shown_pair(_processor(self._quiet)),
            shown_pair(_processor(self._busy)),
            f"{median(one.processor_slowdown for one in rounds):.2f}",
            *[""] * 3,
        ]
        return [by_clock, by_processor]

    @property
    def _quiet(self) -> list[TokenGap]:
        return [gap for one in self.rounds for gap in one.quiet]

    @property
    def _busy(self) -> list[TokenGap]:
        return [gap for one in self.rounds for gap in one.busy]

    @property
    def _first_token(self) -> float:
        return median(seconds for one in self.rounds for seconds in one.first_tokens)


def _seconds(gaps: Sequence[TokenGap]) -> list[float]:
    return [gap.seconds for gap in gaps]


def _processor(gaps: Sequence[TokenGap]) -> list[float]:
    return [gap.processor for gap in gaps]


def run_bench_colocation(choice: ColocationOptions, *, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name:
        folder = Path(name)
        prepared = RandomModel(choice.shape).prepared(choice.dtype, folder)
        results = asyncio.run(_results(choice, folder))
    title = (
        f"{prepared.title}, {choice.dtype}; {choice.streams} streams, "
        f"prompts of {choice.prompt_len}"
    )
    if as_json:
        print_json(title, (result.to_json() for result in results))
    else:
        show_colocation(title, results, Console())
    return 0


def show_colocation(title: str, results: Sequence[ColocationResult], console: Console) -> None:
    table = titled_table(title)
    table.add_column("")
    for column in ("quiet gap ms", "busy gap ms", "ratio", "first token s", "tok/s", "good tok/s"):
        table.add_column(column, justify="right")
    for result in results:
        for row in result.rows:
            table.add_row(*row)
    console.print(table)
    limit = results[0].gap_limit * 1e3
    console.print(
        "gaps between tokens of a stream: p50 / p99; ratio of the medians within a round; tok/s of "
        f"all streams while prompts arrive; good: at most {limit:g} ms after the one before"
    )
    console.print(str(machine_now()))


async def _results(choice: ColocationOptions, folder: Path) -> list[ColocationResult]:
    setups = setups_of(choice.chunk_tokens)
    rounds: dict[str, list[ArrivalRound]] = {setup.name: [] for setup in setups}
    async with AsyncExitStack() as stack:
        clusters = {}
        for number, setup in enumerate(setups):
            context = _cluster(choice, setup, folder, number)
            cluster = clusters[setup.name] = await stack.enter_async_context(context)
            await _first_token(cluster.client, random_prompts(1, WARM_UP_LEN, seed=number)[0])
        for number in range(choice.rounds):
            for name, cluster in clusters.items():
                rounds[name].append(await measured_round(cluster, choice, seed=1_000 * number))
    limit = choice.gap_limit_ms / 1e3
    return [ColocationResult(name, tuple(each), limit) for name, each in rounds.items()]


def _cluster(
    choice: ColocationOptions, setup: WorkerSetup, folder: Path, number: int
) -> AbstractAsyncContextManager[BenchCluster]:
    """Without `num_threads` each cluster divides the cores among its workers."""
    engine = {
        "model": folder,
        "memory_bytes": MEMORY_BYTES,
        "max_running": MAX_RUNNING,
        "chunk_tokens": setup.chunk_tokens,
        **engine_fields(choice.dtype),
    }
    options = bench_options(engine, cluster=f"bench-{number}", **setup.workers)
    return bench_cluster(options, folder / f"state-{number}")


class BenchStream:
    """A request that decodes until its task is cancelled, and its tokens' times."""

    def __init__(self, cluster: BenchCluster, name: str, prompt: Sequence[int]) -> None:
        self._cluster, self._name, self._prompt = cluster, name, prompt
        self.tokens: list[TokenGap] = []

    async def run(self) -> None:
        client, worker = self._cluster.client, ""
        sampling = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True)
        events = client.generate(
            list(self._prompt), sampling, request_id=self._name, deadline_seconds=DEADLINE_SECONDS
        )
        async for event in events:
            if isinstance(event, TokenChunk):
                worker = worker or (await client.explain(self._name))[-1].chosen.decode_worker_id
                now = TokenGap(perf_counter(), self._cluster.processor_seconds(worker))
                self.tokens += [now] * len(event.token_ids)


async def measured_round(
    cluster: BenchCluster, choice: ColocationOptions, *, seed: int
) -> ArrivalRound:
    """Streams decode alone, then while prompts arrive one after the other."""
    starts = random_prompts(choice.streams, STREAM_PROMPT_LEN, seed=seed)
    prompts = random_prompts(choice.prompts, choice.prompt_len, seed=seed + 1)
    streams = [
        BenchStream(cluster, f"stream-{seed}-{index}", prompt)
        for index, prompt in enumerate(starts)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream.run()) for stream in streams]
        await _all_have(streams, 2)
        begun = perf_counter()
        await _all_have(streams, min(len(one.tokens) for one in streams) + choice.quiet_tokens)
        busy_from = perf_counter()
        firsts = [await _first_token(cluster.client, prompt) for prompt in prompts]
        end = perf_counter()
        for task in tasks:
            task.cancel()
    return ArrivalRound(
        quiet=gaps_between([one.tokens for one in streams], begun, busy_from),
        busy=gaps_between([one.tokens for one in streams], busy_from, end),
        first_tokens=tuple(firsts),
        busy_seconds=end - busy_from,
    )


def gaps_between(
    streams: Sequence[Sequence[TokenGap]], begin: float, end: float
) -> tuple[TokenGap, ...]:
    """The gaps of all streams that end in a span; tokens are given by their times."""
    return tuple(
        TokenGap(after.seconds - before.seconds, after.processor - before.processor)
        for tokens in streams
        for before, after in pairwise(tokens)
        if begin < after.seconds <= end
    )


async def _first_token(client: Client, prompt: Sequence[int]) -> float:
    """Seconds to the only token of a request."""
    began = perf_counter()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async for event in client.generate(list(prompt), sampling, deadline_seconds=DEADLINE_SECONDS):
        if isinstance(event, TokenChunk):
            return perf_counter() - began
    raise AssertionError("a request without an error has a token")


async def _all_have(streams: Sequence[BenchStream], count: int) -> None:
    """Waits until each stream has so many tokens."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while min(len(one.tokens) for one in streams) < count:  # noqa: ASYNC110  # no event
            await asyncio.sleep(LOOK_SECONDS)
