"""Processes that are stopped and killed: arenas, locks, quarantine, exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster_keys import key_file_in
from tests.hostcache.attached import load, prompt_of, worker_at
from tests.hostcache.conftest import StartHostCache
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind
from ferryman.wire.hostcache.arena import PREFIX, sweep_stale_arenas
from ferryman.wire.hostcache.client import MISS

MANIFEST = manifest_of(Kind.FULL, Kind.RECURRENT)
PROMPT = prompt_of(MANIFEST, chain(1, 2), snapshots=[1])
WRITER = Path(__file__).with_name("doomed_writer.py")
ROOT = Path(__file__).parents[2]


def environment(folder: Path, nats_url: str, redis_url: str, **more: str) -> dict[str, str]:
    named = {
        "ARENA_FOLDER": str(folder),
        "CLUSTER_KEY_FILE": str(key_file_in(folder.parent)),
        "NATS_URL": nats_url,
        "REDIS_URL": redis_url,
        "HOST_MEMORY": str(1 << 20),
        **more,
    }
    return os.environ | {f"FERRYMAN_{name}": value for name, value in named.items()}


@contextmanager
def host_cache_process(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "ferryman_hostcache"]
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready_line(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    said: dict[str, str] = json.loads(process.stdout.readline())
    return said


def test_sigterm_ends_it_with_nothing_left_behind(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    with host_cache_process(environment(tmp_path, nats_url, redis_url)) as process:
        said = ready_line(process)
        assert (said["event"], said["role"]) == ("ready", "hostcache")
        assert [path.name for path in tmp_path.iterdir()] == [Path(said["arena"]).name]
        with urllib.request.urlopen(f"http://{said['observe']}/debug/ledger") as answer:
            assert json.load(answer)["balances"]
        with urllib.request.urlopen(f"http://{said['observe']}/metrics") as answer:
            assert b"ferryman_hostcache_store_arena_bytes 1.048576e+06" in answer.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list(tmp_path.iterdir()) == []


async def test_after_a_kill_its_arena_is_swept_and_workers_miss(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    with host_cache_process(environment(tmp_path, nats_url, redis_url)) as process:
        said = await asyncio.to_thread(ready_line, process)
        async with worker_at(said["address"], MANIFEST) as worker:
            assert await worker.client.store(PROMPT.keys, PROMPT.sources) == 3
            assert sweep_stale_arenas(PREFIX, tmp_path) == (), "the owner lives"
            process.kill()
            await asyncio.to_thread(process.wait)
            assert sweep_stale_arenas(PREFIX + "other", tmp_path) == ()
            assert sweep_stale_arenas(PREFIX + "local-local", tmp_path) == (Path(said["arena"]),)
            assert await load(worker, PROMPT) == MISS
            assert await worker.client.store(PROMPT.keys, PROMPT.sources) is None


def test_a_restart_after_a_kill_takes_the_old_arena_away(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    arenas = []
    for _ in range(2):
        with host_cache_process(environment(tmp_path, nats_url, redis_url)) as process:
            arenas.append(Path(ready_line(process)["arena"]))
            process.kill()
            process.wait()
    assert list(tmp_path.iterdir()) == arenas[1:]


async def test_a_stopped_host_cache_is_a_miss_and_then_serves_again(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    with host_cache_process(environment(tmp_path, nats_url, redis_url)) as process:
        said = await asyncio.to_thread(ready_line, process)
        async with worker_at(said["address"], MANIFEST) as worker:
            client = worker.client
            assert await client.store(PROMPT.keys, PROMPT.sources) == 3
            process.send_signal(signal.SIGSTOP)
            with pytest.MonkeyPatch.context() as impatient:
                options = replace(client.attachment._options, call_seconds=0.3)
                impatient.setattr(client.attachment, "_options", options)
                assert await load(worker, PROMPT) == MISS
            assert client.statistics().num_failures == 1
            assert await load(worker, PROMPT) == MISS, "at once: nobody is asked"
            assert client.statistics().num_failures == 1
            process.send_signal(signal.SIGCONT)
            await client.attachment.attached()
            assert (await load(worker, PROMPT)).usable_pages == 2


def test_too_little_shared_memory_is_one_clear_line(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    huge = str(1 << 60)
    env = environment(tmp_path, nats_url, redis_url, HOST_MEMORY=huge)
    with host_cache_process(env) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) == 2
    assert "error: memory_bytes=" in said
    assert "lower FERRYMAN_HOST_MEMORY" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


async def test_the_room_of_a_killed_writer_comes_back(start_host_cache: StartHostCache) -> None:
    async with (
        start_host_cache(lease_seconds=0.2) as service,
        worker_at(service.address, MANIFEST),
    ):
        argv = [sys.executable, str(WRITER), service.address, "prefill-0000dead"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        writer = await asyncio.create_subprocess_exec(
            *argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"writing\n"
        store = service.host.store
        reservation = next(iter(store._writers))
        service.host.store.expire(reservation.end)
        assert store.statistics().num_quarantined == 3, "its time is over, but it lives"
        service.host.tick()
        assert store.statistics().num_quarantined == 3
        writer.kill()
        await writer.wait()
        service.host.tick()
        counts = store.statistics()
        assert (counts.num_reservations, counts.num_quarantined) == (0, 0)
        assert all(each.total == each.free for each in counts.kinds.values())
