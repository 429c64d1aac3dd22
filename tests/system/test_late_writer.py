"""A prefill worker that stands still between Commit and its answer comes back to a request that
decodes: it is not cut, and the lifecycle says so.

Row 50 of the catalogue, with real processes. A proxy before decode's port holds the answer to
Commit back, so the stop falls where it should every time; how long the worker stands still is
measured in tokens, for it has to come back while decode is at work.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.harness.cluster import (
    Cluster,
    ClusterShape,
    Service,
    events_until,
    on_plane,
    one_process,
    running_cluster,
    save_served_model,
)
from tests.processes import process_state
from tests.waiting import wait_until
from tests.wire.proxy import Connection, HoldingProxy, holding_proxy

from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.runtime.embedded import free_port
from ferryman.schedule.request import FinishReason, SamplingParams
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.public import GenerateFinished, TokenChunk

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_TOKENS = 600
LONG = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
COMMIT = b"DecodeService/Commit"
# Decode listens at one loopback address and is reached at another, where the proxy is.
LISTENS, REACHED = "127.0.0.1", "127.0.0.2"


PROMPTS = {
    name: [(7 * i + 40 * nth) % 120 + 3 for i in range(60)]
    for nth, name in enumerate(["lost", "late", "sdk"])
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("model"), "granite_nope")


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, list[int]]:
    """The answers of one process without a cache."""
    with one_process(model) as llm:
        said = llm.generate(list(PROMPTS.values()), LONG)
    return {name: list(one.token_ids) for name, one in zip(PROMPTS, said, strict=True)}


@pytest.fixture(scope="module")
def cluster(
    model: Path, wanted: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    decode = {"host": LISTENS, "port": free_port(), "advertise": REACHED}
    planes = on_plane("grpc")
    settings = {
        **planes,
        "decode": {**planes["decode"], **decode},
        "router": {"stream_patience_seconds": 60.0},  # the proxy begins after the cluster
    }
    shape = ClusterShape(max_running=16, memory_bytes=48 << 20, settings=settings)
    with running_cluster(model, tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(cluster: Cluster) -> AsyncIterator[HoldingProxy]:
    port = cluster.shape.settings["decode"]["port"]
    target, listen = f"{LISTENS}:{port}", f"{REACHED}:{port}"
    async with holding_proxy(target, listen=listen) as proxy:
        yield proxy


async def stopped(prefill: Service, proxy: HoldingProxy) -> Connection:
    """The worker stands still, decode has committed, and its answer is on the way."""
    async with asyncio.timeout(120):
        connection = await proxy.held.get()
    os.kill(prefill.process.pid, signal.SIGSTOP)
    stands = partial(wait_until, lambda: state_of(prefill) == "T", "prefill to stand still")
    await asyncio.to_thread(stands)
    return connection


def state_of(service: Service) -> str:
    """As the kernel calls it: T is stopped."""
    return process_state(service.process.pid)


def go_on(prefill: Service, connection: Connection, fate: str) -> None:
    """The answer is lost with its connection, or arrives after all."""
    if fate == "lost":
        connection.drop()
    else:
        connection.answers_flow.set()
    os.kill(prefill.process.pid, signal.SIGCONT)


async def lifecycle_of(cluster: Cluster, request_id: str) -> list[LifecycleEntry]:
    """The log once prefill has said what it calls the end, and the router and decode theirs."""
    ends = ({"handed_off", "failed", "cancelled"}, {"finished", "aborted"})
    roles = ("prefill", "decode")

    def is_enough(logged: list[LifecycleEntry]) -> bool:
        said = [{event.name for event in logged if event.role == role} for role in roles]
        return all(names & end for names, end in zip(said, ends, strict=True))

    async with cluster.bus() as bus:
        return await events_until(bus, Subjects().all_life_of(request_id), is_enough)


def names_of(events: list[LifecycleEntry], role: str) -> list[str]:
    said = sorted((event for event in events if event.role == role), key=lambda event: event.seq)
    return [event.name for event in said]


@pytest.mark.parametrize("fate", ["lost", "late"])
async def test_an_answer_over_http_is_whole_when_prefill_comes_back_from_its_commit(
    cluster: Cluster, proxy: HoldingProxy, wanted: dict[str, list[int]], fate: str
) -> None:
    (prefill,) = cluster.of_role("prefill")
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPTS[fate],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    name = f"late-http-{fate}"
    async with httpx.AsyncClient(base_url=cluster.http, timeout=120) as http:
        headers = {"x-request-id": name}
        asking = http.stream("POST", "/v1/completions", json=body, headers=headers)
        proxy.hold_next(COMMIT)
        stopping = asyncio.create_task(stopped(prefill, proxy))
        frames: list[Any] = []
        async with asking as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line:
                    continue
                said = line.removeprefix("data: ")
                frames.append(said if said == "[DONE]" else json.loads(said))
                if len(frames) == NUM_TOKENS // 4:
                    go_on(prefill, await stopping, fate)
        assert stopping.done(), "the stop fell between Commit and its answer"
    *said_frames, done = frames
    assert done == "[DONE]"
    text = "".join(frame["choices"][0]["text"] for frame in said_frames if frame["choices"])
    reasons = [frame["choices"][0]["finish_reason"] for frame in said_frames if frame["choices"]]
    assert text.split() == [f"w{token_id}" for token_id in wanted[fate]]
    assert [reason for reason in reasons if reason] == ["length"]
    logged = await lifecycle_of(cluster, name)
    assert check(logged) == []
    assert names_of(logged, "prefill")[-1] == "handed_off"
    assert names_of(logged, "router").count("routed") == 1, "no attempt was made for nothing"
    assert names_of(logged, "decode")[-1] == "finished"
    await asyncio.to_thread(cluster.assert_ledgers_balance)


async def test_an_answer_through_the_sdk_is_whole_when_prefill_comes_back_from_its_commit(
    cluster: Cluster, proxy: HoldingProxy, wanted: dict[str, list[int]]
) -> None:
    (prefill,) = cluster.of_role("prefill")
    token_ids: list[int] = []
    reason: FinishReason | None = None
    async with Client(cluster.grpc) as client:
        proxy.hold_next(COMMIT)
        stopping = asyncio.create_task(stopped(prefill, proxy))
        is_back = False
        async for event in client.generate(PROMPTS["sdk"], LONG, request_id="late-sdk"):
            if isinstance(event, TokenChunk):
                token_ids += event.token_ids
                if len(token_ids) >= NUM_TOKENS // 4 and not is_back:
                    go_on(prefill, await stopping, "lost")
                    is_back = True
            elif isinstance(event, GenerateFinished):
                reason = event.reason
        assert is_back
    assert token_ids == wanted["sdk"]
    assert reason is FinishReason.LENGTH
    logged = await lifecycle_of(cluster, "late-sdk")
    assert check(logged) == []
    assert names_of(logged, "prefill")[-1] == "handed_off"
    await asyncio.to_thread(cluster.assert_ledgers_balance)
