"""Processes that have not the cluster's key, with forged state under the right names: in the index,
at an address where a node of the cluster was, and as lies about a node that lives. All answers stay
those of one process in float64."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from tests.cluster_keys import KEY, STRANGERS_KEY, key_file_in
from tests.harness.cluster import (
    PAGE_SIZE,
    Cluster,
    ClusterShape,
    Generated,
    Service,
    assert_same,
    generate,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.hostcache.attached import prompt_of, worker_at

from ferryman.cache.manifest import Kind, ResumeShape, StateManifest
from ferryman.cache.units import Tier
from ferryman.client import Client
from ferryman.llm import LLM, Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.request import SamplingParams
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import read_credentials
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import RedisIndex, redis_index

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
WAITS = {"prefetch_threshold": PAGE_SIZE, "prefetch_policy": "wait_complete"}
SHAPE = ClusterShape(
    num_nodes=2,
    settings={
        "hostcache": {"prefetch_share": 1.0, "prefetch_threshold": PAGE_SIZE},
        "prefill": WAITS,
    },
)
LENGTH, NUM_PAGES = 90, 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The second node is the stranger's from now on."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_moe")
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), SHAPE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm(cluster: Cluster) -> Iterator[LLM]:
    with one_process(cluster.model) as llm:
        yield llm


@pytest.fixture(scope="module")
def manifest(cluster: Cluster) -> StateManifest:
    return load_model(cluster.model, LoadOptions("float64", page_size=PAGE_SIZE)).manifest


def prompt_number(number: int) -> list[int]:
    return [((17 + number) * i + 5 * number) % 120 + 3 for i in range(LENGTH)]


def second_node(cluster: Cluster, key: ClusterKey) -> Service:
    """The second node's host-cache, restarted with a key."""
    cluster.hostcache(1).kill()
    folder = cluster.folder / f"key-{len(cluster.services)}"
    folder.mkdir()
    service = cluster.start("hostcache", 1, {"cluster_key_file": key_file_in(folder, key)})
    service.await_ready()
    return service


@asynccontextmanager
async def forging(
    cluster: Cluster, service: Service, manifest: StateManifest, prompt: Sequence[int]
) -> AsyncIterator[None]:
    """That node holds random bytes under all the names of a prompt's state."""
    forged = prompt_of(manifest, cluster.keys_of(prompt), snapshots=[NUM_PAGES - 1])
    address = str(service.ready["address"])
    token = read_credentials(cluster.credentials[ClusterRole.PREFILL]).grpc_token
    worker_id = "prefill-0000dead"
    async with worker_at(address, manifest, worker_id, call_seconds=10, token=token) as worker:
        stored = await worker.client.store(forged.keys, forged.sources)
        assert stored == len(forged.names), "the forgery is there"
        yield


def shown(service: Service, name: str) -> float:
    """A metric of a process."""
    (value,) = re.findall(
        rf"^ferryman_{service.role}_{name} (\S+)$", service.metrics(), re.MULTILINE
    )
    return float(value)


async def ask(cluster: Cluster, prompt: Sequence[int]) -> Generated:
    async with Client(cluster.grpc) as client:
        return await generate(client, prompt, GREEDY)


def expected(llm: LLM, prompt: Sequence[int]) -> Completion:
    return llm.generate([list(prompt)], GREEDY)[0]


def peer_tokens(found: Generated) -> int:
    assert found.usage is not None
    return found.usage.cached.peer


async def known_to(cluster: Cluster, index: RedisIndex, prompt: Sequence[int]) -> None:
    """Until the index says, to a holder of this key, that the second node holds the prompt."""
    keys, shape = cluster.keys_of(prompt), ResumeShape(PAGE_SIZE, 0, frozenset({Kind.FULL}))
    while "node-1" not in await index.usable_pages(keys, shape):  # noqa: ASYNC110
        # An index that is away answers at once, and a task of its own asks when it is back.
        await asyncio.sleep(0.001)


async def test_a_forged_node_in_the_index_is_never_asked(
    cluster: Cluster, llm: LLM, manifest: StateManifest
) -> None:
    prompt, stranger = prompt_number(1), second_node(cluster, STRANGERS_KEY)
    async with (
        forging(cluster, stranger, manifest, prompt),
        redis_index(cluster.redis, STRANGERS_KEY) as theirs,
    ):
        await known_to(cluster, theirs, prompt)
        found = await ask(cluster, prompt)
    assert_same(found, expected(llm, prompt))
    assert peer_tokens(found) == 0
    assert shown(stranger, "fetch_units") == 0
    assert shown(cluster.hostcache(0), "prefetch_forged") == 0, "it was not even asked"
    assert shown(cluster.hostcache(0), "index_forged") > 0


async def test_a_stranger_where_a_node_was_is_asked_and_not_believed(
    cluster: Cluster, llm: LLM, manifest: StateManifest
) -> None:
    """Its record and its entries are put back as that node wrote them."""
    prompt, stranger = prompt_number(2), second_node(cluster, STRANGERS_KEY)
    gone = NodeLife("gone", int(stranger.ready["epoch"]), str(stranger.ready["address"]))
    async with (
        forging(cluster, stranger, manifest, prompt),
        redis_index(cluster.redis, KEY) as ours,
    ):
        await ours.announce(gone, 60.0)
        await ours.commit(gone, cluster.keys_of(prompt)[0], Tier.HOST, units_of(cluster, prompt))
        found = await ask(cluster, prompt)
        await ours.withdraw(gone)
    assert_same(found, expected(llm, prompt))
    assert peer_tokens(found) == 0
    assert shown(stranger, "fetch_units") == 0
    assert shown(cluster.hostcache(0), "prefetch_forged") > 0, "it was asked"


def units_of(cluster: Cluster, prompt: Sequence[int]) -> list[IndexedUnit]:
    keys = cluster.keys_of(prompt)
    full = [IndexedUnit(Kind.FULL, key, 1, bytes(16)) for key in keys]
    return [*full, IndexedUnit(Kind.RECURRENT, keys[-1], 1, bytes(16))]


async def test_lies_in_the_index_about_a_node_that_lives_are_ignored(
    cluster: Cluster, llm: LLM
) -> None:
    """Until the router has met a lie: a lookup that Redis answers too late on a busy machine is a
    miss, and a prompt whose true state is stored has no lies any more."""
    hostcache = cluster.hostcache(0)
    mine = NodeLife("node-0", int(hostcache.ready["epoch"]), str(hostcache.ready["address"]))
    (router,) = cluster.of_role("router")
    before = shown(router, "index_forged")
    for number in range(30, 40):
        prompt = prompt_number(number)
        async with redis_index(cluster.redis, STRANGERS_KEY) as theirs:
            root = cluster.keys_of(prompt)[0]
            await theirs.commit(mine, root, Tier.HOST, units_of(cluster, prompt))
        found = await ask(cluster, prompt)
        assert_same(found, expected(llm, prompt))
        if shown(router, "index_forged") > before:
            return
    pytest.fail("ten prompts, and the router met no lie")


async def test_with_the_key_a_forger_would_be_believed(
    cluster: Cluster, manifest: StateManifest
) -> None:
    """The units that the tests above refuse are fetched when no check refuses them."""
    prompt, insider = prompt_number(4), second_node(cluster, KEY)
    async with (
        forging(cluster, insider, manifest, prompt),
        redis_index(cluster.redis, KEY) as ours,
    ):
        await known_to(cluster, ours, prompt)
        found = await ask(cluster, prompt)
    assert peer_tokens(found) == NUM_PAGES * PAGE_SIZE
    assert shown(insider, "fetch_units") > 0
