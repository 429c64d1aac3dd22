"""Prefixes that come from storage, from another node, and in part, handed off by each plane: exact
in float64.

The usage of each answer, the counts of the host-cache, and the events of each hand-off prove that
it really happened.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
from tests.cluster_keys import KEY
from tests.harness.cluster import (
    FAST_PLANE,
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
from tests.harness.forked_services import ServiceProcess
from tests.hostcache.object_server import BUCKET, s3_server
from tests.planes import CHOICES

from ferryman.cache.manifest import ResumeShape
from ferryman.cache.units import Tier
from ferryman.client import Client, RouteExplanation
from ferryman.errors import NotFound
from ferryman.handoff.usage import CachedTokens
from ferryman.llm import LLM, Completion
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.heartbeat import Heartbeat, beat_from_bytes
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.plane_values import GRPC
from ferryman.wire.redis.redis_index import redis_index

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]

TRIES = 5
STOPPED_SECONDS = 3.0  # far from the silence after which a worker counts as lost
# Asked at the same time, for a batch of two.
BESIDE = [(29 * i + 1) % 120 + 3 for i in range(60)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5, ignore_eos=True)
WHOLE_ARENA = {"prefetch_share": 1.0, "prefetch_threshold": PAGE_SIZE}
# However slow this machine is just now.
PATIENT = {"prefetch_threshold": PAGE_SIZE, "prefetch_policy": "wait_complete"}
# Room for 9 full pages of 16 KiB, and 2 snapshots of 59 KiB: also for what the request beside
# brings, whichever comes first.
SMALL = {"host_memory": 288 << 10, "snapshot_share": 0.5}
SHAPE = ClusterShape(
    num_nodes=3,
    has_storage=True,
    settings={
        "hostcache": WHOLE_ARENA,
        "prefill": PATIENT,
        "decode": {"planes": CHOICES[FAST_PLANE]},
        # The worker that a test stops is not given up before it goes on.
        "router": {"stream_patience_seconds": 60.0},
    },
)


@dataclass(frozen=True)
class Place:
    """Where the only prefill worker is, and how it hands off. Decode is on node 0."""

    node: int
    plane: str


# The first tests are those of node 0; then it moves once for each plane.
PLACES = [
    pytest.param(Place(1, FAST_PLANE), id="by memory from node 1"),
    pytest.param(Place(2, GRPC), id="by gRPC from node 2"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_moe")
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), SHAPE) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm(cluster: Cluster) -> Iterator[LLM]:
    """The cold run of one process."""
    with one_process(cluster.model) as llm:
        yield llm


def expected(llm: LLM, prompt: Sequence[int]) -> Completion:
    return llm.generate([list(prompt)], GREEDY)[0]


def cached(found: Generated) -> CachedTokens:
    assert found.usage is not None
    return found.usage.cached


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    """With a scope, so that all tests of one place come before those of the next."""
    found: Place = request.param
    return found


def move_to(cluster: Cluster, place: Place) -> None:
    """A prefill worker is there, and none elsewhere."""
    (here,) = cluster.of_role("prefill")
    if here.node == place.node:
        return
    there = cluster.start("prefill", node=place.node, settings={"planes": CHOICES[place.plane]})
    there.await_ready()
    cluster.await_workers(prefill=2, decode=1)
    cluster.await_attached()
    here.stop()
    cluster.await_workers(prefill=1, decode=1)


def prompt_for(place: Place, step: int, length: int = 90) -> list[int]:
    return [(step * i + 7 * place.node) % 120 + 3 for i in range(length)]


def restart_hostcache(cluster: Cluster, at: int, /, **settings: object) -> None:
    """A new life on this node, with an empty arena; its storage is the old one's."""
    cluster.hostcache(at).kill()
    cluster.start("hostcache", at, settings=settings).await_ready()
    cluster.await_attached()


async def forget_devices(cluster: Cluster) -> None:
    await cluster.flush_device("prefill")
    await cluster.flush_device("decode")


async def flush_hostcache(cluster: Cluster, node: int, what: str) -> None:
    """Its arena, or with `all` its storage too."""
    order = Subjects().control(str(cluster.hostcache(node).ready["worker_id"]), "flush")
    async with cluster.bus() as bus:
        await bus.request(order, what.encode(), timeout_seconds=60)


async def arrived(
    client: Client, cluster: Cluster, place: Place, prompt: Sequence[int], wanted: CachedTokens
) -> tuple[Generated, Generated]:
    """The prompt from a tier, and the answer to another one that is asked beside it.

    Asked again where a call took too long on a busy machine, which is a miss, or where the other
    request was faster and had taken some of a small arena.
    """
    tier = Tier.PEER if wanted.peer else Tier.STORAGE
    for number in range(TRIES):
        cluster.await_attached()
        await forget_devices(cluster)
        await flush_hostcache(cluster, place.node, "all" if tier is Tier.PEER else "host")
        name = f"{tier}-{place.node}-{len(prompt)}-{number}"
        found, beside = await asyncio.gather(
            generate(client, prompt, GREEDY, request_id=name), generate(client, BESIDE, GREEDY)
        )
        if cached(found) == wanted:
            break
    assert cached(found) == wanted
    assert await cluster.plane_of(name) == place.plane
    return found, beside


async def test_the_router_has_a_prefetch_done_before_the_worker_reads_its_order(
    cluster: Cluster, llm: LLM
) -> None:
    """The worker is stopped until all units are fetched, so only the router can have asked."""
    prompt = [(23 * i + 9) % 120 + 3 for i in range(90)]
    async with Client(cluster.grpc) as client:
        await generate(client, prompt, GREEDY)
        await cluster.await_stored(prompt, tier=Tier.STORAGE)
        for number in range(TRIES):
            await leave_to_storage(cluster, prompt)
            before = (await cluster.hostcache_stats()).prefetch
            name = f"early-{number}"
            found, was_early = await asked_of_a_stopped_worker(client, cluster, prompt, name)
            after = (await cluster.hostcache_stats()).prefetch
            assert_same(found, expected(llm, prompt))
            has_joined = after.begun == before.begun + 1
            if was_early and has_joined and cached(found) == CachedTokens(storage=80):
                break
    assert was_early, "it was brought while the worker stood still"
    assert has_joined, "the worker joined the prefetch that was there"
    assert cached(found) == CachedTokens(storage=80)
    cluster.assert_ledgers_balance()


async def asked_of_a_stopped_worker(
    client: Client, cluster: Cluster, prompt: Sequence[int], request_id: str
) -> tuple[Generated, bool]:
    """The worker goes on when all was brought; whether it was. Looks into the index, calls and
    workers that are silent have time limits: a machine too slow for them is given another try."""
    (prefill,) = cluster.of_role("prefill")
    complete, was_early = (await cluster.hostcache_stats()).prefetch.complete, False
    async with asyncio.TaskGroup() as group:
        with stopped(prefill.process):
            asking = group.create_task(generate(client, prompt, GREEDY, request_id=request_id))
            with suppress(TimeoutError):
                async with asyncio.timeout(STOPPED_SECONDS):
                    if (await first_route(client, request_id)).chosen.storage_tokens:
                        await completed_prefetches(cluster, complete + 1)
                        was_early = True
            assert not asking.done()
    return asking.result(), was_early


async def first_route(client: Client, request_id: str) -> RouteExplanation:
    while True:
        with suppress(NotFound):
            for route in await client.explain(request_id):
                return route
        await asyncio.sleep(0.01)


async def leave_to_storage(cluster: Cluster, prompt: Sequence[int]) -> None:
    """The prompt is in storage alone, and the router can know that and reach the host-cache."""
    await forget_devices(cluster)
    model = load_model(cluster.model, LoadOptions(cluster.shape.dtype, page_size=PAGE_SIZE))
    keys, shape = cluster.keys_of(prompt), ResumeShape.of(model.manifest)
    hostcache, held = str(cluster.hostcache().ready["worker_id"]), (0, 0)
    async with cluster.bus() as bus, redis_index(cluster.redis, KEY) as index, asyncio.timeout(120):
        while held != (len(keys), 0):
            # A flush drops nothing that is leased at that moment.
            await bus.request(Subjects().control(hostcache, "flush"), b"", timeout_seconds=60)
            for holding in (await index.usable_pages(keys, shape)).values():
                held = holding.usable_pages, holding.host_pages
    beat = await told_everywhere(cluster, cluster.hostcache(), lambda told: bool(told.state.digest))
    assert beat.prefetch_threshold == PAGE_SIZE, "as it was set"


async def told_everywhere(
    cluster: Cluster, service: Service, is_told: Callable[[Heartbeat], bool]
) -> Heartbeat:
    """The second heartbeat of a service that tells so: by then the router has had the first, and
    looked again which nodes live."""
    subject = Subjects().beat(service.role, str(service.ready["worker_id"]))
    told: list[Heartbeat] = []
    async with cluster.bus() as bus, asyncio.timeout(120), bus.subscribed(subject) as beats:
        while len(told) < 2:
            beat = beat_from_bytes((await anext(beats)).payload)
            assert isinstance(beat, Heartbeat)
            told += [beat] * is_told(beat)
    return told[-1]


async def completed_prefetches(cluster: Cluster, wanted: int) -> None:
    while (await cluster.hostcache_stats()).prefetch.complete < wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@contextmanager
def stopped(process: ServiceProcess) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def test_a_peer_hit_is_exact(cluster: Cluster, llm: LLM, place: Place) -> None:
    """The first of a place: the worker comes from another node, whose host-cache has the prompt."""
    prompt = prompt_for(place, 19)
    (here,) = cluster.of_role("prefill")
    assert here.node != place.node
    async with Client(cluster.grpc) as client:
        await generate(client, prompt, GREEDY)
        await cluster.await_stored(prompt, node=here.node)
        move_to(cluster, place)
        found, beside = await arrived(client, cluster, place, prompt, CachedTokens(peer=80))
    assert_same(found, expected(llm, prompt))
    assert_same(beside, expected(llm, BESIDE))
    cluster.assert_ledgers_balance()


async def test_a_storage_hit_after_a_kill_is_exact(
    cluster: Cluster, llm: LLM, place: Place
) -> None:
    prompt = prompt_for(place, 11)
    move_to(cluster, place)
    async with Client(cluster.grpc) as client:
        await generate(client, prompt, GREEDY)
        await cluster.await_stored(prompt, node=place.node, tier=Tier.STORAGE)
        restart_hostcache(cluster, place.node)
        found, beside = await arrived(client, cluster, place, prompt, CachedTokens(storage=80))
    assert_same(found, expected(llm, prompt))
    assert_same(beside, expected(llm, BESIDE))
    cluster.assert_ledgers_balance()


async def test_a_truncated_prefetch_is_exact(cluster: Cluster, llm: LLM, place: Place) -> None:
    """Two turns leave two resume points in storage; room is for the first alone."""
    prompt = prompt_for(place, 17, 170)
    move_to(cluster, place)
    async with Client(cluster.grpc) as client:
        for turn in (prompt[:70], prompt):
            await generate(client, turn, GREEDY)
            await cluster.await_stored(turn, node=place.node, tier=Tier.STORAGE)
        restart_hostcache(cluster, place.node, **SMALL)
        found, beside = await arrived(client, cluster, place, prompt, CachedTokens(storage=64))
        stats = await cluster.hostcache_stats(place.node)
    assert stats.prefetch.truncated > 0
    assert_same(found, expected(llm, prompt))
    assert_same(beside, expected(llm, BESIDE))
    restart_hostcache(cluster, place.node)


async def test_what_a_killed_node_left_in_a_bucket_is_resumed_at_another(
    cluster: Cluster, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host-cache `found`, with a folder and an arena of its own, comes where `lost` was killed. The
    last test here: it leaves the worker without a host-cache."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    prompt = [(13 * i + 5) % 120 + 3 for i in range(90)]
    (here,) = cluster.of_role("prefill")
    async with Client(cluster.grpc) as client:
        with s3_server() as s3:
            for name in ("lost", "found"):
                folder = f"s3://{BUCKET}/nodes/{name}?endpoint={s3.url}&region=us-east-1"
                restart_hostcache(cluster, here.node, **{"node": name, "storage_dir": folder})
                if name == "lost":
                    await generate(client, prompt, GREEDY)
                    await shared_pages(cluster, prompt, 5)
            await told_everywhere(cluster, here, lambda told: told.node == "found")
            found, name = await brought_from_folder(client, cluster, here.node, prompt)
            cluster.hostcache(here.node).kill()  # while its bucket is there
    assert cached(found) == CachedTokens(storage=80)
    assert_same(found, expected(llm, prompt))
    pattern, folders = f"{Subjects().root}.life.hostcache.*.{name}.stored", set[object]()
    async with cluster.bus() as bus, asyncio.timeout(120):
        while folders != {"lost"}:
            events = [decode_event(e.payload) for e in await bus.history(pattern, max_events=99)]
            folders = {event.facts["folder"] for event in events if "folder" in event.facts}


async def brought_from_folder(
    client: Client, cluster: Cluster, node: int, prompt: Sequence[int]
) -> tuple[Generated, str]:
    """The answer from another node's objects, as the router foresaw; and the request's name. Asked
    again where a call took too long."""
    for number in range(TRIES):
        await forget_devices(cluster)
        await flush_hostcache(cluster, node, "all")
        await shared_pages(cluster, prompt, 5)
        name = f"folder-{number}"
        found = await generate(client, prompt, GREEDY, request_id=name)
        (route, *_) = await client.explain(name)
        if cached(found).storage == route.chosen.storage_tokens == 80:
            break
    assert route.chosen.storage_tokens == 80
    return found, name


async def shared_pages(cluster: Cluster, prompt: Sequence[int], wanted: int) -> None:
    """Until the index says that the folder of `lost` has so many pages."""
    model = load_model(cluster.model, LoadOptions(cluster.shape.dtype, page_size=PAGE_SIZE))
    keys, shape = cluster.keys_of(prompt), ResumeShape.of(model.manifest)
    async with redis_index(cluster.redis, KEY) as index, asyncio.timeout(120):
        held = {"": 0}
        while wanted not in held.values():
            # An index that is away answers at once, and a task of its own asks when it is back.
            await asyncio.sleep(0.001)
            found = (await index.usable_pages(keys, shape)).items()
            held = {name: each.usable_pages for name, each in found if name.endswith("-lost")}
