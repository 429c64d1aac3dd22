"""`ferryman up` with the real servers, the real services and the demo model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.harness.cluster import API_KEY, SMALL, Up, name_of, up, up_command
from tests.waiting import wait_until

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman_cli.app import run
from ferryman_launcher.options import demo_model
from ferryman_launcher.state_folder import running_cluster

# Python runs this before all else, and the hook before each program: one whose log has such a name
# cannot start.
CANNOT_START = """
import os, sys
broken = os.environ["BROKEN"]
def on_event(event, details):
    if event != "exec" or not os.path.exists(broken):
        return
    log = os.path.basename(os.readlink("/proc/self/fd/2"))
    if log.startswith(open(broken).read()):
        os.write(2, b"it cannot start today\\n")
        os._exit(3)
sys.addaudithook(on_event)
"""
NAMES = {"nats", "redis", "hostcache", "prefill", "decode", "router-1", "router-2"}


def variables_of(pid: int) -> dict[str, str]:
    """A process's environment as its kernel shows it."""
    found = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(each.split("=", 1) for each in found if each)


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_a_cluster_of_two_routers_serves_survives_deaths_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with up(tmp_path, "--routers", "2") as cluster:
        doors = {"http", "page", "grpc", "nats", "redis"}
        assert set(cluster.said) == {"event", "pids", "memory", "tiers"} | doors
        assert [worker["role"] for worker in cluster.said["memory"]] == ["prefill", "decode"]
        assert set(cluster.said["pids"]) == NAMES
        answer = cluster.complete("first")
        assert answer["usage"]["completion_tokens"] > 0
        assert run(["trace", "first", "--check", "--state-dir", str(tmp_path)]) == 0
        assert run(["explain", "first", "--state-dir", str(tmp_path)]) == 0
        assert "legal" in capsys.readouterr().out

        before, arena = cluster.pids, cluster.arena
        assert arena.exists()
        killed = {"decode", "router-2"}
        for name in killed:
            cluster.kill(name)
        wait_until(
            lambda: all(cluster.pids[name] != before[name] for name in killed),
            "the return of both",
            seconds=90,
        )
        wait_until(lambda: _are_ready(cluster), "both routers to know decode", seconds=90)
        cluster.await_said(*(f"{name} is back" for name in killed))
        assert len(cluster.doors) == 2
        for router in (0, 1):  # the second one listens where it did
            again = cluster.complete(f"again-{router}", router=router)
            assert again["choices"][0]["text"] == answer["choices"][0]["text"]

        pids = cluster.pids
        services = {name: name_of(pids[name]) for name in NAMES - {"nats", "redis"}}
        assert services == {name: f"ferryman-{name}"[:15] for name in services}, "all are forked"
        assert {name for name in NAMES if pids[name] != before[name]} == killed
        assert running_cluster(tmp_path).grpc == cluster.said["grpc"]
        ended = cluster.end()
        assert ended.status == 0, ended.stderr
        assert ended.stdout == "", "one line on stdout, no more"
        err = ended.stderr
        said = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
        loaded = [event for event in said if event["event"] == "loading"]
        for name in ("prefill", "decode"):
            last = [event for event in loaded if event["process"] == name][-1]
            assert last["stage"] == "weights"
            assert last["done_bytes"] == last["total_bytes"] > 0
        for name in killed:
            assert f"{name} was ended by signal 9" in err
        assert cluster.is_gone(pids)
        assert not arena.exists()
        assert not (tmp_path / "cluster.json").exists()
        urls = (*cluster.doors, cluster.said["nats"], cluster.said["redis"])
        places = [*cluster.said["grpc"].split(","), *(urlsplit(url).netloc for url in urls)]
        assert len(places) == 6
        assert not any(is_listening(place) for place in places)


def test_an_up_with_drafts_says_the_same_and_nothing_outlives_its_kill(tmp_path: Path) -> None:
    prompt = "one two three one two three one two"  # nothing it was taught: it repeats itself
    with LLM(demo_model(), dtype="float32", page_size=16, memory_bytes=1 << 26) as llm:
        (expected,) = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0))
    file = tmp_path / "ferryman.toml"
    file.write_text('draft = "ngram"\n[decode]\ndraft_tokens = 3\n')
    with up(tmp_path, "--config", str(file), FERRYMAN_API_KEYS=API_KEY) as cluster:
        answer = cluster.complete("drafted", prompt, max_tokens=24)
        assert answer["choices"][0]["text"] == expected.text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        pids = cluster.pids
        knowing = {name for name, pid in pids.items() if API_KEY in str(variables_of(pid))}
        assert knowing <= {"router"}, "callers' keys are nobody else's"
        assert httpx.get(f"{cluster.said['http']}/v1/models").status_code == 401, "it knows them"
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: cluster.is_gone(pids), f"the end of {pids}", seconds=60)
        assert not cluster.arena.exists()


def test_a_worker_that_cannot_start_is_tried_on_while_another_serves(tmp_path: Path) -> None:
    state_dir, broken = tmp_path / "state", tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(CANNOT_START)
    broken.write_text("prefill-2")
    environment = {"PYTHONPATH": str(tmp_path), "BROKEN": str(broken)}
    log = state_dir / "logs" / "prefill-2.log"
    with up(state_dir, "--prefill", "2", **environment) as cluster:
        wait_until(lambda: log.read_text().count("cannot start") >= 3, "three starts", seconds=60)
        assert cluster.complete("one-of-two")["usage"]["completion_tokens"] > 0
        before = cluster.pids["prefill-2"]
        broken.unlink()
        wait_until(lambda: _num_prefills(cluster) == 2, "its return", seconds=90)
        wait_until(lambda: cluster.pids["prefill-2"] != before, "its new id to be told")
        broken.write_text("prefill-")
        for name in ("prefill-1", "prefill-2"):
            cluster.kill(name)
        log = state_dir / "logs" / "prefill-1.log"
        wait_until(lambda: log.read_text().count("cannot start") >= 3, "three starts", seconds=60)
        broken.unlink()
        wait_until(lambda: _num_prefills(cluster) == 2, "the return of both", seconds=90)
        assert cluster.complete("both-again")["usage"]["completion_tokens"] > 0
        # A worker beats before the launcher has read that it is ready.
        cluster.await_said("prefill-1 is back", "prefill-2 is back")
        ended = cluster.end()
        err = ended.stderr
        assert ended.status == 0, err
        assert "WARNING: prefill-2 exited with status 3 before it was ready" in err
        assert "it cannot start today" in err
        wait_until(lambda: cluster.is_gone(cluster.said["pids"]), "all to be gone")


def test_a_role_that_cannot_start_at_all_ends_it_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CANNOT_START)
    broken = tmp_path / "broken"
    broken.write_text("hostcache")
    ended = subprocess.run(
        up_command(tmp_path / "state", *SMALL),
        env={**os.environ, "PYTHONPATH": str(tmp_path), "BROKEN": str(broken)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stderr
    assert "error: hostcache exited with status 3 before it was ready: it cannot" in ended.stderr


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    command = up_command(tmp_path, "--memory-bytes", "1000")
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert found.stdout == ""
    lines = [line for line in found.stderr.splitlines() if " loads demo_model (" not in line]
    assert len(lines) == 1
    assert "memory_bytes=1000 is too little" in lines[0]


def _num_prefills(cluster: Up) -> int:
    return int(cluster.readiness()["workers"]["prefill"])


def _are_ready(cluster: Up) -> bool:
    """No answer counts as no: a process has its new id before its doors are open."""
    try:
        answers = [httpx.get(f"{door}/ready", timeout=120) for door in cluster.doors]
    except httpx.TransportError:
        return False
    return all(answer.status_code == 200 for answer in answers)
