"""Prefill workers are killed under one request: once it ends whole, the second time it ends.

The tests run in the order in which they stand here, on one cluster that has to live through them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    Generated,
    Service,
    generate,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client, Retries
from ferryman.errors import Unavailable
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.bus import BusMessage
from ferryman.wire.nats.subjects import LifeSubject, Subjects

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

# Many small chunks: a worker that is killed at the first is far from the first token.
CHUNK_TOKENS = 16
PROMPT = [(7 * i) % 120 + 3 for i in range(4000)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    config = model / "config.json"  # it has no positions, so that it takes longer prompts as well
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "max_position_embeddings": 2 * len(PROMPT)}))
    settings: dict[str, dict[str, Any]] = {
        "router": {"stream_patience_seconds": 1.0, "no_worker_seconds": 60.0},
        "prefill": {"prefix_cache": False},  # each computes the whole prompt
    }
    shape = ClusterShape(num_prefill=3, chunk_tokens=CHUNK_TOKENS, settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def workers_by_id(cluster: Cluster) -> dict[str, Service]:
    return {str(one.ready["worker_id"]): one for one in cluster.of_role("prefill")}


async def killed_at_first_chunks(cluster: Cluster, request_id: str, num_kills: int) -> Generated:
    """The answer when `num_kills` prefill workers died at their first chunk of its prompt."""
    subjects, workers = Subjects(), workers_by_id(cluster)
    pattern = f"{subjects.root}.life.prefill.*.{request_id}.chunk"
    async with (
        cluster.bus() as bus,
        bus.subscribed(pattern) as messages,
        Client(cluster.grpc, retries=Retries(max_failures=0)) as client,
    ):
        await bus.flush()
        asking = asyncio.create_task(generate(client, PROMPT, SAMPLING, request_id=request_id))
        for _ in range(num_kills):
            working = asyncio.create_task(_next_of(messages, subjects, workers))
            await asyncio.wait({working, asking}, return_when=asyncio.FIRST_COMPLETED)
            assert working.done(), f"it ended before the next kill: {asking}"
            workers.pop(working.result()).kill()
        return await asking


async def _next_of(
    messages: AsyncIterator[BusMessage], subjects: Subjects, workers: Mapping[str, Service]
) -> str:
    """The next worker, of those not killed yet, that has computed a chunk."""
    async for message in messages:
        subject = subjects.parse(message.subject)
        assert isinstance(subject, LifeSubject)
        if subject.worker_id in workers:
            return subject.worker_id
    raise AssertionError("the subscription ended")


async def num_attempts(cluster: Cluster, request_id: str) -> int:
    async with Client(cluster.grpc) as client:
        return len(await client.explain(request_id))


async def test_a_prompt_that_one_kill_hit_ends_whole(cluster: Cluster) -> None:
    with LLM(cluster.model, dtype="float64", page_size=PAGE_SIZE, memory_bytes=1 << 28) as llm:
        (whole,) = llm.generate([PROMPT], SAMPLING)
    answer = await killed_at_first_chunks(cluster, "hit-by-chance", num_kills=1)
    assert tuple(answer.token_ids) == tuple(whole.token_ids)
    assert await num_attempts(cluster, "hit-by-chance") == 2


async def test_a_prompt_that_kills_each_worker_ends_typed_after_two(cluster: Cluster) -> None:
    cluster.start("prefill").await_ready()
    cluster.await_workers(prefill=3, decode=1)
    with pytest.raises(Unavailable, match="2 workers died while they ran this request"):
        await killed_at_first_chunks(cluster, "kills-them", num_kills=2)
    assert await num_attempts(cluster, "kills-them") == 2
    (spared,) = cluster.of_role("prefill")
    assert spared.process.poll() is None
    async with Client(cluster.grpc) as client:
        answer = await generate(client, PROMPT[:40], SAMPLING)
    assert len(answer.token_ids) == SAMPLING.max_tokens, "the third serves on"
    cluster.assert_ledgers_balance()
