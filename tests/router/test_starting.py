"""A cluster that starts: its doors are open, requests wait for its workers, and refused callers are
told what it is doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.harness.router import (
    QUICK,
    FakeDecode,
    QueueCluster,
    RouterCluster,
    cluster,
    collect,
    living,
)
from tests.waiting import until

from ferryman.ids import make_life_secret, worker_id_of
from ferryman.wire.grpc.status import REASON, RETRY_AFTER
from ferryman.wire.nats.heartbeat import StartBeat, StartPhase, beat_to_bytes
from ferryman.wire.v1 import inference_pb2 as pb
from ferryman.wire.v1 import status_pb2, types_pb2
from ferryman_router.routing.worker_starts import FIRST_START_SECONDS

BODY = {"prompt": "the ferry", "max_tokens": 4}
SHORT = {"x-ferryman-deadline-ms": "300"}
# Of the fakes' lives: a machine that is busy makes none of them a new one.
LIMITS = QUICK.model_copy(update={"no_worker_seconds": 60.0})


@pytest.fixture
async def starting(nats_url: str, folder: Path) -> AsyncIterator[RouterCluster]:
    """Its prefill worker is ready, and no decode worker is there yet."""
    async with cluster(nats_url, folder, num_decodes=0, limits=LIMITS) as made:
        yield made


async def tell_start(made: RouterCluster, done: int, seconds: float) -> str:
    """A decode worker's start beat, once the router has heard it; returns its id."""
    worker_id = worker_id_of("decode", make_life_secret())
    beat = StartBeat("decode", worker_id, 7, StartPhase.COMPILING, done, 0, seconds)
    made.bus.offer(made.subjects.beat("decode", worker_id), beat_to_bytes(beat))
    await until(lambda: made.fleet.starts.latest("decode", 0.0) is not None)
    return worker_id


def is_waiting(made: RouterCluster) -> bool:
    return len(made.router.components.dispatcher) == 1


async def test_a_request_waits_for_the_first_worker_and_is_answered(
    starting: RouterCluster,
) -> None:
    await tell_start(starting, 3, 12.0)
    asking = asyncio.create_task(starting.complete(**BODY))
    await until(lambda: is_waiting(starting))
    async with living(FakeDecode(starting.script), starting.bus, starting.subjects):
        response = await asking
    assert response.json()["choices"][0]["text"] == starting.expected(4)


async def test_a_refused_caller_hears_what_the_cluster_does_and_when_to_come_back(
    starting: RouterCluster,
) -> None:
    worker_id = await tell_start(starting, 3, 12.0)
    refused = await starting.http.post("/v1/completions", json=BODY, headers=SHORT)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "no_worker")
    assert error["message"].startswith("the cluster is starting: ")
    assert f"{worker_id} is compiling loops, 3 so far" in error["message"]
    assert f"a start may take {FIRST_START_SECONDS:.0f} s" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= FIRST_START_SECONDS - 12.0


async def test_a_refused_caller_over_grpc_has_the_same_as_a_retry_info(
    starting: RouterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own deadline would end the call first, so the router is made to give up."""
    await tell_start(starting, 3, 12.0)
    patience = starting.router.components.dispatcher.patience
    monkeypatch.setattr(patience, "refusal", patience.refusal_at_deadline)
    sampling = types_pb2.SamplingParams(max_tokens=4)
    asked = pb.GenerateRequest(prompt=pb.Prompt(text="the ferry"), sampling=sampling)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(starting.stub.Generate(asked, timeout=120))
    trailers = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (caught.value.details() or "").startswith("the cluster is starting: ")
    assert trailers[REASON] == "NoWorker"
    details: Any = status_pb2.StatusDetails.FromString(_bytes(trailers["grpc-status-details-bin"]))
    delay = status_pb2.RetryInfo.FromString(details.details[0].value).retry_delay
    assert delay.ToMilliseconds() == int(str(trailers[RETRY_AFTER])) >= 1000


def _bytes(value: str | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


async def test_readiness_says_what_is_done_for_each_role_without_a_worker(
    starting: RouterCluster,
) -> None:
    worker_id = await tell_start(starting, 3, 12.0)
    answer = await starting.http.get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "starting")
    (start,) = answer.json()["starts"]
    assert start.startswith(f"{worker_id} is compiling loops, 3 so far")
    async with living(decode := FakeDecode(starting.script), starting.bus, starting.subjects):
        await starting.until_joined(decode)
        await until(lambda: not starting.router.components.dispatcher.patience.lacks_workers)
        answer = await starting.http.get("/ready")
        assert (answer.status_code, answer.json()["starts"]) == (200, [])
    await until(lambda: starting.router.components.dispatcher.patience.lacks_workers)
    assert (await starting.http.get("/ready")).json()["status"] == "waiting for workers"


async def test_those_who_wait_for_a_start_are_no_more_than_there_is_room_for(
    nats_url: str, folder: Path
) -> None:
    limits = LIMITS.model_copy(update={"max_queued": 2})
    async with cluster(nats_url, folder, num_decodes=0, limits=limits) as made:
        await tell_start(made, 3, 12.0)
        waiting = [asyncio.create_task(made.complete(**BODY)) for _ in range(2)]
        await until(lambda: len(made.router.components.dispatcher) == 2)
        refused = await made.complete(**BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) > 10, "no place is free before a worker is there"
        async with living(FakeDecode(made.script), made.bus, made.subjects):
            assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}


def test_a_wait_for_workers_does_not_make_the_cluster_look_slow() -> None:
    """Else those that come behind a restart are refused: they would be answered too late."""

    async def restart() -> QueueCluster:
        made = QueueCluster(1, service=1.0, deadline=60.0)
        made.arrive()
        await made.drain()
        (decode,) = (worker for worker in made.fleet if worker.beat.role == "decode")
        made.fleet.lose(decode.name, "killed")
        for _ in range(8):
            made.arrive()
        await made.run(made.now + 1.0)

        def comes_back() -> None:
            made.fleet.on_heartbeat(decode.beat, made.now)

        made.at(made.now + 25.0, comes_back)
        made.at(made.now + 25.1, made.arrive)
        made.at(made.now + 25.2, made.arrive)
        await made.drain()
        return made

    made = asyncio.run(restart())
    assert [one.kind for one in made.callers] == ["whole"] * 11
