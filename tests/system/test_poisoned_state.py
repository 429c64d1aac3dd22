"""NaN in the host tier of a running cluster, under digests that are right: clients do not notice.

The attempt that loads it fails with a typed error, the next one computes anew; no worker goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.cluster_keys import token_of
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    assert_same,
    generate,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.hostcache.attached import source_of, worker_at

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.client import Client
from ferryman.llm import Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.security.credentials import ClusterRole

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
NUM_PROMPTS = 3
# With first pages of their own: each is a chain of its own.
PROMPTS = [[(7 * i + 11 * n) % 120 + 3 for i in range(150)] for n in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "bamba")
    shape = ClusterShape(settings=on_plane("grpc"), has_storage=True)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[Completion]:
    with one_process(cluster.model) as llm:
        return llm.generate(PROMPTS, GREEDY)


async def poison(cluster: Cluster, manifest: StateManifest, prompt: list[int]) -> None:
    """As another worker of the node would write it whose card is broken."""
    keys = page_keys(root_key(manifest), as_token_ids(prompt), PAGE_SIZE)
    names = [(Kind.FULL, page) for page in range(len(keys))] + [(Kind.RECURRENT, len(keys) - 1)]
    sizes = {kind: manifest.layout(kind).slot_bytes for kind in manifest.kinds}
    address = f"127.0.0.1:{cluster.hostcache_ports[0]}"
    token = token_of(ClusterRole.PREFILL)
    async with worker_at(address, manifest, "prefill-00000099", token=token) as worker:
        nan = [source_of(kind, page, b"\xff" * sizes[kind]) for kind, page in names]
        assert await worker.client.store(keys, nan) == len(names)


async def test_requests_are_answered_whole_and_no_worker_is_taken_out(
    cluster: Cluster, expected: list[Completion]
) -> None:
    manifest = load_model(cluster.model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest
    (prefill,), (hostcache,) = cluster.of_role("prefill"), cluster.of_role("hostcache")
    for prompt in PROMPTS:
        await poison(cluster, manifest, prompt)
    async with Client(cluster.grpc) as client:
        for prompt, cold in zip(PROMPTS, expected, strict=True):
            assert_same(await generate(client, prompt, GREEDY), cold)
        assert f"ferryman_prefill_logits_non_finite_reused {NUM_PROMPTS}.0" in prefill.metrics()
        assert "ferryman_prefill_logits_non_finite 0.0" in prefill.metrics()
        told = re.findall(r"state without numbers tier=host key=(\w+)", hostcache.log.read_text())
        # Another attempt may begin before the host-cache has dropped the chain, and report it too.
        assert len(set(told)) == NUM_PROMPTS
        for prompt, cold in zip(PROMPTS, expected, strict=True):
            again = await generate(client, prompt, GREEDY)
            assert_same(again, cold)
            assert again.usage is not None
            assert again.usage.cached.total > 0, "sound state is cached in its place"
        assert f"ferryman_prefill_logits_non_finite_reused {NUM_PROMPTS}.0" in prefill.metrics()
    assert prefill.process.poll() is None
    cluster.assert_ledgers_balance()
