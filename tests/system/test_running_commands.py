"""`ferryman up --detach`, `status`, `logs` and `down`, on one cluster from its start to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.harness.cluster import SMALL, up_command
from tests.waiting import wait_until

from ferryman_cli.app import run
from ferryman_launcher.folder_lock import holder_of
from ferryman_launcher.state_folder import running_cluster


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A detached cluster; killed, if the tests leave it running."""
    folder = tmp_path_factory.mktemp("state")
    try:
        yield folder
    finally:
        if pid := holder_of(folder):
            os.kill(pid, signal.SIGKILL)


def ferryman(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as people call it, and all that it prints."""
    argv = (sys.executable, "-m", "ferryman_cli", *arguments)
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)


def status_of(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run(["status", "--state-dir", str(state_dir), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_where_nothing_runs_status_logs_and_down_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status"], ["down"], ["logs", "router"]):
        assert run([*command, "--state-dir", str(tmp_path)]) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_a_detached_cluster_that_cannot_start_says_why_and_has_its_status(tmp_path: Path) -> None:
    ended = ferryman("up", "--detach", "--state-dir", str(tmp_path), "--memory", "1M")
    assert ended.returncode == 2
    assert "error: the model does not fit" in ended.stderr
    assert ended.stdout == ""
    assert not holder_of(tmp_path)


def test_up_detached_returns_when_the_cluster_is_ready(state_dir: Path) -> None:
    command = up_command(state_dir, "--detach", *SMALL)
    # Its output ends: what the cluster keeps open is none of it.
    started = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert started.returncode == 0, started.stderr
    assert "Ferryman is up and serves ferryman-demo." in started.stdout
    assert f"down --state-dir {state_dir}` drains and ends everything." in started.stdout
    assert holder_of(state_dir) == running_cluster(state_dir).up_pid


def test_status_is_one_screen(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--state-dir", str(state_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert "ferryman-demo" in lines[0]
    assert "all is well" in lines[0]
    for name in ("nats", "redis", "hostcache", "prefill", "decode", "router"):
        assert any(line.startswith(name) and line.endswith("running") for line in lines)


@pytest.mark.parametrize(
    "line", ["status", "top --once", "trace ID", "explain ID", "logs", "doctor"]
)
def test_what_a_command_says_of_a_cluster_is_json_for_programs(
    line: str, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = running_cluster(state_dir).http_urls[0]
    body = {"prompt": "The red box is in the", "max_tokens": 4}
    name = f"json-{line.split()[0]}"
    headers = {"x-request-id": name}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    words = [name if word == "ID" else word for word in line.split()]
    assert run([*words, "--json", "--state-dir", str(state_dir)]) == 0
    said = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert all(isinstance(value, dict) and value for value in said)
    assert len(said) == 1 or words[0] == "logs"


def test_status_names_a_process_that_is_stopped(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = running_cluster(state_dir).pids["hostcache"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: status_of(state_dir, capsys)[0] == 1, "the stop")
        _, report = status_of(state_dir, capsys)
    finally:
        os.kill(pid, signal.SIGCONT)
    states = {process["name"]: process["state"] for process in report["processes"]}
    assert states["hostcache"] == "stopped by a signal"
    assert report["is_well"] is False


@contextmanager
def following(state_dir: Path, service: str) -> Iterator[subprocess.Popen[str]]:
    argv = (sys.executable, "-m", "ferryman_cli", "logs", "-f", service)
    process = subprocess.Popen(
        (*argv, "--state-dir", str(state_dir)), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            yield process
        finally:
            process.kill()


def test_logs_are_followed_over_a_restart(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = running_cluster(state_dir).pids["hostcache"]
    with following(state_dir, "hostcache") as logs:
        assert logs.stdout is not None
        first = next(line for line in logs.stdout if '"event": "ready"' in line)
        os.kill(before, signal.SIGKILL)
        again = next(line for line in logs.stdout if '"event": "ready"' in line)
    assert json.loads(first)["worker_id"] != json.loads(again)["worker_id"]
    wait_until(lambda: status_of(state_dir, capsys)[0] == 0, "the return", seconds=90)
    assert run(["logs", "up", "--state-dir", str(state_dir)]) == 0
    assert "hostcache was ended by signal 9" in capsys.readouterr().out


def test_logs_of_all_have_their_names_and_a_wrong_name_is_answered_with_the_right_ones(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "-n", "2", "--state-dir", str(state_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" | ")[0] for line in lines} >= {"nats", "prefill", "router", "up"}
    assert run(["logs", "rooter", "--state-dir", str(state_dir)]) == 1
    assert "hostcache" in capsys.readouterr().err


def test_down_ends_all_of_it(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = running_cluster(state_dir)
    assert run(["down", "--state-dir", str(state_dir)]) == 0
    assert "has ended" in capsys.readouterr().out
    assert not holder_of(state_dir)
    assert not any(Path(f"/proc/{pid}").exists() for pid in cluster.pids.values())
    assert not (state_dir / "cluster.json").exists()
    assert run(["down", "--state-dir", str(state_dir)]) == 1
