"""Hand-offs between workers of different tensor parallelism, and what a lost rank costs.

One cluster, whose workers are exchanged while it runs: 1 → 2 and 2 → 2, then 2 → 1 when decode has
lost a rank, by NIXL where it works. Every answer is the cold one of a single process, in float64.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    Cluster,
    ClusterShape,
    Generated,
    Service,
    assert_same,
    generate,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.processes import ranks_of

from ferryman.client import Client, GenerateFinished, TokenChunk
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
END_SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prefill of one rank, decode of two."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_moe")
    planes = on_plane(FAST_PLANE)
    settings = {
        **planes,
        "decode": {**planes["decode"], "tp_size": 2},
        "router": {"no_worker_seconds": 120.0},  # a worker's start on a busy machine
    }
    shape = ClusterShape(settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def oracle(cluster: Cluster) -> Iterator[LLM]:
    """One process of one rank, without a cache."""
    with one_process(cluster.model) as llm:
        yield llm


async def assert_exact(cluster: Cluster, oracle: LLM, prompt: list[int]) -> Generated:
    """An answer that was handed off, rank to rank, and is the one process's."""
    async with Client(cluster.grpc) as client:
        name = f"r{len(prompt)}-{sum(prompt)}"
        found = await generate(client, prompt, GREEDY, request_id=name)
    assert_same(found, oracle.generate([prompt], GREEDY)[0])
    assert await cluster.plane_of(name) == FAST_PLANE
    return found


def started(cluster: Cluster, role: str, tp_size: int) -> Service:
    service = cluster.start(role, settings={"tp_size": tp_size})
    service.await_ready()
    return service


def prefill_on_two_ranks(cluster: Cluster) -> None:
    """Exchanges the prefill worker for one of two ranks, unless it is one."""
    (found,) = cluster.of_role("prefill")
    if not ranks_of(found.process.pid):
        started(cluster, "prefill", 2)
        assert found.stop() == 0
        cluster.await_workers(prefill=1, decode=1)
        cluster.await_attached()


async def test_hand_offs_to_two_ranks_are_exact_from_one_and_from_two(
    cluster: Cluster, oracle: LLM
) -> None:
    (small,), (pair,) = cluster.of_role("prefill"), cluster.of_role("decode")
    assert (len(ranks_of(small.process.pid)), len(ranks_of(pair.process.pid))) == (0, 1)
    await assert_exact(cluster, oracle, PROMPT)
    await cluster.await_stored(PROMPT[:64])

    prefill_on_two_ranks(cluster)
    await cluster.flush_device("decode")
    again = await assert_exact(cluster, oracle, [*PROMPT[:70], 9, 9])
    assert again.usage is not None
    assert again.usage.cached.host == 64, "two ranks load what one rank stored"

    cluster.assert_ledgers_balance()


async def test_a_worker_that_loses_a_rank_ends_and_its_request_goes_on_elsewhere(
    cluster: Cluster, oracle: LLM
) -> None:
    """The rank is stopped first, so that its request waits until there is another worker: of one
    rank, which prefill's two then hand it to.
    """
    (pair,) = cluster.of_role("decode")
    (rank,) = ranks_of(pair.process.pid)
    found, name = Generated(), "loses-a-rank"
    spare = cluster.start("decode", settings={"tp_size": 1})
    async with Client(cluster.grpc) as client:
        async for event in client.generate(PROMPT, LONG, request_id=name, deadline_seconds=200.0):
            if isinstance(event, TokenChunk):
                assert event.offset == len(found.token_ids), "each token once and in order"
                if not found.token_ids:
                    os.kill(rank, signal.SIGSTOP)
                    await asyncio.to_thread(spare.await_ready)
                    os.kill(rank, signal.SIGKILL)
                found.token_ids += event.token_ids
            elif isinstance(event, GenerateFinished):
                found.reason = event.reason
        first, *_ = await client.explain(name)
    assert first.chosen.decode_worker_id == pair.ready["worker_id"], "it was there before the other"
    assert pair.process.wait(END_SECONDS) == 1
    # the channel or the sum in flight hears of it first; either says this
    assert "RankLost" in pair.log.read_text()
    assert found.reason is not None
    assert found.token_ids == list(oracle.generate([PROMPT], LONG)[0].token_ids)
    cluster.await_workers(prefill=1, decode=1)
    prefill_on_two_ranks(cluster)
    await assert_exact(cluster, oracle, [*PROMPT[:50], *PROMPT[:17]])
    cluster.assert_ledgers_balance()
