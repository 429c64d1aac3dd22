"""The processes of a cluster, and the settings that they are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ferryman.runtime.settings import read_settings
from ferryman_cli.choices import Choices, Doors, EngineChoices, demo_model
from ferryman_cli.roster import Roster, names, roster
from ferryman_cli.state_folder import StateFolder
from ferryman_decode.service import DecodeSettings
from ferryman_hostcache.settings import Settings as HostCacheSettings
from ferryman_prefill.service import PrefillSettings
from ferryman_router.settings import RouterSettings

KINDS: dict[str, Any] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "hostcache": HostCacheSettings,
}


@pytest.fixture
def choices() -> Choices:
    return Choices(
        demo_model(),
        "demo",
        EngineChoices(dtype="bfloat16", memory_bytes=1 << 27, threads=3),
        Doors(http_port=0, grpc_port=0),
        num_prefill=2,
        cluster="blue",
    )


def made(choices: Choices, folder: Path) -> Roster:
    return roster(choices, StateFolder(folder))


def test_a_cluster_has_its_servers_and_services(choices: Choices, tmp_path: Path) -> None:
    found = made(choices, tmp_path)
    assert [job.name for job in found.servers] == ["nats", "redis"]
    services = [job.name for job in found.services]
    assert services == ["hostcache", "prefill-1", "prefill-2", "decode", "router"]
    ranks = {job.name: job.drain_rank for job in (*found.services, *found.servers)}
    assert ranks["router"] < ranks["prefill-1"] == ranks["decode"]
    assert ranks["decode"] < ranks["hostcache"] < ranks["nats"] == ranks["redis"]


def test_servers_of_others_are_not_started(choices: Choices, tmp_path: Path) -> None:
    theirs = Choices(choices.model, "x", nats_url="nats://n:1", redis_url="redis://r:2/0")
    found = made(theirs, tmp_path)
    assert found.servers == ()
    assert (found.nats_url, found.redis_url) == ("nats://n:1", "redis://r:2/0")


@pytest.mark.parametrize("name", ["hostcache", "prefill-2", "decode", "router"])
def test_every_service_understands_its_settings(
    choices: Choices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = made(choices, tmp_path)
    (job,) = (job for job in found.services if job.name == name)
    role = name.partition("-")[0]
    assert job.argv == (sys.executable, "-m", f"ferryman_{role}")
    for key, value in job.environment.items():
        monkeypatch.setenv(key, value)
    settings: Any = read_settings(KINDS[role])
    assert settings.bus.url == found.nats_url
    assert settings.bus.cluster == "blue"
    assert settings.life.parent_pid == os.getpid()
    if isinstance(settings, PrefillSettings | DecodeSettings):
        assert settings.worker.dtype == "bfloat16"
        assert settings.worker.num_threads == 3


def test_workers_are_told_where_the_host_cache_will_be(choices: Choices, tmp_path: Path) -> None:
    jobs = {job.name: job for job in made(choices, tmp_path).services}
    port = jobs["hostcache"].environment["FERRYMAN_HOSTCACHE_LISTEN__PORT"]
    address = jobs["decode"].environment["FERRYMAN_DECODE_HOSTCACHE__ADDRESS"]
    assert address == f"127.0.0.1:{port}"


def test_the_cores_are_shared_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert Choices(Path("."), "x").threads == 4
    assert Choices(Path("."), "x", num_decode=30).threads == 1


def test_one_of_a_role_needs_no_number() -> None:
    assert names("decode", 1) == ["decode"]
    assert names("decode", 2) == ["decode-1", "decode-2"]
