"""Two routers of one cluster: requests of one name at both, and one of them paused or killed under
streams of the SDK and of HTTP."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    events_until,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.system.many_streams import Frames, Streams, sampling_of, undisturbed

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry, check, is_over
from ferryman.ids import make_request_id
from ferryman.schedule.request import SamplingParams
from ferryman.wire.nats.subjects import Subjects

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_STREAMS = 8
PROMPTS = [[(7 * i + 3 * n) % 120 + 3 for i in range(20 + n % 9)] for n in range(NUM_STREAMS)]
NUM_NAMES = 12  # were workers chosen at random, two would meet at one in all but 1 of 4,096 runs
NUM_SHARED = 100  # tokens: two requests of one name are under way at the same time
ENDS = {"finished", "failed", "cancelled"}
LONG = SamplingParams(max_tokens=400, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")
    shape = ClusterShape(num_decode=2, max_running=16, memory_bytes=96 << 20)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        cluster.start("router").await_ready()
        cluster.await_routers(2)
        yield cluster


async def test_requests_of_one_name_at_both_routers_at_once_are_two_answers(
    cluster: Cluster,
) -> None:
    """A worker that has the name's request from one router refuses the other's, which is then
    served under an id of its own."""
    doors = [f"http://{one.ready['http']}" for one in cluster.of_role("router")]
    sampling = SamplingParams(max_tokens=NUM_SHARED, temperature=0.0, ignore_eos=True)
    prompts = [[(11 * i + 5 * n) % 120 + 3 for i in range(30)] for n in range(2 * NUM_NAMES)]
    with one_process(cluster.model, memory_bytes=1 << 27) as llm:
        alone = llm.generate(prompts, sampling)
    wanted = [[f"w{token_id}" for token_id in one.token_ids] for one in alone]
    async with httpx.AsyncClient(timeout=240) as http:
        asked = [
            completed(http, doors[n % 2], f"same-{n // 2}", prompt, NUM_SHARED)
            for n, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
    assert [words for words, _ in answers] == wanted
    ids = [request_id for _, request_id in answers]
    own = [request_id for n, request_id in enumerate(ids) if request_id != f"same-{n // 2}"]
    assert own, "at one worker at least two requests of one name met"
    assert len(set(own)) == len(own)
    for request_id in own:
        assert not check(await life_until(cluster, request_id))
    cluster.assert_ledgers_balance()


async def completed(
    http: httpx.AsyncClient, door: str, name: str, prompt: Sequence[int], max_tokens: int
) -> tuple[list[str], str]:
    """The words of an answer, and the id of its request."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await http.post(f"{door}/v1/completions", json=body, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["text"].split(), said["usage"]["ferryman"]["request_id"]


async def life_until(
    cluster: Cluster,
    request_id: str,
    is_enough: Callable[[Sequence[LifecycleEntry]], bool] = is_over,
) -> list[LifecycleEntry]:
    """The events of a request, as soon as they are enough."""
    async with cluster.bus() as bus:
        return await events_until(bus, Subjects().all_life_of(request_id), is_enough)


async def test_the_stream_of_a_paused_router_goes_on_and_its_late_words_change_nothing(
    cluster: Cluster,
) -> None:
    paused, other = cluster.of_role("router")
    with one_process(cluster.model, memory_bytes=1 << 27) as llm:
        (wanted,) = llm.generate([PROMPTS[0]], LONG)
    streams, name = Streams(wanted=1, far=3), make_request_id()
    addresses = f"{paused.ready['grpc']},{other.ready['grpc']}"
    paused_id = str(paused.ready["worker_id"])
    async with Client(addresses, chance=lambda: 0.0) as client, asyncio.timeout(300):
        reading = asyncio.create_task(streams.read(client, PROMPTS[0], LONG, name))
        await streams.many.wait()
        paused.process.send_signal(signal.SIGSTOP)
        try:
            await life_until(cluster, name, lambda said: "taken_over" in names(said))
        finally:
            paused.process.send_signal(signal.SIGCONT)
        assert tuple(await reading) == wanted.token_ids
    # It is heard once more, of a request that is not its own any longer.
    await life_until(cluster, name, lambda said: bool(ENDS & set(names(said, paused_id))))
    await assert_taken_over(cluster, name, paused_id)
    cluster.assert_ledgers_balance()


def names(events: Sequence[LifecycleEntry], worker_id: str = "") -> list[str]:
    """Of the events of one process, or of all."""
    return [event.name for event in events if worker_id in ("", event.worker_id)]


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
    cluster.await_routers(2)


async def assert_taken_over(cluster: Cluster, request_id: str, router_id: str) -> None:
    """Its log is legal, and tells of an attempt at the other router behind what was received."""
    events = await life_until(cluster, request_id)
    assert not check(events)
    (taken,) = (event for event in events if event.name == "taken_over")
    assert taken.facts["from"] == router_id != taken.worker_id
    offset = taken.facts["offset"]
    assert isinstance(offset, int)
    assert offset >= 3, "nothing of what was received is drawn again"
    assert {event.attempt for event in events if event.role == "decode"} == {1, 2}


async def test_http_answers_of_a_killed_router_end_in_errors_of_the_connection(
    cluster: Cluster,
) -> None:
    """The body of a stream is chunked, and ends without its last chunk: no client can take it for
    whole. Of an answer that is not streamed nothing has come."""
    victim = cluster.of_role("router")[0]
    door = f"http://{victim.ready['http']}"
    frames = Frames(door)
    async with httpx.AsyncClient(timeout=240) as http:
        whole = asyncio.create_task(completed(http, door, "whole", PROMPTS[1], 600))
        await life_until(cluster, "whole", lambda said: "routed" in names(said))
        reading = asyncio.create_task(frames.read(PROMPTS[0], 600))
        await frames.has_begun.wait()
        victim.kill()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            async with asyncio.timeout(120):
                await reading
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            async with asyncio.timeout(120):
                await whole
    assert 0 < len(frames.words) < 600
    again = Frames(cluster.http)
    await again.read(PROMPTS[0], 4)
    assert len(again.words) == 4, "the other one serves"
