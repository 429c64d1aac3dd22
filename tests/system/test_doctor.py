"""`ferryman doctor` finds what is planted in a real cluster, and names it.

One cluster is sound, is spoilt, and is mended, test after test. Faults of a machine and of a model
folder are in tests/cli/test_doctor_before_a_start.py. Together they are:

    before a start   open-files, disk, memory, port, tokenizer, template, weights
    secrets          secret-file, credentials
    servers          nats-login, nats-away, jetstream, redis-away, redis-policy
    processes        stopped, arena, weights-changed
    workers          manifest, arithmetic, version, bulk-plane
    clocks           clock
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.cluster_keys import KEY
from tests.harness.cluster import Up, up
from tests.servers import nats_server, running_redis
from tests.waiting import wait_until

from ferryman.runtime.embedded import free_port, nats_command, start
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import write_all_credentials
from ferryman.settings.sources import as_environment
from ferryman_cli.app import run
from ferryman_cli.doctor.command import DoctorPlace, patient_of
from ferryman_cli.doctor.examination import examine
from ferryman_cli.running.status import process_status
from ferryman_launcher.checks.model_places import EVERYTHING_HERE
from ferryman_launcher.options import demo_model, up_options, up_sources
from ferryman_launcher.state_folder import credentials_path, running_cluster

Doctor = Callable[..., dict[str, Any]]
OF_ANOTHER_VERSION = """
import runpy, ferryman.runtime.version as version
version.package_version = lambda: "0.0.1"
runpy.run_module("ferryman_decode", run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("cluster")
    model = shutil.copytree(demo_model(), folder / "model")
    with up(folder / "state", "--model", str(model)) as cluster:
        yield cluster


@pytest.fixture
def doctor(cluster: Up, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Looks at the cluster, or at what the flags name, and returns its report."""

    def look(*flags: str) -> dict[str, Any]:
        where = ("--state-dir", str(cluster.state_dir))
        status = run(["doctor", *where, *flags, "--json"])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == bool(report["findings"])
        return report

    return look


@pytest.fixture
def sound(doctor: Doctor) -> Doctor:
    """The same, once nothing is wrong: what the test before has spoilt needs a moment to mend."""
    wait_until(lambda: doctor()["findings"] == [], "a sound cluster", seconds=90)
    return doctor


def names_of(report: Mapping[str, Any]) -> list[str]:
    return sorted({finding["name"] for finding in report["findings"]})


def mend_of(report: Mapping[str, Any], name: str) -> str:
    return next(str(f["mend"]) for f in report["findings"] if f["name"] == name)


def words_of(report: Mapping[str, Any], name: str) -> str:
    return next(str(f["words"]) for f in report["findings"] if f["name"] == name)


def test_a_sound_cluster_has_no_finding_and_every_check_was_made(doctor: Doctor) -> None:
    report = doctor()
    assert report["findings"] == []
    assert report["left_out"] == []
    made = {"Redis", "NATS", "state", "versions, clocks", "silence", "arena", "bulk planes"}
    assert made <= set(report["checks"])


def test_a_cluster_is_found_by_its_urls_too(doctor: Doctor, cluster: Up) -> None:
    router = credentials_path(cluster.state_dir, ClusterRole.ROUTER)
    report = doctor(*urls_of(cluster), "--credentials", str(router))
    assert report["findings"] == []
    assert "bulk planes" in report["checks"]


def urls_of(cluster: Up) -> tuple[str, ...]:
    return "--nats", str(cluster.said["nats"]), "--redis", str(cluster.said["redis"])


# Secrets.


def test_a_key_that_others_may_read(sound: Doctor, cluster: Up) -> None:
    key = cluster.state_dir / "cluster.key"
    key.chmod(0o644)
    report = sound()
    key.chmod(0o600)
    assert names_of(report) == ["secret-file"]
    assert mend_of(report, "secret-file") == f"chmod 600 {key}"


def test_credentials_of_another_cluster(sound: Doctor, cluster: Up) -> None:
    path = credentials_path(cluster.state_dir, ClusterRole.DECODE)
    own = path.read_text()
    others = write_all_credentials(cluster.state_dir.parent, KEY)
    path.write_text(others[ClusterRole.DECODE].read_text())
    report = sound()
    path.write_text(own)
    assert names_of(report) == ["credentials"]
    assert "another cluster's key" in words_of(report, "credentials")
    assert mend_of(report, "credentials").startswith("ferryman credentials ")


# Servers.


def test_a_wrong_password_for_nats_and_redis(doctor: Doctor, cluster: Up) -> None:
    others = write_all_credentials(cluster.state_dir.parent, KEY)
    report = doctor(*urls_of(cluster), "--credentials", str(others[ClusterRole.ROUTER]))
    assert names_of(report) == ["nats-login", "redis-login"]
    assert "ferryman credentials" in mend_of(report, "nats-login")
    assert "--aclfile" in mend_of(report, "redis-login")


def test_servers_that_are_away(doctor: Doctor) -> None:
    away = f"127.0.0.1:{free_port()}"
    report = doctor("--nats", f"nats://{away}", "--redis", f"redis://{away}/0")
    assert names_of(report) == ["nats-away", "redis-away"]
    assert "start nats-server again" in mend_of(report, "nats-away")
    assert "start it again" in mend_of(report, "redis-away")


def test_a_broker_without_jetstream(doctor: Doctor, tmp_path: Path) -> None:
    command = nats_command(tmp_path / "nats")
    argv = tuple(part for part in command.argv if part != "-js")
    server = start(replace(command, argv=argv), tmp_path / "nats")
    try:
        report = doctor("--nats", server.url)
    finally:
        server.stop()
    assert names_of(report) == ["jetstream"]
    assert "-js" in mend_of(report, "jetstream")


def test_an_index_that_evicts_by_itself(doctor: Doctor) -> None:
    with running_redis() as server, Redis.from_url(server.url) as redis, nats_server() as nats:
        before = doctor("--nats", nats, "--redis", server.url)
        assert "redis-policy" not in names_of(before)
        redis.config_set("maxmemory-policy", "allkeys-lru")
        report = doctor("--nats", nats, "--redis", server.url)
    assert "redis-policy" in names_of(report)
    assert "maxmemory-policy noeviction" in mend_of(report, "redis-policy")


# Processes.


def test_a_process_that_is_stopped(sound: Doctor, cluster: Up) -> None:
    pid = cluster.pids["hostcache"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for_stop(cluster, pid)
        report = sound()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "stopped" in names_of(report)
    assert mend_of(report, "stopped") == f"kill -CONT {pid}"


def test_an_arena_that_was_swept_away(sound: Doctor, cluster: Up) -> None:
    arena = cluster.arena
    hidden = arena.with_name(f"hidden-{arena.name}")
    arena.rename(hidden)
    try:
        report = sound()
    finally:
        hidden.rename(arena)
    assert "arena" in names_of(report)
    assert str(arena) in words_of(report, "arena")
    assert "ferryman roll" in mend_of(report, "arena")


def test_a_weight_file_that_changed_since_the_start(sound: Doctor, cluster: Up) -> None:
    folder = Path(running_cluster(cluster.state_dir).model_folder)
    (weights,) = folder.glob("*.safetensors")
    before = weights.stat()
    os.utime(weights)
    report = sound()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert names_of(report) == ["weights-changed"]
    assert weights.name in words_of(report, "weights-changed")
    assert "ferryman roll" in mend_of(report, "weights-changed")


# Clocks.


def test_a_clock_that_is_off_by_minutes(cluster: Up) -> None:
    options = up_options(up_sources({}, os.environ))
    place = DoctorPlace("", "", "", None, "", cluster.state_dir)
    patient = patient_of(options, EVERYTHING_HERE, place)
    late = replace(patient, clock=lambda: time.time() - 300.0)
    findings = asyncio.run(examine(late)).findings
    assert {finding.name for finding in findings} == {"clock"}
    of = " ".join(finding.words for finding in findings)
    for name in ("NATS", "Redis", "prefill-", "decode-", "hostcache-", "router-"):
        assert f"the clock of {name}" in of
    assert "300 s ahead of this machine's" in of
    assert all("timedatectl set-ntp true" in finding.mend for finding in findings)


# Workers that others have started beside the cluster's own. These tests are the last: the cluster
# needs a while to forget them.


@contextmanager
def joined_worker(cluster: Up, name: str, *argv: str, **changed: object) -> Iterator[str]:
    """A decode worker of its own in the cluster; its id, once it is ready."""
    settings = {
        "nats_url": cluster.said["nats"],
        "credentials_file": credentials_path(cluster.state_dir, ClusterRole.DECODE),
        "parent_pid": os.getpid(),
        "model": running_cluster(cluster.state_dir).model_folder,
        "page_size": 16,
        "memory_bytes": 64 << 20,
        "max_running": 8,
        "num_threads": 1,
        **changed,
    }
    with (cluster.state_dir / f"{name}.err").open("w") as errors:
        process = subprocess.Popen(
            (sys.executable, *argv),
            env={**os.environ, **as_environment(settings, "decode"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        with process, process.stdout:
            try:
                yield next(
                    str(json.loads(line)["worker_id"])
                    for line in process.stdout
                    if line.startswith('{"event": "ready"')
                )
            finally:
                process.terminate()


def test_workers_that_do_not_fit_the_others(sound: Doctor, cluster: Up) -> None:
    plain = ("-m", "ferryman_decode")
    with ExitStack() as stack:
        other_pages = joined_worker(cluster, "pages", "-c", OF_ANOTHER_VERSION, page_size=32)
        pages = stack.enter_context(other_pages)
        # Nothing listens at this address of the loopback network, as behind a firewall.
        unlike = joined_worker(cluster, "unlike", *plain, exactness="values", advertise="127.0.0.2")
        values = stack.enter_context(unlike)
        report = sound()
    assert names_of(report) == ["arithmetic", "bulk-plane", "manifest", "version"]
    assert pages in words_of(report, "manifest")
    assert "pages of 32 tokens, not 16" in words_of(report, "manifest")
    assert f"{pages} runs version 0.0.1" in words_of(report, "version")
    assert "pip install ferryman==" in mend_of(report, "version")
    assert values in words_of(report, "arithmetic")
    assert "--exactness values" in mend_of(report, "arithmetic")
    blocked = [f for f in report["findings"] if f["name"] == "bulk-plane"]
    assert all(f"to {values} and back" in f["words"] for f in blocked)
    assert all("FERRYMAN_ADVERTISE" in f["mend"] for f in blocked)


def wait_for_stop(cluster: Up, pid: int) -> None:
    """A signal arrives when the process runs next."""
    wait_until(lambda: process_status("", pid, {}).state.startswith("stopped"), "the stop")
