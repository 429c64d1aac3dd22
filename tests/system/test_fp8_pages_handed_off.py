"""Clusters with `kv_dtype=fp8`: an answer is the cold run's of one such process, wherever its pages
come from: another worker, the host tier, or storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    generate,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.planes import CHOICES

from ferryman.cache.units import Tier
from ferryman.client import Client
from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman.wire.plane_values import GRPC

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(90)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
FP8 = {"kv_dtype": "fp8", "prefetch_threshold": 1, "prefetch_policy": "wait_complete"}


@pytest.fixture(scope="module", params=[GRPC, FAST_PLANE])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A hybrid model, its attention's pages in e4m3 and its recurrent state as computed."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_moe")
    settings = {role: {**FP8, "planes": CHOICES[request.param]} for role in ("prefill", "decode")}
    shape = ClusterShape(has_storage=True, settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm(cluster: Cluster) -> Iterator[LLM]:
    with one_process(cluster.model, kv_dtype="fp8") as llm:
        yield llm


async def asked(cluster: Cluster, llm: LLM, prompt: Sequence[int]) -> Generated:
    """The answer, which equals the cold run's."""
    async with Client(cluster.grpc) as client:
        found = await generate(client, prompt, GREEDY)
    (expected,) = llm.generate([list(prompt)], GREEDY)
    assert_same(found, expected)
    return found


async def test_pages_that_are_handed_off_are_those_that_one_process_has(
    cluster: Cluster, llm: LLM
) -> None:
    found = await asked(cluster, llm, PROMPT)
    assert found.usage is not None
    assert found.usage.cached.total == 0
    with one_process(cluster.model) as unrounded:
        (plain,) = unrounded.generate([PROMPT], GREEDY)
    differences = [
        abs(mine[token] - theirs[token])
        for mine, theirs in zip(found.logprobs, plain.logprobs, strict=True)
        for token in mine.keys() & theirs.keys()
    ]
    assert max(differences) > 1e-6, "pages of e4m3 show in the numbers"


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
async def test_pages_that_come_back_from_a_tier_are_those_that_went(
    cluster: Cluster, llm: LLM, tier: Tier
) -> None:
    prompt = [int(tier is Tier.HOST) + 50, *PROMPT]
    await asked(cluster, llm, prompt)
    await cluster.await_stored(prompt, tier=tier)
    for role in ("prefill", "decode"):
        await cluster.flush_device(role)
    if tier is Tier.STORAGE:
        await cluster.flush_host(prompt)
    found = await asked(cluster, llm, prompt)
    assert found.usage is not None
    cached = found.usage.cached
    assert (cached.host if tier is Tier.HOST else cached.storage) > 0
    assert cached.device == 0
    cluster.assert_ledgers_balance()
