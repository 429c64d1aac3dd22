"""The first token of one long prompt through a cluster: cold, from the device, from the host tier.

And of a hit on the device by an engine alone, with graphs of short chunks and without.

    python -m tools.card.hits MODEL --device cuda --prompt-len 8192

Usage must name the tier, and each answer must be the cold one's. Prints a line of JSON after each
measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from ferryman.client import Client, SamplingParams, TokenChunk
from ferryman.llm import LLM
from ferryman.model.config import load_config
from ferryman.settings.cluster import TierOptions
from ferryman.settings.declaration import size_of
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.public import GenerateFinished
from ferryman_bench.bench_cluster import bench_options, running_jobs
from ferryman_bench.nodes import Nodes
from ferryman_bench.request_load import random_prompts

MAX_TOKENS = 16
STORE_SECONDS = 30.0
HOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LongAnswer:
    """Milliseconds to the first token, the answer, and its prompt's cached tokens by tier."""

    first_ms: float
    token_ids: tuple[int, ...]
    cached: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FlushableCluster:
    """A cluster of 1 + 1 whose workers can be told to forget what they have cached."""

    client: Client
    nodes: Nodes

    async def answer(self, prompt: Sequence[int]) -> LongAnswer:
        began, first, token_ids = perf_counter(), 0.0, list[int]()
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        async for event in self.client.generate(list(prompt), sampling):
            if isinstance(event, TokenChunk):
                first = first or perf_counter() - began
                token_ids += event.token_ids
            elif isinstance(event, GenerateFinished):
                cached = event.usage.cached.by_tier
        return LongAnswer(round(first * 1e3, 1), tuple(token_ids), cached)

    async def host_hit(self, prompt: Sequence[int]) -> LongAnswer:
        """The first answer whose prompt comes from the host tier, to which it is stored meanwhile.
        Raises TimeoutError."""
        async with asyncio.timeout(STORE_SECONDS):
            while True:
                await self.nodes.flush("prefill", "decode")
                answer = await self.answer(prompt)
                if answer.cached.get("host"):
                    return answer


@asynccontextmanager
async def flushable_cluster(
    model: Path, device: str, memory: int
) -> AsyncIterator[FlushableCluster]:
    """Ready, with a host tier; it ends with the block."""
    tiers = TierOptions(host_bytes=min(memory, HOST_BYTES))
    engine = {"model": model, "device": device, "memory_bytes": memory, "max_running": 4}
    with tempfile.TemporaryDirectory(prefix="ferryman-hits-") as folder:
        async with (
            running_jobs(bench_options(engine, tiers=tiers), Path(folder)) as jobs,
            nats_bus(NatsOptions(jobs.nats_url, "hits")) as bus,
            Channels() as channels,
            Client(jobs.said["router"]["grpc"]) as client,
        ):
            await bus.connected()
            yield FlushableCluster(client, Nodes(jobs.said, bus, channels))


def offline_hit(
    model: Path, device: str, prompt: Sequence[int], memory: int, *, replays: bool
) -> float:
    """The least milliseconds of five answers of one token whose prompt is on the device."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    options = {"memory_bytes": memory, "max_running": 1, "replay_steps": replays}
    with LLM(model, device=device, dtype="auto", **options) as llm:
        llm.generate([list(prompt)], sampling)
        times = []
        for _ in range(5):
            began = perf_counter()
            llm.generate([list(prompt)], sampling)
            times.append(perf_counter() - began)
    return round(min(times) * 1e3, 1)


async def through_cluster(
    model: Path, device: str, prompts: Sequence[Sequence[int]], memory: int
) -> bool:
    """Prints the milliseconds by tier of the second prompt; the first one warms up. Returns whether
    all answers were the cold one's, and the device had the prompt."""
    warm, prompt = prompts
    async with flushable_cluster(model, device, memory) as cluster:
        await cluster.answer(warm)
        cold = await cluster.answer(prompt)
        _print({"cold_ms": cold.first_ms})
        device_hit = await cluster.answer(prompt)
        _print(_by_tier("device", device_hit))
        host_hit = await cluster.host_hit(prompt)
        _print(_by_tier("host", host_hit))
    is_same = all(hit.token_ids == cold.token_ids for hit in (device_hit, host_hit))
    _print({"same_answers": is_same})
    return is_same and bool(device_hit.cached.get("device"))


def _by_tier(tier: str, hit: LongAnswer) -> Mapping[str, object]:
    return {f"{tier}_ms": hit.first_ms, f"{tier}_tokens": hit.cached.get(tier, 0)}


def _print(figures: Mapping[str, object]) -> None:
    print(json.dumps(figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--memory-bytes", default="16G")
    given = parser.parse_args()
    memory = size_of("--memory-bytes", given.memory_bytes)
    vocab_size = load_config(given.model).trunk.vocab_size
    prompts = random_prompts(2, given.prompt_len, seed=8, vocab_size=vocab_size)
    is_right = asyncio.run(through_cluster(given.model, given.device, prompts, memory))
    for name, replays in (("graphs", True), ("launched", False)):
        least = offline_hit(given.model, given.device, prompts[1], memory, replays=replays)
        _print({f"offline_{name}_ms": least})
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
