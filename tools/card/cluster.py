"""Tokens a second of the offline engine, of a cluster 1 + 1 and of one worker for both.

    python -m tools.card.cluster MODEL --device cuda --concurrent 1,8,32,64

The engines stand one after the other, so each has the card's memory to itself. A line of JSON comes
after each load: whoever ends the run has what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.model.config import load_config
from ferryman.settings.declaration import size_of
from ferryman_bench.bench_cluster import bench_cluster, bench_options
from ferryman_bench.engine_process import BenchModel
from ferryman_bench.offline_engine import OFFLINE, model_fields, offline_engine
from ferryman_bench.request_load import (
    CLUSTERS,
    ServedLoad,
    ServedRound,
    percentiles,
    random_prompts,
    served,
)

WARM_TOKENS = 4
"""Tokens of each answer before a load is measured: enough for its sizes of steps."""
THREADS = 2
Prompts = list[list[int]]


@dataclass(slots=True)
class EngineLoads:
    """The loads of all engines: answers of `max_tokens` tokens to prompts of `prompt_len`."""

    concurrent: Sequence[int]
    prompt_len: int
    max_tokens: int
    vocab_size: int
    _offline: dict[int, float] = field(default_factory=dict)

    def prompts(self, concurrent: int, *, seed: int) -> Prompts:
        """New ones for each seed: nothing of them is reused."""
        return random_prompts(concurrent, self.prompt_len, seed=seed, vocab_size=self.vocab_size)

    def print(self, engine: str, concurrent: int, measured: ServedRound) -> None:
        load = ServedLoad(engine, concurrent, self.max_tokens, (measured,))
        text = f"{load.rate:.0f} tok/s"
        if engine == OFFLINE:
            self._offline[concurrent] = load.rate
        if concurrent in self._offline and measured.firsts:
            (first, _), (_, gap) = percentiles(measured.firsts), percentiles(measured.gaps)
            ratio = load.rate / self._offline[concurrent]
            text += f", {ratio:.2f} of offline, first p50 {first:.0f} ms, gap p99 {gap:.1f} ms"
        print(json.dumps({f"{engine}, {concurrent} at once": text}), flush=True)


def measure_offline(model: BenchModel, report: EngineLoads) -> None:
    with offline_engine(model) as engines:
        for number in report.concurrent:
            engines[0].ask(prompts=report.prompts(number, seed=number), max_tokens=WARM_TOKENS)
            prompts = report.prompts(number, seed=1_000 + number)
            reply = engines[0].ask(prompts=prompts, max_tokens=report.max_tokens)
            report.print(OFFLINE, number, ServedRound(reply["seconds"], ()))


async def measure_cluster(worker: str, model: BenchModel, report: EngineLoads) -> None:
    fields: Mapping[str, object] = {"model": model.folder, **model_fields(model)}
    options = bench_options(dict(fields), cluster=f"card-{worker}", worker=worker)
    with tempfile.TemporaryDirectory(prefix="ferryman-card-") as folder:
        async with bench_cluster(options, Path(folder)) as cluster:
            for number in report.concurrent:
                await served(cluster.client, report.prompts(number, seed=number), WARM_TOKENS)
                prompts = report.prompts(number, seed=1_000 + number)
                measured = await served(cluster.client, prompts, report.max_tokens)
                report.print(CLUSTERS[worker], number, measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrent", default="1,8,32,64", help="requests at once, with commas")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--memory-bytes", default="20G", help="for state, of each worker")
    given = parser.parse_args()
    concurrent = tuple(map(int, given.concurrent.split(",")))
    room = given.device, size_of("--memory-bytes", given.memory_bytes), max(concurrent)
    model = BenchModel(given.model, "bfloat16", THREADS, *room)
    vocab_size = load_config(given.model).trunk.vocab_size
    report = EngineLoads(concurrent, given.prompt_len, given.max_tokens, vocab_size)
    measure_offline(model, report)
    for worker in CLUSTERS:
        asyncio.run(measure_cluster(worker, model, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
