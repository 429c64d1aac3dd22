"""Four processes against one: token-identical, log probabilities within 1e-12, in float64.

{cold, device hit, partial, fork, host hit} × {chunkings} × {overlap on, off} × {alone, mixed},
handed off by NIXL where it is installed, and by gRPC; what each answer says it reused, and each
hand-off how it went, proves that the feature really happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from tests.harness.cluster import (
    FAST_PLANE,
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    generate,
    generate_all,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.planes import plane_of
from tests.sockets import listening_addresses

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.llm import LLM, Completion
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.handoff.nixl_library import has_nixl
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.plane_values import GRPC, NIXL

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PAIR = {"prefill", "decode"}
UNLOCKED_PORT = "NIXL listens without a lock"
PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
WAYS = [
    pytest.param(
        ("granite_moe", ClusterShape(overlap=True, chunk_tokens=32, settings=on_plane(FAST_PLANE))),
        id="Granite, overlap, ragged chunks, by memory",
    ),
    pytest.param(
        ("granite_moe", ClusterShape(overlap=True, chunk_tokens=32, settings=on_plane(NIXL))),
        id="Granite, overlap, ragged chunks, by NIXL",
        marks=pytest.mark.skipif(not has_nixl(), reason="ferryman[nixl] is not installed"),
    ),
    pytest.param(
        ("bamba", ClusterShape(overlap=False, chunk_tokens=1024, settings=on_plane(GRPC))),
        id="Bamba, one step at a time, one chunk, by gRPC",
    ),
]


@pytest.fixture(scope="module", params=WAYS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    variant, shape = request.param
    model = save_served_model(tmp_path_factory.mktemp("model"), variant)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


class ClusterOracle:
    """The cold run of one process: no cache, no overlap, one chunk."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Completion:
        return self._llm.generate([list(prompt)], sampling)[0]


@pytest.fixture(scope="module")
def oracle(cluster: Cluster) -> Iterator[ClusterOracle]:
    with one_process(cluster.model) as llm:
        yield ClusterOracle(llm)


def cached(found: Generated) -> tuple[int, int]:
    """Reused prompt tokens by tier: device, host."""
    assert found.usage is not None
    return found.usage.cached.device, found.usage.cached.host


async def test_cold_then_hit_then_forks_are_exact(cluster: Cluster, oracle: ClusterOracle) -> None:
    expected = oracle.answer(PROMPT)
    async with Client(cluster.grpc) as client:
        cold = await generate(client, PROMPT, GREEDY)
        assert cached(cold) == (0, 0)
        assert_same(cold, expected)

        hit = await generate(client, PROMPT, GREEDY)
        assert cached(hit) == (64, 0)
        assert_same(hit, expected)

        forks = [[*PROMPT[:66], *tail] for tail in ([5], [9] * 20, [11] * 3)]
        for fork, found in zip(forks, await generate_all(client, forks, GREEDY), strict=True):
            assert cached(found) == (64, 0)
            assert_same(found, oracle.answer(fork))
    cluster.assert_ledgers_balance()


async def test_a_partial_hit_leaves_a_junction_and_is_exact(
    cluster: Cluster, oracle: ClusterOracle
) -> None:
    stem = [(5 * i + 1) % 110 + 4 for i in range(40)]
    async with Client(cluster.grpc) as client:
        await generate(client, [*stem, *[4] * 40], GREEDY)
        leaving = [*stem, *[6] * 30]
        first = await generate(client, leaving, GREEDY)
        assert cached(first) == (0, 0)
        assert first.usage is not None
        assert "no_snapshot" in {each.reason for each in first.usage.uncached}
        assert_same(first, oracle.answer(leaving))

        later = [*stem[:33], 8, 8]
        junction = await generate(client, later, GREEDY)
        assert cached(junction) == (32, 0)
        assert_same(junction, oracle.answer(later))


async def test_a_host_hit_is_exact_and_says_so(cluster: Cluster, oracle: ClusterOracle) -> None:
    prompt = [(11 * i + 5) % 120 + 3 for i in range(90)]
    expected = oracle.answer(prompt)
    async with Client(cluster.grpc) as client:
        assert_same(await generate(client, prompt, GREEDY), expected)
        await cluster.await_stored(prompt)
        await cluster.flush_device("prefill")
        await cluster.flush_device("decode")
        found = await generate(client, prompt, GREEDY)
        assert cached(found) == (0, 80)
        assert_same(found, expected)


async def test_a_next_turn_resumes_where_decode_stopped(
    cluster: Cluster, oracle: ClusterOracle
) -> None:
    """Decode writes its last snapshot through to the host; prefill loads it for the next turn."""
    prompt = [(13 * i + 2) % 115 + 3 for i in range(30)]
    async with Client(cluster.grpc) as client:
        turn = await generate(client, prompt, GREEDY)
        history = [*prompt, *turn.token_ids]
        await cluster.await_stored(history[:48])
        following = [*history, 9, 9, 9]
        found = await generate(client, following, GREEDY)
        assert sum(cached(found)) == 48
        assert cached(found)[1] > 0, "what decode computed came back through the host tier"
        assert_same(found, oracle.answer(following))


async def test_a_mixed_batch_is_exact(cluster: Cluster, oracle: ClusterOracle) -> None:
    prompts = [[(3 * i + n) % 120 + 3 for i in range(n)] for n in (1, 15, 16, 17, 33, 64, 100)]
    async with Client(cluster.grpc) as client:
        answers = await generate_all(client, prompts, GREEDY)
        drawn = await generate_all(client, prompts, DRAWN)
    for prompt, found, sampled in zip(prompts, answers, drawn, strict=True):
        assert_same(found, oracle.answer(prompt))
        assert tuple(sampled.token_ids) == oracle.answer(prompt, DRAWN).token_ids
    cluster.assert_ledgers_balance()


async def test_a_prompt_is_scored_exactly_whoever_has_it_cached(
    cluster: Cluster, oracle: ClusterOracle
) -> None:
    prompt = [(17 * i + 1) % 120 + 3 for i in range(75)]
    scored = replace(GREEDY, prompt_logprobs=3)
    expected = oracle.answer(prompt, scored)
    async with Client(cluster.grpc) as client:
        await generate(client, prompt, GREEDY)
        name = f"scored-{cluster.shape.chunk_tokens}"
        found = await generate(client, prompt, scored, request_id=name)
        assert cached(found) == (0, 0)
        assert found.usage is not None
        assert [each.reason for each in found.usage.uncached] == ["prompt_logprobs"]
        assert_same(found, expected)
        (route,) = await client.explain(name)
        assert route.chosen.usable_tokens == 0
        hit = await generate(client, prompt, GREEDY)
        assert cached(hit) == (64, 0)
        others = [[(3 * i + n) % 120 + 3 for i in range(n)] for n in (2, 16, 33, 100)]
        for other, one in zip(others, await generate_all(client, others, scored), strict=True):
            assert_same(one, oracle.answer(other, scored))
    cluster.assert_ledgers_balance()


async def test_every_process_listens_where_it_was_told_and_nowhere_else(cluster: Cluster) -> None:
    """UCX by itself takes every device there is, and listens on each."""
    async with Client(cluster.grpc) as client:
        await generate(client, [*PROMPT, 4], GREEDY, request_id="by-plane")
    plane = plane_of(cluster.shape.settings["decode"]["planes"])
    assert await cluster.plane_of("by-plane") == plane, "agents were made"
    for service in cluster.services:
        told = {urlsplit(f"//{each}").port for each in service.ready.values() if ":" in str(each)}
        found = listening_addresses(service.process.pid)
        assert {str(address) for address in found.values()} == {"127.0.0.1"}
        assert told <= set(found), "its doors are seen"
        # NIXL alone has others, and the log of its worker names each.
        others, log = set(found) - told, service.log.read_text()
        assert bool(others) == (UNLOCKED_PORT in log) == (plane == NIXL and service.role in PAIR)
        assert all(f"127.0.0.1:{port}" in log for port in others)


async def test_every_hand_off_went_by_the_plane_of_its_way(cluster: Cluster) -> None:
    """The last here, so that the log has them all."""
    wanted = {plane_of(cluster.shape.settings["decode"]["planes"])}
    async with Client(cluster.grpc) as client, cluster.bus() as bus:
        await generate(client, [*PROMPT, 3], GREEDY, request_id="the-last")
        for role, name in (("decode", "reserved"), ("prefill", "handed_off")):
            assert {event.facts["path"] for event in await all_said(bus, role, name)} == wanted


async def all_said(bus: NatsBus, role: str, name: str) -> list[LifecycleEntry]:
    """Events of that name, once the request `the-last` has one."""
    pattern = f"{Subjects().root}.life.{role}.*.*.{name}"
    async with asyncio.timeout(120):
        while True:
            entries = await bus.history(pattern, max_events=1000)
            events = [decode_event(entry.payload) for entry in entries]
            if "the-last" in {event.request_id for event in events}:
                return events
