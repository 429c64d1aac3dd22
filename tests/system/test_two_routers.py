"""Two routers of one cluster, and one of them is killed under streams of the SDK and of HTTP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import httpx
import pytest
from tests.system.cluster import (
    Cluster,
    ClusterShape,
    running_cluster,
    save_served_model,
    wait_until,
)
from tests.system.many_streams import Frames, Streams, sampling_of, undisturbed

from ferryman.client import Client
from ferryman.handoff.lifecycle import check, is_over
from ferryman.ids import make_request_id
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.subjects import Subjects

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STREAMS = 8
PROMPTS = [[(7 * i + 3 * n) % 120 + 3 for i in range(20 + n % 9)] for n in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    shape = ClusterShape(num_decode=2, max_running=16, memory_bytes=96 << 20)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        cluster.start("router").await_ready()
        await_both(cluster)
        yield cluster


def await_both(cluster: Cluster) -> None:
    urls = [f"http://{one.ready['http']}/ready" for one in cluster.of_role("router")]
    assert len(urls) == 2
    wait_until(lambda: all(httpx.get(url).status_code == 200 for url in urls), "two routers")


async def test_the_streams_of_a_killed_router_go_on_at_the_other_token_for_token(
    cluster: Cluster,
) -> None:
    wanted = undisturbed(cluster, PROMPTS)
    victim, other = cluster.of_role("router")
    addresses = f"{victim.ready['grpc']},{other.ready['grpc']}"
    streams, name = Streams(wanted=NUM_STREAMS, far=3), make_request_id()
    names = [f"{name}-{n}" for n in range(NUM_STREAMS)]
    async with Client(addresses, chance=lambda: 0.0) as client, asyncio.timeout(300):
        reading = [
            asyncio.create_task(streams.read(client, prompt, sampling_of(n), names[n]))
            for n, prompt in enumerate(PROMPTS)
        ]
        await streams.many.wait()
        under_way = [n for n, one in zip(names, reading, strict=True) if not one.done()]
        victim.kill()
        answers = await asyncio.gather(*reading)
    assert victim.process.returncode == -signal.SIGKILL
    assert under_way, "it had streams when it was killed"
    assert answers == wanted
    for request_id in under_way:
        await assert_taken_over(cluster, request_id, str(victim.ready["worker_id"]))
    cluster.assert_ledgers_balance()
    cluster.start("router").await_ready()
    await_both(cluster)


async def assert_taken_over(cluster: Cluster, request_id: str, router_id: str) -> None:
    """Its log is legal, and tells of an attempt at the other router behind what was received."""
    pattern = Subjects().all_life_of(request_id)
    async with cluster.bus() as bus, asyncio.timeout(120):
        events = [decode_event(one.payload) for one in await bus.history(pattern, max_events=999)]
        # Another process says it; what was said is only asked for.
        while not is_over(events):
            await asyncio.sleep(0.05)
            found = await bus.history(pattern, max_events=999)
            events = [decode_event(one.payload) for one in found]
    assert not check(events)
    (taken,) = (event for event in events if event.name == "taken_over")
    assert taken.facts["from"] == router_id != taken.worker_id
    offset = taken.facts["offset"]
    assert isinstance(offset, int)
    assert offset >= 3, "nothing of what was received is drawn again"
    assert {event.attempt for event in events if event.role == "decode"} == {1, 2}


async def test_an_http_stream_of_a_killed_router_ends_in_an_error_of_the_connection(
    cluster: Cluster,
) -> None:
    """The body is chunked, and ends without its last chunk: no client can take it for whole."""
    victim = cluster.of_role("router")[0]
    frames = Frames(f"http://{victim.ready['http']}")
    reading = asyncio.create_task(frames.read(PROMPTS[0], 600))
    await frames.has_begun.wait()
    victim.kill()
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        async with asyncio.timeout(120):
            await reading
    assert 0 < len(frames.words) < 600
    again = Frames(cluster.http)
    await again.read(PROMPTS[0], 4)
    assert len(again.words) == 4, "the other one serves"
