"""The router as a process, the index behind it, and the broker going away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest
from tests.cluster_keys import KEY, key_file_in
from tests.harness.router import SENTENCE, STATE, cluster
from tests.servers import redis_server, running_nats, running_redis

from ferryman.cache.keys import page_keys, root_key
from ferryman.cache.manifest import Kind
from ferryman.cache.units import Tier
from ferryman.ids import make_epoch
from ferryman.wire.redis.index import IndexedUnit, NodeLife
from ferryman.wire.redis.redis_index import RedisIndex, redis_index
from ferryman_router.routing.worker_starts import FIRST_START_SECONDS

KEY_FILE = "FERRYMAN_CLUSTER_KEY_FILE"


def _settings(nats_url: str, folder: Path) -> dict[str, str]:
    """A router of a cluster of its own, at free ports."""
    return {
        "FERRYMAN_MODEL": str(folder),
        KEY_FILE: str(key_file_in(folder)),
        "FERRYMAN_HTTP_PORT": "0",
        "FERRYMAN_GRPC_PORT": "0",
        "FERRYMAN_NATS_URL": nats_url,
        "FERRYMAN_CLUSTER": f"p{make_epoch() % 10**9}",
    }


async def _started(environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ferryman_router",
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_process_says_when_it_is_ready_and_drains_on_sigterm(
    nats_url: str, folder: Path
) -> None:
    process = await _started(_settings(nats_url, folder))
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert (ready["event"], ready["role"]) == ("ready", "router")
    async with httpx.AsyncClient(base_url=f"http://{ready['http']}") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


async def test_a_folder_that_cannot_be_served_ends_it_with_one_line(tmp_path: Path) -> None:
    key_file = str(key_file_in(tmp_path))
    environment = {"FERRYMAN_MODEL": str(tmp_path), KEY_FILE: key_file}
    process = await _started(environment)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().strip().splitlines()[-1].endswith("config.json is missing")


async def test_a_malformed_cluster_key_ends_it_with_one_line(tmp_path: Path) -> None:
    key_file = key_file_in(tmp_path)
    key_file.write_text("f00d" * 15)
    process = await _started({"FERRYMAN_MODEL": str(tmp_path), KEY_FILE: str(key_file)})
    _, errors = await process.communicate()
    assert process.returncode == 2
    (line,) = errors.decode().strip().splitlines()
    assert line == f"error: cluster key {key_file}: a cluster key is 64 hexadecimal digits"


async def test_what_a_node_holds_on_its_host_is_counted(nats_url: str, folder: Path) -> None:
    with redis_server() as redis_url:
        async with (
            redis_index(redis_url, KEY, lookup_seconds=10) as index,
            cluster(nats_url, folder, redis_url=redis_url) as made,
        ):
            tokenizer = made.router.components.frontend.ctx.model.tokenizer
            keys = page_keys(root_key(STATE), tokenizer.encode(SENTENCE * 3), STATE.page_size)
            node = NodeLife("node-1", 5)
            await index.announce(node, 60)
            units = [IndexedUnit(Kind.FULL, key, 10, b"d" * 16) for key in keys[:2]]
            units.append(IndexedUnit(Kind.RECURRENT, keys[1], 10, b"d" * 16))
            await index.commit(node, keys[0], Tier.HOST, units)
            made.prefills[0].node = "node-1"
            await made.until_node("node-1")
            headers = {"x-request-id": "host-1"}
            body = {"prompt": SENTENCE * 3, "max_tokens": 2}
            response = await made.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            (attempt,) = made.request("host-1").attempts
            assert attempt.explanation.chosen.cached.host == 2 * STATE.page_size


@pytest.mark.slow
async def test_a_request_outlives_a_standstill_of_the_router_that_waits_for_workers(
    nats_url: str, folder: Path
) -> None:
    patience = 1.0 + FIRST_START_SECONDS
    process = await _started(_settings(nats_url, folder) | {"FERRYMAN_NO_WORKER_SECONDS": "1"})
    try:
        assert process.stdout is not None
        http = f"http://{json.loads(await process.stdout.readline())['http']}"
        async with httpx.AsyncClient(base_url=http, timeout=600) as client:
            body = {"model": "any", "prompt": SENTENCE, "max_tokens": 1}
            (model,) = (await client.get("/v1/models")).json()["data"]
            begun = asyncio.get_running_loop().time()
            asked = asyncio.create_task(
                client.post("/v1/completions", json=body | {"model": model["id"]})
            )
            async with asyncio.timeout(60):
                while "in_flight_requests 1.0" not in (await client.get("/metrics")).text:
                    pass
            process.send_signal(signal.SIGSTOP)
            stopped = asyncio.get_running_loop().time()
            await asyncio.sleep(patience + 1)  # the time itself is the fault
            process.send_signal(signal.SIGCONT)
            woken = asyncio.get_running_loop().time()
            refused = await asked
            assert refused.json()["error"]["code"] == "no_worker"
            ended = asyncio.get_running_loop().time()
            looked = (ended - woken) + (stopped - begun)
            assert looked > patience - 2, "it has waited while it could hear of workers"
    finally:
        process.kill()
        await process.wait()


async def test_a_redis_that_hangs_fails_no_request_and_is_asked_again_when_it_is_back(
    nats_url: str, folder: Path
) -> None:
    with running_redis() as redis:
        async with cluster(nats_url, folder, redis_url=redis.url, lookup_seconds=0.2) as made:
            made.prefills[0].node = "node-1"
            await made.until_node("node-1")
            index = made.router.components.frontend.ctx.index
            assert isinstance(index, RedisIndex)
            assert (await made.complete(SENTENCE * 3, max_tokens=2)).status_code == 200
            redis.process.send_signal(signal.SIGSTOP)
            try:
                for _ in range(3):
                    assert (await made.complete(SENTENCE * 3, max_tokens=2)).status_code == 200
                away = index.statistics()
                assert away.num_misses_away >= 3, "it hung, and the requests were served"
            finally:
                redis.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(120):
                while index.statistics().num_misses == away.num_misses:
                    await index.here()
                    assert (await made.complete(SENTENCE * 3, max_tokens=2)).status_code == 200
            metrics, told = (await made.http.get("/metrics")).text, index.statistics()
            assert f"ferryman_router_index_misses_away {float(told.num_misses_away)}" in metrics


async def test_with_the_broker_away_requests_go_on_and_ready_says_degraded(folder: Path) -> None:
    with running_nats() as broker:
        async with cluster(broker.url, folder) as made:
            broker.stop()
            await made.until_broker_away()
            ready = await made.http.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
            response = await made.complete(max_tokens=4)
            assert response.json()["choices"][0]["text"] == made.expected(4)
