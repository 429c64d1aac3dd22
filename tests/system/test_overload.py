"""A real cluster gets far more than it can serve: refused callers get an error and cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    events_until,
    generate,
    generate_all,
    running_cluster,
    save_served_model,
)

from ferryman.client import Client
from ferryman.client.retries import Retries
from ferryman.errors import DeadlineExceeded, Exhausted
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.bus import Bus
from ferryman.wire.nats.subjects import Subjects

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

ANSWER = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
CROWD, DEADLINE = 150, 4.0
NO_RETRIES = Retries(max_failures=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three rows: two that run, and one that is on its way."""
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    settings = {"decode": {"max_reserved": 1}}
    shape = ClusterShape(max_running=2, dtype="float32", settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + i * 3) % 120 + 3 for i in range(20)]


async def asked(client: Client, number: int) -> tuple[str, float]:
    """How it ended, and the seconds after which to come back."""
    try:
        await generate(
            client,
            prompt_of(number),
            ANSWER,
            request_id=f"crowd-{number}",
            deadline_seconds=DEADLINE,
        )
    except Exhausted as error:
        return error.reason, error.retry_after_seconds
    except DeadlineExceeded as error:
        return error.reason, 0.0
    return "whole", 0.0


async def told(bus: Bus, request_id: str) -> set[tuple[str, str]]:
    """The (role, event) pairs of a request, once its end is in the log."""

    def is_over(events: list[LifecycleEntry]) -> bool:
        by_router = {event.name for event in events if event.role == "router"}
        return bool(by_router & {"rejected", "finished"})

    events = await events_until(bus, Subjects().all_life_of(request_id), is_over)
    return {(event.role, event.name) for event in events}


async def test_what_is_refused_was_never_computed_and_afterwards_all_is_as_before(
    cluster: Cluster,
) -> None:
    async with Client(cluster.grpc, retries=NO_RETRIES) as client:
        await generate_all(client, [prompt_of(n) for n in range(1000, 1012)], ANSWER)
        ends = await asyncio.gather(*(asked(client, number) for number in range(CROWD)))
        kinds = Counter(kind for kind, _ in ends)
        refused = [number for number, (kind, _) in enumerate(ends) if kind == "Overloaded"]
        assert set(kinds) <= {"whole", "Overloaded", "DeadlineExceeded"}, kinds
        # How many more are refused, and how many of the others miss their deadline, hangs on how
        # evenly a shared machine runs (70 of 150 once, at load 4); the campaign measures that.
        assert len(refused) > CROWD / 4, kinds
        assert all(seconds >= 1.0 for kind, seconds in ends if kind == "Overloaded")
        async with cluster.bus() as bus:
            for number in refused[:: len(refused) // 8]:
                said = await told(bus, f"crowd-{number}")
                assert said == {("router", "received"), ("router", "rejected")}
        again = await generate(client, prompt_of(1), ANSWER, deadline_seconds=60.0)
        assert len(again.token_ids) == 120
    cluster.assert_ledgers_balance()
