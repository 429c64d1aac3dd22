"""`docker compose up` of this tree: built, healthy, right, locked, disturbed, and gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import nats
import pytest
from tests.compose.composed_cluster import IMAGE, STAYING, ComposedCluster
from tests.deploy.compose_file import SETTINGS
from tests.harness.cluster import one_process

from ferryman.client import Client
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import TokenChunk
from ferryman_launcher.options import demo_model

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

KEY_PATH = "/etc/ferryman/key/cluster.key"
STORY = "The red kite is in Oslo. A fox sleeps in the night. Where is the red kite?"
ANSWER = "The red kite is in Oslo."
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SOME_TOKENS = 20
FAILSAFE_SECONDS = 300


def chat(cluster: ComposedCluster) -> str:
    turns = [{"role": "user", "content": STORY}]
    asked = {"model": "ferryman-demo", "temperature": 0, "messages": turns}
    answer = httpx.post(f"{cluster.http}/v1/chat/completions", json=asked, timeout=FAILSAFE_SECONDS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def stream_of_a_killed_worker(cluster: ComposedCluster, names: Sequence[str]) -> None:
    """Kills the one of these containers that decodes a stream; its tokens are those of one
    process all the same."""
    workers = {cluster.ready_line(name)["worker_id"]: name for name in names}
    assert len(workers) == len(names)
    with one_process(demo_model(), memory_bytes=1 << 28) as llm:
        (wanted,) = llm.generate([STORY], LONG)
    token_ids: list[int] = []
    victim = ""
    async with asyncio.timeout(FAILSAFE_SECONDS), Client(cluster.grpc) as client:
        async for event in client.generate(STORY, LONG, request_id="disturbed"):
            if not isinstance(event, TokenChunk):
                continue
            assert event.offset == len(token_ids), "each token once and in order"
            token_ids += event.token_ids
            if not victim and len(token_ids) >= SOME_TOKENS:
                (route,) = await client.explain("disturbed")
                victim = workers[route.chosen.decode_worker_id]
                await asyncio.to_thread(cluster.engine.output, "kill", victim)
        routes = await client.explain("disturbed")
    assert len(routes) == 2, "it was under way when its worker went"
    assert workers[routes[-1].chosen.decode_worker_id] != victim
    assert tuple(token_ids) == wanted.token_ids


def test_a_clean_clone_is_built_and_every_container_becomes_healthy(
    cluster: ComposedCluster,
) -> None:
    cluster.compose("build")
    seconds = cluster.up()
    health = {each["Service"]: each["Health"] for each in cluster.containers()}
    assert health == {"credentials": "", **dict.fromkeys(STAYING, "healthy")}
    (maker,) = (each for each in cluster.containers() if each["Service"] == "credentials")
    assert (maker["State"], maker["ExitCode"]) == ("exited", 0)
    size = int(cluster.engine.output("image", "inspect", "--format", "{{.Size}}", IMAGE))
    sys.stdout.write(f"\nhealthy after {seconds:.1f} s; the image has {size / 1e6:.0f} MB\n")
    assert size < 900e6


def test_an_answer_is_that_of_one_process(cluster: ComposedCluster) -> None:
    words = ["generate", "--chat", "--prompt", STORY, "--dtype", "float64", "--json"]
    alone = subprocess.run(
        [sys.executable, "-m", "ferryman_cli", *words], capture_output=True, text=True, check=True
    )
    assert chat(cluster) == json.loads(alone.stdout)["text"] == ANSWER


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_loops_of_a_worker_run_on_the_threads_of_torch(
    cluster: ComposedCluster, service: str
) -> None:
    maps = cluster.read(service, "/proc/1/maps").splitlines()
    mapped = {Path(line.split()[-1]).name.split(".")[0] for line in maps if line.endswith(".so")}
    assert "omppool" in mapped
    assert "workqueue" not in mapped
    openmp = {line.split()[-1] for line in maps if "libgomp" in line}
    assert [Path(path).parent.name for path in openmp] == ["lib"], "torch's, once"


def test_a_stranger_on_the_network_gets_nothing(cluster: ComposedCluster) -> None:
    addresses = [
        f"{service.replace('-', '')}={name}:9000"
        for service in ("prefill", "decode", "host-cache")
        for name in cluster.names_of(service)
    ]
    program = (Path(__file__).parent / "stranger.py").read_text()
    got = cluster.stranger(program, *addresses)
    calls = {door: said for door, said in got.items() if "/" in door}
    assert len(calls) >= 15, "all methods of three services"
    assert set(calls.values()) == {"refused: UNAUTHENTICATED"}
    assert "Authorization" in got["nats"]
    assert "AuthenticationError" in got["redis"]
    assert "ConnectionRefusedError" in got["monitor"]


async def test_an_observer_hears_events_with_the_url_that_the_router_has(
    cluster: ComposedCluster,
) -> None:
    url = cluster.read("router", "/etc/ferryman/observer/nats.url")
    client = await nats.connect(url, inbox_prefix="_INBOX.observer")
    try:
        heard = await client.subscribe("ferryman.v1.*.life.>")
        await client.flush()
        await asyncio.to_thread(chat, cluster)
        assert (await heard.next_msg(FAILSAFE_SECONDS)).data
    finally:
        await client.close()


def test_an_observer_reads_the_index(cluster: ComposedCluster) -> None:
    url = cluster.read("router", "/etc/ferryman/observer/redis.url")
    keys = cluster.compose("exec", "-T", "redis", "redis-cli", "-u", url, "--scan").splitlines()
    assert keys
    assert all(key.startswith("fm:") for key in keys)


def test_a_second_up_keeps_the_key_and_every_container(cluster: ComposedCluster) -> None:
    def state() -> tuple[str, set[str]]:
        key = hashlib.sha256(cluster.read("router", KEY_PATH).encode()).hexdigest()
        return key, {each["ID"] for each in cluster.containers()}

    before = state()
    cluster.up()
    assert state() == before


async def test_a_stream_whose_decode_container_is_killed_ends_as_if_nothing_had_been(
    cluster: ComposedCluster,
) -> None:
    """Two workers by --scale; the one that has the stream goes, and the other takes it up."""
    await asyncio.to_thread(cluster.up, "--scale", "decode=2")
    names = cluster.names_of("decode")
    assert len(names) == 2
    await stream_of_a_killed_worker(cluster, names)


def test_a_killed_worker_is_replaced_by_the_next_up(cluster: ComposedCluster) -> None:
    cluster.up("--scale", "decode=2")
    states = [each["Health"] for each in cluster.containers() if each["Service"] == "decode"]
    assert states == ["healthy", "healthy"]
    assert chat(cluster) == ANSWER


def test_the_key_is_shown_nowhere(cluster: ComposedCluster) -> None:
    key = cluster.read("router", KEY_PATH)
    assert len(key) == 64
    names = [each["Name"] for each in cluster.containers()]
    assert key not in cluster.engine.output("inspect", *names)
    assert key not in cluster.compose("logs")


def test_stop_drains_and_down_leaves_nothing(cluster: ComposedCluster) -> None:
    cluster.compose("stop")
    codes = {each["Service"]: each["ExitCode"] for each in cluster.containers()}
    assert {service: codes[service] for service in SETTINGS} == dict.fromkeys(SETTINGS, 0)
    cluster.compose("down", "--volumes")
    assert cluster.leftovers() == []
