"""The processes of a cluster, and the settings that they are given."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferryman.runtime.settings import read_settings
from ferryman_cli.choices import Choices, Doors, EngineChoices, demo_model
from ferryman_cli.roster import Roster, names, roster
from ferryman_cli.sizes import parse_size, size_text
from ferryman_cli.state_folder import StateFolder
from ferryman_cli.tier_choices import TierChoices
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
        EngineChoices(
            dtype="bfloat16",
            memory_bytes=1 << 27,
            threads=3,
            snapshot_grid=256,
            draft="ngram",
            draft_tokens=7,
        ),
        Doors(http_port=0, grpc_port=0),
        num_prefill=2,
        prefill_tp=2,
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
        assert settings.worker.snapshot_grid == 256
        assert (settings.worker.draft, settings.worker.draft_tokens) == ("ngram", 7)
        assert settings.worker.tp_size == (2 if role == "prefill" else 1)


def test_ranks_share_the_cores_among_all_of_them(choices: Choices) -> None:
    several = replace(choices, engine=EngineChoices(), num_decode=1, decode_tp=4)
    cores = len(os.sched_getaffinity(0))
    assert several.threads == max(1, cores // (2 * 2 + 1 * 4))


def test_workers_are_told_where_the_host_cache_will_be(choices: Choices, tmp_path: Path) -> None:
    jobs = {job.name: job for job in made(choices, tmp_path).services}
    port = jobs["hostcache"].environment["FERRYMAN_HOSTCACHE_LISTEN__PORT"]
    address = jobs["decode"].environment["FERRYMAN_DECODE_HOSTCACHE__ADDRESS"]
    assert address == f"127.0.0.1:{port}"


def test_nodes_share_what_there_is(choices: Choices, tmp_path: Path) -> None:
    tiers = TierChoices(host_bytes=64 << 20, storage_bytes=32 << 20, num_nodes=2)
    jobs = {job.name: job for job in made(replace(choices, tiers=tiers), tmp_path).services}
    said = {name: jobs[name].environment for name in jobs}
    for number in (1, 2):
        cache = said[f"hostcache-{number}"]
        assert cache["FERRYMAN_HOSTCACHE_NODE"] == f"node-{number}"
        assert cache["FERRYMAN_HOSTCACHE_MEMORY_BYTES"] == str(32 << 20)
        assert cache["FERRYMAN_HOSTCACHE_STORAGE__CAPACITY_BYTES"] == str(16 << 20)
        folder = cache["FERRYMAN_HOSTCACHE_STORAGE__FOLDER"]
        assert folder == str(tmp_path / "storage" / f"node-{number}")
        port = cache["FERRYMAN_HOSTCACHE_LISTEN__PORT"]
        address = said[f"prefill-{number}"]["FERRYMAN_PREFILL_HOSTCACHE__ADDRESS"]
        assert address == f"127.0.0.1:{port}"
    assert "FERRYMAN_DECODE_HOSTCACHE__ADDRESS" in said["decode"]


@pytest.mark.parametrize(
    ("tiers", "folder", "num_bytes"),
    [
        pytest.param(TierChoices(), "", 0, id="no storage without being asked"),
        pytest.param(TierChoices(storage_bytes=5 << 20), "/s/storage", 5 << 20, id="a size"),
        pytest.param(TierChoices(storage_dir="/d"), "/d", 1 << 30, id="a folder"),
    ],
)
def test_the_storage_tier_is_in_the_state_folder_unless_said_otherwise(
    tiers: TierChoices, folder: str, num_bytes: int
) -> None:
    assert tiers.storage_folder(Path("/s"), "local") == folder
    assert tiers.node_storage_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("", 0), ("7", 7), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("4 KB", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size("--host-memory", text) == num_bytes


@pytest.mark.parametrize("num_bytes", [7, 4096, 512 << 20, 3 << 29, 5 << 40])
def test_sizes_are_written_as_they_are_read(num_bytes: int) -> None:
    assert parse_size("", size_text(num_bytes)) == num_bytes


def test_the_cores_are_shared_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert Choices(Path("."), "x").threads == 4
    assert Choices(Path("."), "x", num_decode=30).threads == 1


def test_one_of_a_role_needs_no_number() -> None:
    assert names("decode", 1) == ["decode"]
    assert names("decode", 2) == ["decode-1", "decode-2"]
