"""Decode workers drain under streams: each request goes on at another one, with its state. A whole
cluster, routers too, is restarted under streams.

No client notices, nothing is computed again, and the log of each request says where it went.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import httpx
import pytest
from tests.harness.cluster import Cluster, ClusterShape, Service, running_cluster, save_served_model
from tests.system.many_streams import Streams, sampling_of, undisturbed

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.ids import make_request_id
from ferryman.security.credentials import ClusterRole
from ferryman_cli import drain
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
    logs = {request_id: await cluster.log_of(request_id) for request_id in ids}
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


def doors_of(router: Service) -> dict[str, int]:
    """The settings that open the doors of one router again."""
    ports = {door: str(router.ready[door]).rpartition(":")[2] for door in ("http", "grpc")}
    return {f"{door}_port": int(port) for door, port in ports.items()}


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
                ports = doors_of(one) if one.role == "router" else {}
                await asyncio.to_thread(cluster.start(one.role, settings=ports).await_ready)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await is_over.wait()
    return statuses


@dataclass
class HttpCaller:
    """Asks one router for the same answer again and again. `ends` counts how its calls ended: with
    `whole` answers, with an error's code, or `away` where nobody took the call."""

    door: str
    prompt: Sequence[int]
    words: Sequence[str]
    ends: Counter[str] = field(default_factory=Counter)

    async def ask_until(self, is_over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self.door, timeout=240) as http:
            while not is_over.is_set():
                end = await self._ask(http)
                self.ends[end] += 1
                if end != "whole":
                    with suppress(TimeoutError):  # it need not spin while the router is away
                        async with asyncio.timeout(0.05):
                            await is_over.wait()

    async def _ask(self, http: httpx.AsyncClient) -> str:
        body = {
            "prompt": list(self.prompt),
            "max_tokens": len(self.words),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(
                    http.stream("POST", "/v1/completions", json=body)
                )
            except httpx.TransportError:
                return "away"
            # An answer that has begun never breaks off without a word.
            if response.status_code != 200:
                return str(json.loads(await response.aread())["error"]["code"])
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        frames = [json.loads(line.removeprefix("data: ")) for line in lines]
        if "error" in frames[-1]:
            return str(frames[-1]["error"]["code"])
        text = "".join(frame["choices"][0]["text"] for frame in frames if frame.get("choices"))
        assert text.split() == self.words
        return "whole"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["apart"], indirect=True)
async def test_all_are_restarted_one_by_one_under_streams_and_no_client_notices(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are asked again and again until all are back, so sixteen are under way all the time,
    and one by HTTP at each of two routers: that one ends whole, or is refused."""
    # Streams keep all cores busy until the roll ends, which asks four times a second who is there.
    monkeypatch.setattr(drain, "HEARTBEAT_SECONDS", 0.25)
    prompts = [[(3 * i + 7 * n) % 120 + 3 for i in range(20 + n)] for n in range(NUM_STREAMS)]
    wanted = undisturbed(cluster, prompts)
    cluster.start("router").await_ready()
    cluster.await_routers(2)
    running = [one for one in cluster.services if one.process.poll() is None]
    before = {str(one.ready["worker_id"]) for one in running}
    routers = cluster.of_role("router")
    words = [f"w{token_id}" for token_id in wanted[0]]
    by_http = [HttpCaller(f"http://{one.ready['http']}", prompts[0], words) for one in routers]
    addresses = ",".join(str(one.ready["grpc"]) for one in routers)
    router = cluster.credentials[ClusterRole.ROUTER]
    line = ["roll", "--nats", cluster.nats, "--credentials", str(router), "--json"]
    answers: list[tuple[int, list[int]]] = []
    is_over = asyncio.Event()

    async def ask_again(client: Client, n: int) -> None:
        while not is_over.is_set():
            name = make_request_id()
            answers.append((n, await Streams().read(client, prompts[n], sampling_of(n), name)))

    async with Client(addresses) as client, asyncio.timeout(400):
        asking = [asyncio.create_task(ask_again(client, n)) for n in range(NUM_STREAMS)]
        asking += [asyncio.create_task(caller.ask_until(is_over)) for caller in by_http]
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
    assert [one.split("-")[0] for one in gone][-2:] == ["router", "router"]
    for caller in by_http:
        assert caller.ends.keys() <= {"whole", "stopping", "away"}
        assert caller.ends["whole"] > 0 < caller.ends["stopping"] + caller.ends["away"]
    assert not before & {one["by"] for one in back}
    cluster.assert_ledgers_balance()
