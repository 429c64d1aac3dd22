"""Decode workers drain under streams: each request goes on at another one, with its state.

No client notices, nothing is computed again, and the log of each request says where it went.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.system.cluster import Cluster, ClusterShape, running_cluster, save_served_model
from tests.system.many_streams import Streams, sampling_of, undisturbed

from ferryman.client import Client
from ferryman.credentials import ClusterRole
from ferryman.handoff.lifecycle import LifecycleEntry, check, is_over
from ferryman.ids import make_request_id
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.app import run

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STREAMS = 16
SHAPES = {
    "apart": ClusterShape(num_prefill=2, num_decode=2, max_running=20, memory_bytes=96 << 20),
    "both": ClusterShape(
        num_prefill=0, num_decode=0, num_both=2, max_running=20, memory_bytes=96 << 20
    ),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(model, folder, SHAPES[request.param]) as cluster:
        yield cluster


async def logs_of(cluster: Cluster, request_ids: list[str]) -> dict[str, list[LifecycleEntry]]:
    """The whole log of each request."""
    found: dict[str, list[LifecycleEntry]] = {}
    async with cluster.bus() as bus, asyncio.timeout(120):
        for request_id in request_ids:
            subject = f"{Subjects().root}.life.*.*.{request_id}.>"
            events: list[LifecycleEntry] = []
            while not is_over(events):
                said = await bus.history(subject, max_events=1000)
                events = [decode_event(message.payload) for message in said]
            found[request_id] = events
    return found


def computed_again(events: list[LifecycleEntry]) -> list[LifecycleEntry]:
    """Prompts that were computed by a later attempt than the first."""
    return [event for event in events if event.role == "prefill" and event.attempt > 1]


async def test_streams_of_a_worker_that_drains_go_on_with_their_state(cluster: Cluster) -> None:
    prompts = [[(7 * i + 3 * n) % 120 + 3 for i in range(20 + n % 9)] for n in range(NUM_STREAMS)]
    wanted = undisturbed(cluster, prompts)
    role = "both" if cluster.shape.num_both else "decode"
    victim, name = cluster.of_role(role)[0], make_request_id()
    ids = [f"{name}-{n}" for n in range(NUM_STREAMS)]
    streams = Streams(wanted=NUM_STREAMS, far=3)
    async with Client(cluster.grpc) as client, asyncio.timeout(300):
        reading = [
            asyncio.create_task(streams.read(client, prompt, sampling_of(n), ids[n]))
            for n, prompt in enumerate(prompts)
        ]
        await streams.many.wait()
        victim.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*reading)
    assert victim.process.wait(timeout=120) == 0, "it had nothing left"
    assert answers == wanted
    logs = await logs_of(cluster, ids)
    assert check(event for events in logs.values() for event in events) == []
    moved = {
        request_id: [event for event in events if (event.role, event.name) == ("decode", "moving")]
        for request_id, events in logs.items()
    }
    moves = [event for events in moved.values() for event in events]
    assert moves, "it decoded some of them"
    assert {event.worker_id for event in moves} == {victim.ready["worker_id"]}
    assert [event for events in logs.values() for event in computed_again(events)] == []
    migrated = [event for events in logs.values() for event in events if event.name == "migrated"]
    assert len(migrated) == len(moves), "each was tried once"
    cluster.start(role).await_ready()
    cluster.assert_ledgers_balance()


async def started_again(cluster: Cluster, is_over: asyncio.Event) -> list[int]:
    """Starts each worker that ends again, as `ferryman up` does; the statuses with which they
    ended."""
    statuses: list[int] = []
    known = {one.process.pid for one in cluster.services if one.process.poll() is not None}
    while not is_over.is_set():
        for one in tuple(cluster.services):
            if one.process.poll() is not None and one.process.pid not in known:
                known.add(one.process.pid)
                statuses.append(one.process.returncode)
                await asyncio.to_thread(cluster.start(one.role).await_ready)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await is_over.wait()
    return statuses


@pytest.mark.parametrize("cluster", ["apart"], indirect=True)
async def test_all_are_restarted_one_by_one_under_streams_and_no_client_notices(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts are asked again and again until all are back, so sixteen are under way all the
    time."""
    prompts = [[(3 * i + 7 * n) % 120 + 3 for i in range(20 + n)] for n in range(NUM_STREAMS)]
    wanted = undisturbed(cluster, prompts)
    running = [one for one in cluster.services if one.process.poll() is None]
    before = {str(one.ready["worker_id"]) for one in running if one.role != "router"}
    router = cluster.credentials[ClusterRole.ROUTER]
    line = ["roll", "--nats", cluster.nats, "--credentials", str(router), "--json"]
    answers: list[tuple[int, list[int]]] = []
    is_over = asyncio.Event()

    async def ask_again(client: Client, n: int) -> None:
        while not is_over.is_set():
            name = make_request_id()
            answers.append((n, await Streams().read(client, prompts[n], sampling_of(n), name)))

    async with Client(cluster.grpc) as client, asyncio.timeout(400):
        asking = [asyncio.create_task(ask_again(client, n)) for n in range(NUM_STREAMS)]
        restarting = asyncio.create_task(started_again(cluster, is_over))
        status = await asyncio.to_thread(run, line)
        is_over.set()
        await asyncio.gather(*asking)
        statuses = await restarting
    assert (status, statuses) == (0, [0] * len(before))
    assert all(answer == wanted[n] for n, answer in answers)
    said = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    gone = [one["worker_id"] for one in said if one["state"] == "draining"]
    back = [one for one in said if one["state"] == "replaced"]
    assert gone == [one["worker_id"] for one in back]
    assert set(gone) == before
    assert not before & {one["by"] for one in back}
    cluster.assert_ledgers_balance()
