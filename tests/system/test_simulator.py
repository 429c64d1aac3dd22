"""The simulator is held against a cluster: the same requests, the same pools, the same hits.

Pools and arena are small, so that every tier matters; conversations go on with what was answered.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    generate,
    running_cluster,
    save_served_model,
)
from tests.waiting import wait_until

from ferryman.cache.manifest import Kind
from ferryman.client import Client
from ferryman.handoff.usage import CachedTokens
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.app import run
from ferryman_simulator.generator import Habits, plan_turns
from ferryman_simulator.mooncake import BlockNames, mooncake_line

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

HABITS = Habits(
    num_requests=45,
    num_prefixes=10,
    zipf=0.6,
    prefix_tokens=200,
    turns=3.0,
    user_tokens=24,
    output_tokens=10,
    think_seconds=30.0,
    conversations_per_second=1.0,
)
NUM_PAGES, NUM_STATES = 32, 14
# Prefill tracks no states of decoding. With decode's memory its cache would leave the host little.
NUM_PREFILL_STATES = 22
HOST_PAGES = 100
POINTS = 0.02
BUSY = ("backlog_waiting", "store_leases", "store_reservations")


@dataclass(frozen=True)
class Live:
    """A cluster's run: the requests with their answers, and the tiers of their tokens."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]
    cached: Sequence[CachedTokens]
    log: Sequence[str]
    flags: Sequence[str]

    @property
    def shares(self) -> dict[str, float]:
        tokens = sum(len(prompt) for prompt in self.prompts)
        found = [cached.by_tier for cached in self.cached]
        return {tier: sum(one[tier] for one in found) / tokens for tier in found[0]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    manifest = load_model(model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    page, state = (manifest.layout(kind).slot_bytes for kind in (Kind.FULL, Kind.RECURRENT))
    small = ClusterShape(
        max_running=2,
        memory_bytes=NUM_PAGES * page + NUM_STATES * state,
        has_storage=True,
        settings={
            "hostcache": {"host_memory": 2 * HOST_PAGES * page},
            "prefill": {"memory_bytes": NUM_PAGES * page + NUM_PREFILL_STATES * state},
        },
    )
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), small) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def live(cluster: Cluster) -> Live:
    return asyncio.run(converse(cluster))


async def converse(cluster: Cluster) -> Live:
    """All turns one after the other; each is begun when the one before it is stored."""
    rng = random.Random(7)
    said: dict[int, list[int]] = {}
    prefixes = [_words(rng, HABITS.prefix_tokens) for _ in range(HABITS.num_prefixes)]
    prompts, answers, cached = [], [], []
    hostcache = cluster.hostcache()
    async with Client(cluster.grpc) as client, cluster.bus() as bus:
        for turn in plan_turns(HABITS):
            before = said.get(turn.conversation, prefixes[turn.prefix])
            prompt = before + _words(rng, turn.user_len)
            sampling = SamplingParams(max_tokens=turn.output_len, temperature=0.0, ignore_eos=True)
            answer = await generate(client, prompt, sampling)
            assert answer.usage is not None
            prompts.append(prompt)
            answers.append(answer.token_ids)
            cached.append(answer.usage.cached)
            said[turn.conversation] = prompt + answer.token_ids
            cluster.assert_ledgers_balance()
            wait_until(lambda: not hostcache.shown(*BUSY), "the host-cache to be idle", seconds=120)
        recorded = await bus.history(Subjects().all_life, max_events=100_000)
    log = [json.dumps({"subject": r.subject, **json.loads(r.payload)}) for r in recorded]
    return Live(prompts, answers, cached, log, _flags(cluster))


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 130) for _ in range(count)]


def _flags(cluster: Cluster) -> list[str]:
    """The cluster's sizes according to its ledgers."""
    pools = {
        role: ",".join(f"{kind}={one['total']}" for kind, one in worker.ledger().items())
        for role in ("prefill", "decode")
        for worker in cluster.of_role(role)
    }
    shape = cluster.shape
    line = (
        f"--model {cluster.model} --dtype {shape.dtype} --page-size {PAGE_SIZE} "
        f"--chunk-tokens {shape.chunk_tokens} --max-running {shape.max_running} "
        f"--prefill-slots {pools['prefill']} --decode-slots {pools['decode']} "
        f"--host-memory {shape.settings['hostcache']['host_memory']} --storage-bytes 1G "
        "--concurrency 1 --json"
    )
    return line.split()


def simulated(
    trace: Path, live: Live, capsys: pytest.CaptureFixture[str], *flags: str
) -> Mapping[str, float]:
    assert run(["simulate", "--trace", str(trace), *live.flags, *flags]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert one["num_refused"] == 0
    assert one["prompt_tokens"] == sum(len(prompt) for prompt in live.prompts)
    shares: Mapping[str, float] = one["shares"]
    return shares


def assert_within_two_points(found: Mapping[str, float], live: Live) -> None:
    for tier, share in live.shares.items():
        assert abs(found[tier] - share) <= POINTS, f"{tier}: {found} simulated, {live.shares} live"


def test_a_trace_of_the_requests_gives_the_hits_of_every_tier(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tier in ("device", "host", "storage"):
        assert live.shares[tier] > 0.04, f"{tier} was meant to matter: {live.shares}"
    names, trace = BlockNames(PAGE_SIZE), tmp_path / "trace.jsonl"
    lines = [
        mooncake_line(names, float(i), prompt, answer)
        for i, (prompt, answer) in enumerate(zip(live.prompts, live.answers, strict=True))
    ]
    trace.write_text("\n".join(lines))
    found = simulated(trace, live, capsys, "--block-tokens", str(PAGE_SIZE))
    assert_within_two_points(found, live)


def test_the_lifecycle_log_gives_the_hits_of_every_tier(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "log.jsonl"
    trace.write_text("\n".join(live.log))
    assert_within_two_points(simulated(trace, live, capsys), live)
