"""Many requests at once on two workers of each role: order of events, conservation, killed workers.

The tests run in the order in which they stand here, on one cluster that has to live through them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence, Set
from contextlib import aclosing, suppress

import pytest
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Service,
    events_until,
    generate,
    generate_all,
    one_process,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.errors import DeadlineExceeded, Exhausted, Unavailable
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.ids import make_request_id
from ferryman.runtime.lifecycle import decode_event
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.bus import Bus, Messages
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import TokenChunk

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),
]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
# Until a kill hits: prompts differ, for what is cached is over too soon.
TRIES = 5
ENDS = {"finished", "failed", "cancelled", "rejected"}
ON_THE_WAY = {"received", "routed", "queued", "admitted", "chunk", "finished"}
SILENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    shape = ClusterShape(num_prefill=2, num_decode=2, max_running=16, memory_bytes=48 << 20)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def expected(
    cluster: Cluster, prompts: Sequence[list[int]], sampling: SamplingParams
) -> list[list[int]]:
    """The answers of one process without a cache."""
    folder, memory_bytes = cluster.model, 64 << 20
    with one_process(folder, memory_bytes=memory_bytes) as llm:
        return [list(one.token_ids) for one in llm.generate(list(prompts), sampling)]


def prompt_of(rng: random.Random) -> list[int]:
    """Of a few families, so that prefixes are shared."""
    family, length = rng.randrange(6), rng.randrange(1, 120)
    return [(family * 7 + i * 3) % 120 + 3 for i in range(length)]


async def events_until_over(
    messages: Messages, num_requests: int
) -> dict[str, list[LifecycleEntry]]:
    """Everything said on the life subjects, until the router has ended each request.

    A subscriber whose connection broke has lost what was said meanwhile, perhaps the last of it:
    then silence ends the wait. Whether each request ended is read from the log, which loses none.
    """
    found: dict[str, list[LifecycleEntry]] = {}
    over: set[str] = set()
    with suppress(TimeoutError):
        while len(over) < num_requests:
            async with asyncio.timeout(SILENCE_SECONDS):
                event = decode_event((await anext(messages)).payload)
            found.setdefault(event.request_id, []).append(event)
            if event.role == "router" and event.name in ENDS:
                over.add(event.request_id)
    return found


async def logged_with(bus: Bus, request_id: str, names: Set[str]) -> list[LifecycleEntry]:
    """A request's log once it has these events: each publisher sends at its own time."""
    pattern = Subjects().all_life_of(request_id)
    return await events_until(bus, pattern, lambda logged: names <= {each.name for each in logged})


async def test_a_hundred_requests_publish_their_events_in_legal_order(cluster: Cluster) -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(100)]
    async with cluster.bus() as bus, bus.subscribed(Subjects().all_life) as messages:
        async with Client(cluster.grpc) as client:
            listening = asyncio.create_task(events_until_over(messages, 100))
            answers = await generate_all(client, prompts, GREEDY)
            events = await listening
        assert all(len(answer.token_ids) == 12 for answer in answers)
        assert len(events) == 100
        for request_id, heard in events.items():
            logged = await logged_with(bus, request_id, ON_THE_WAY)
            assert check(logged) == []
            assert {event.name for event in heard} <= {event.name for event in logged}


@pytest.mark.slow
async def test_two_thousand_requests_with_cancellations_leave_nothing_behind(
    cluster: Cluster,
) -> None:
    rng = random.Random(2)
    run_limit = asyncio.Semaphore(64)
    ended = {"whole": 0, "cancelled": 0, "refused": 0}

    async def one(client: Client, number: int) -> None:
        prompt, stops_after = prompt_of(rng), rng.choice([0, 0, 1, 3])
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 16), temperature=rng.choice([0.0, 0.8]), seed=number
        )
        async with run_limit:
            try:
                async with aclosing(
                    client.generate(prompt, sampling, deadline_seconds=120)
                ) as events:
                    async for event in events:
                        if isinstance(event, TokenChunk) and stops_after:
                            stops_after -= 1
                            if not stops_after:
                                ended["cancelled"] += 1
                                return
                ended["whole"] += 1
            except (Exhausted, Unavailable):
                ended["refused"] += 1

    async with Client(cluster.grpc) as client, asyncio.TaskGroup() as group:
        for number in range(2000):
            group.create_task(one(client, number))
    assert sum(ended.values()) == 2000
    assert ended["cancelled"] > 200, "cancellations were meant to happen"
    assert ended["refused"] < 100, ended
    cluster.assert_ledgers_balance()


async def heard(messages: Messages, name: str) -> LifecycleEntry:
    """The next lifecycle event of that name."""
    async with asyncio.timeout(120):
        while (event := decode_event((await anext(messages)).payload)).name != name:
            pass
        return event


def publisher(cluster: Cluster, event: LifecycleEntry) -> Service:
    """The process that said it."""
    services = cluster.of_role(event.role)
    return next(one for one in services if one.ready["worker_id"] == event.worker_id)


async def answered_though_one_dies(
    cluster: Cluster, event: str, prompts: Sequence[list[int]], sampling: SamplingParams
) -> bool:
    """Kills the worker that publishes `event` of the first prompt. Returns whether that was in
    time: on a busy machine the answer may be complete before. The answer must be right anyway."""
    wanted, name = expected(cluster, prompts, sampling), make_request_id()
    async with Client(cluster.grpc) as client, cluster.bus() as bus:
        async with bus.subscribed(Subjects().all_life_of(f"{name}-0")) as messages:
            running = [
                asyncio.create_task(generate(client, prompt, sampling, request_id=f"{name}-{n}"))
                for n, prompt in enumerate(prompts)
            ]
            victim = publisher(cluster, await heard(messages, event))
            victim.kill()
        answers = await asyncio.gather(*running)
        num_attempts = len(await client.explain(f"{name}-0"))
    replace(cluster, victim.role)
    assert [answer.token_ids for answer in answers] == wanted
    return num_attempts > 1


async def test_a_killed_decode_worker_costs_the_client_no_token(cluster: Cluster) -> None:
    for nth in range(TRIES):
        prompts = [[(5 * i + n) % 120 + 3 for i in range(40 + nth)] for n in range(3)]
        if await answered_though_one_dies(cluster, "progress", prompts, LONG):
            break
    else:
        pytest.fail("no kill hit")
    cluster.assert_ledgers_balance()


def replace(cluster: Cluster, role: str) -> None:
    """Replaces a dead worker, as `ferryman up` does."""
    cluster.start(role).await_ready()
    cluster.await_workers(prefill=2, decode=2)


async def test_a_killed_prefill_worker_is_replaced_by_another(cluster: Cluster) -> None:
    for nth in range(TRIES):
        prompt = [(9 * i + 4 + nth) % 120 + 3 for i in range(900)]
        if await answered_though_one_dies(cluster, "chunk", [prompt], GREEDY):
            break
    else:
        pytest.fail("no kill hit")
    cluster.assert_ledgers_balance()


async def test_a_killed_host_cache_fails_no_request(cluster: Cluster) -> None:
    prompts = [[(3 * i + n) % 120 + 3 for i in range(50)] for n in range(20)]
    wanted = expected(cluster, prompts, GREEDY)
    async with Client(cluster.grpc) as client:
        first = await generate_all(client, prompts[:10], GREEDY)
        (hostcache,) = cluster.of_role("hostcache")
        hostcache.kill()
        rest = await generate_all(client, prompts[10:], GREEDY)
    assert [answer.token_ids for answer in [*first, *rest]] == wanted
    cluster.start("hostcache").await_ready()
    cluster.assert_ledgers_balance()


async def test_a_deadline_of_a_millisecond_is_a_typed_error_and_frees_everything(
    cluster: Cluster,
) -> None:
    async with Client(cluster.grpc) as client:
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                await generate(client, [5] * 60, LONG, deadline_seconds=0.001)
    cluster.assert_ledgers_balance()
