"""A cluster of workers that do both: exact as one process, also when one of them is killed.

The tests run in the order in which they stand here, on one cluster; the last one takes a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Generated,
    assert_same,
    events_until,
    generate,
    generate_all,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.sockets import listening_addresses

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.ids import make_request_id
from ferryman.llm import LLM
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.subjects import Subjects

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.9, seed=5, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    shape = ClusterShape(num_prefill=0, num_decode=0, num_both=2, chunk_tokens=32)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        cluster.await_attached()
        yield cluster


@pytest.fixture(scope="module")
def oracle(cluster: Cluster) -> Iterator[LLM]:
    with one_process(cluster.model) as llm:
        yield llm


def device_and_host(found: Generated) -> tuple[int, int]:
    assert found.usage is not None
    return found.usage.cached.device, found.usage.cached.host


async def events_of(cluster: Cluster) -> list[LifecycleEntry]:
    async with cluster.bus() as bus:
        said = await bus.history(f"{Subjects().root}.life.>", max_events=10_000)
    return [decode_event(each.payload) for each in said]


async def routed_to_the_prefix(client: Client) -> Generated:
    """The first answer for which the router knew the prefix: a worker tells soon what it has."""
    async with asyncio.timeout(60):
        while True:
            name = make_request_id()
            found = await generate(client, PROMPT, GREEDY, request_id=name)
            (route,) = await client.explain(name)
            if route.chosen.device_tokens == 64:
                return found


def test_a_worker_that_does_both_listens_at_its_two_locked_doors_alone(cluster: Cluster) -> None:
    for worker in cluster.of_role("both"):
        doors = {urlsplit(f"//{worker.ready[name]}").port for name in ("address", "observe")}
        assert set(listening_addresses(worker.process.pid)) == doors


async def test_cold_hit_forks_and_the_host_tier_are_exact(cluster: Cluster, oracle: LLM) -> None:
    forks = [[*PROMPT[:66], *tail] for tail in ([5], [9] * 20, [11] * 3)]
    cold = oracle.generate([PROMPT, *forks], GREEDY)
    async with Client(cluster.grpc) as client:
        first = await generate(client, PROMPT, GREEDY, request_id="first")
        assert device_and_host(first) == (0, 0)
        again = await routed_to_the_prefix(client)
        assert device_and_host(again) == (64, 0), "the worker with the prefix is chosen"
        found = [first, again, *await generate_all(client, forks, GREEDY)]
        await cluster.await_stored(PROMPT)
        # A client has the end of its answer before the worker has let go of the units.
        await asyncio.to_thread(cluster.assert_ledgers_balance)
        await cluster.flush_device("both")
        loaded = await generate(client, PROMPT, GREEDY)
        assert device_and_host(loaded) == (0, 64)
    for answer, expected in zip(
        [*found, loaded], [cold[0], cold[0], *cold[1:], cold[0]], strict=True
    ):
        assert_same(answer, expected)
    assert await cluster.plane_of("first") == "local"
    cluster.assert_ledgers_balance()


async def test_the_explanation_names_one_worker_twice(cluster: Cluster) -> None:
    async with Client(cluster.grpc) as client:
        await generate(client, PROMPT[:20], GREEDY, request_id="explained")
        (route,) = await client.explain("explained")
    assert route.chosen.prefill_worker_id == route.chosen.decode_worker_id
    assert (route.chosen.plane, route.chosen.handoff_seconds) == ("local", 0.0)
    assert len(route.others) == 1, "the other worker, and no pair of two"


async def test_several_answers_of_one_prompt_over_http(cluster: Cluster) -> None:
    body = {
        "model": "tiny",
        "prompt": " ".join(f"w{token}" for token in PROMPT),
        "n": 3,
        "max_tokens": 6,
        "seed": 3,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=cluster.http, timeout=120) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2]
    cluster.assert_ledgers_balance()


async def test_a_killed_worker_costs_no_answer_and_no_token(cluster: Cluster, oracle: LLM) -> None:
    prompts = [[*PROMPT[:i], 3 + i, 7] for i in range(10, 22)]
    cold = oracle.generate(prompts, LONG)
    busy = asyncio.Event()
    async with Client(cluster.grpc) as client:

        async def asked(index: int) -> Generated:
            return await generate(client, prompts[index], LONG, request_id=f"killed-{index}")

        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(asked(index)) for index in range(len(prompts))]
            calls.create_task(_when_both_decode(cluster, busy))
            await busy.wait()
            cluster.of_role("both")[0].kill()
    for task, expected in zip(tasks, cold, strict=True):
        assert_same(task.result(), expected)
    said = await events_of(cluster)
    moved = {event.request_id for event in said if event.name == "migrated"}
    assert moved, "the dead worker was decoding"
    assert not check(said)
    cluster.assert_ledgers_balance()


async def _when_both_decode(cluster: Cluster, busy: asyncio.Event) -> None:
    """Until each worker decodes a request."""

    def is_enough(events: list[LifecycleEntry]) -> bool:
        killed = [event for event in events if event.request_id.startswith("killed")]
        return len({event.worker_id for event in killed}) == 2

    async with cluster.bus() as bus:
        await events_until(bus, f"{Subjects().root}.life.decode.*.*.first_token", is_enough)
    busy.set()
