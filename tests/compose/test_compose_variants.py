"""The image of `test_compose_up` once more: by TLS, with two routers behind one name."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.compose.composed_cluster import STAYING, ComposedCluster, composed_cluster
from tests.compose.conftest import WHEELS
from tests.compose.container_engine import ContainerEngine
from tests.compose.test_compose_up import ANSWER, FAILSAFE_SECONDS, STORY
from tests.harness.cluster import one_process

from ferryman.client import Client, DoorTls
from ferryman.errors import NotFound
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import LifecycleEvent
from ferryman_launcher.options import demo_model

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

AUTHORITY = "/etc/ferryman/observer/ca.crt"
NUM_TOKENS = 2000
# Runs in a container of its own, which has no secret and knows the routers by their name alone.
CALLER = """
import asyncio, json, sys
from ferryman.client import Client, DoorTls, SamplingParams
from ferryman.wire.public import TokenChunk

async def main(story, num_tokens, authorities):
    sampling = SamplingParams(max_tokens=int(num_tokens), temperature=0.0, ignore_eos=True)
    token_ids = []
    async with Client("routers:8001", tls=DoorTls(authorities.encode())) as client:
        async for event in client.generate(story, sampling, request_id="resumed"):
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids), "each token once and in order"
                token_ids += event.token_ids
    print(json.dumps({"token_ids": [int(each) for each in token_ids]}))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def by_tls(engine: ContainerEngine, tree: Path) -> Iterator[ComposedCluster]:
    files = {"COMPOSE_FILE": "compose.yaml:compose.tls.yaml", "COMPOSE_PROFILES": "dns"}
    offline = {"PIP_NO_INDEX": "1"} if (tree / WHEELS).is_dir() else {}
    with composed_cluster(engine, tree, DTYPE="float64", **files, **offline) as cluster:
        cluster.up()
        yield cluster


def ask(cluster: ComposedCluster, trusted: ssl.SSLContext) -> httpx.Response:
    turns = [{"role": "user", "content": STORY}]
    asked = {"model": "ferryman-demo", "temperature": 0, "messages": turns}
    url = cluster.http.replace("http://127.0.0.1", "https://localhost")
    return httpx.post(
        f"{url}/v1/chat/completions", json=asked, timeout=FAILSAFE_SECONDS, verify=trusted
    )


def test_all_are_healthy_and_the_door_answers_those_who_know_its_authority(
    by_tls: ComposedCluster,
) -> None:
    healthy = {each["Service"] for each in by_tls.containers() if each["Health"] == "healthy"}
    assert healthy == {*STAYING, "routers"}
    assert len(by_tls.names_of("routers")) == 2
    known = ssl.create_default_context(cadata=by_tls.read("router", AUTHORITY))
    content = ask(by_tls, known).json()["choices"][0]["message"]["content"]
    assert content == ANSWER
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(by_tls, ssl.create_default_context())
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{by_tls.http}/v1/models", timeout=FAILSAFE_SECONDS)


def test_the_index_is_read_by_tls_alone(by_tls: ComposedCluster) -> None:
    url = by_tls.read("router", "/etc/ferryman/observer/redis.url")
    assert url.startswith("rediss://")
    inside = ("exec", "-T", "redis", "redis-cli")
    authority = ("--cacert", "/etc/ferryman/redis/ca.crt")
    assert by_tls.compose(*inside, *authority, "-u", url, "--scan").startswith("fm:")
    plain = by_tls.compose("exec", "-T", "redis", "sh", "-c", "redis-cli ping 2>&1 || true")
    assert "PONG" not in plain
    assert "NOAUTH" not in plain


async def test_a_stream_by_the_shared_name_goes_on_when_its_router_is_killed(
    by_tls: ComposedCluster,
) -> None:
    authority = by_tls.read("router", AUTHORITY)
    routers = {by_tls.ready_line(name)["worker_id"]: name for name in by_tls.names_of("routers")}
    with one_process(demo_model(), memory_bytes=1 << 28) as llm:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        (wanted,) = llm.generate([STORY], sampling)
    words = (STORY, str(NUM_TOKENS), authority)
    calling = asyncio.create_task(asyncio.to_thread(by_tls.stranger, CALLER, *words))
    door = by_tls.grpc.replace("127.0.0.1", "localhost")
    async with asyncio.timeout(FAILSAFE_SECONDS):
        async with Client(door, tls=DoorTls(authority.encode())) as observer:
            victim = routers[await router_under_way(observer)]
            await asyncio.to_thread(by_tls.engine.output, "kill", victim)
            got = await calling
            events = await observer.trace("resumed")
    assert tuple(got["token_ids"]) == wanted.token_ids
    assert len({each.worker_id for each in events if each.role == "router"}) == 2


async def router_under_way(observer: Client) -> str:
    """The router of the request, once its first token is out and its last is not."""
    while True:
        events: dict[str, LifecycleEvent] = {}
        with suppress(NotFound):  # until the first event is in the log
            events = {each.event: each for each in await observer.trace("resumed")}
        assert "finished" not in events, "it was under way when its router went"
        if "first_token" in events:
            return str(json.loads(events["received"].json)["worker_id"])
        await asyncio.sleep(0.05)
