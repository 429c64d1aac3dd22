"""compose.yaml and the Dockerfile against the settings they name; no docker is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.compose_file import (
    CHOICE,
    ROOT,
    ROUTERS,
    SERVERS,
    SETTINGS,
    WORKERS,
    compose,
    environment,
    mounts,
    role_of,
)

from ferryman.settings.declaration import parse_size
from ferryman.settings.names import names_of
from ferryman.settings.sources import Sources, read_settings

ONCE = "credentials"


def size_of(text: str) -> int:
    size = parse_size(text)
    assert isinstance(size, (int, str))
    return int(size)


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_service_is_one_of_its_settings(service: str, tmp_path: Path) -> None:
    given = {
        name: str(tmp_path) if value == "/models/demo" else value
        for name, value in environment(service).items()
    }
    read_settings(SETTINGS[service], role_of(service), Sources.of(given))


@pytest.mark.parametrize("service", SETTINGS)
def test_no_service_is_given_the_variables_of_another(service: str) -> None:
    names = {name.removeprefix("FERRYMAN_").lower() for name in environment(service)}
    assert names <= names_of(role_of(service))


def test_the_head_of_the_file_names_every_choice() -> None:
    head, _, body = (ROOT / "compose.yaml").read_text().partition("\nx-image:")
    listed = head.partition("Choices (environment or .env): ")[2].partition(". Every")[0]
    named = set(re.findall(r"[A-Z_]+", listed))
    assert named == {name for name, _ in CHOICE.findall(body)}


def test_both_workers_quantise_as_one_choice_says() -> None:
    chosen = {service: environment(service)["FERRYMAN_QUANTIZE"] for service in WORKERS}
    assert set(chosen.values()) == {"none"}
    described = compose()["services"]
    for service in WORKERS:
        assert described[service]["environment"]["FERRYMAN_QUANTIZE"] == "${QUANTIZE:-none}"


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_maps_the_arena_under_the_path_that_the_host_cache_gives(service: str) -> None:
    folder = environment("host-cache")["FERRYMAN_ARENA_FOLDER"]
    assert mounts(service)["arena"] == mounts("host-cache")["arena"] == (folder, True)


def test_the_arena_s_volume_holds_the_arena_twice() -> None:
    options = compose()["volumes"]["arena"]["driver_opts"]
    megabytes = re.search(r"size=(\d+)m", options["o"])
    assert options["type"] == "tmpfs"
    assert megabytes is not None
    arena_bytes = parse_size(environment("host-cache")["FERRYMAN_HOST_MEMORY"])
    assert isinstance(arena_bytes, int)
    assert int(megabytes[1]) << 20 >= 2 * arena_bytes


@pytest.mark.parametrize("service", WORKERS)
def test_workers_find_the_host_cache_where_it_listens(service: str) -> None:
    address = environment(service)["FERRYMAN_HOSTCACHE_ADDRESS"]
    assert address == f"host-cache:{environment('host-cache')['FERRYMAN_PORT']}"


def test_the_host_cache_says_where_others_reach_it() -> None:
    """A router that was given 0.0.0.0 sent its prefetches to itself."""
    told = environment("host-cache")["FERRYMAN_ADVERTISE"]
    assert told in compose()["services"], "a name that the network resolves"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_may_drain_before_it_is_killed(service: str, tmp_path: Path) -> None:
    grace = compose()["services"][service]["stop_grace_period"]
    key = {"cluster_key_file": tmp_path / "cluster.key"}
    given = {"worker": {"model": tmp_path}} if service in WORKERS else {"model": tmp_path, **key}
    settings: Any = SETTINGS[service](**(key if service == "host-cache" else given))
    assert float(grace.removesuffix("s")) > settings.life.drain_seconds


@pytest.mark.parametrize("service", [ONCE, *SERVERS, *SETTINGS])
def test_every_container_is_confined(service: str) -> None:
    described = compose()["services"][service]
    assert described["read_only"]
    assert described["cap_drop"] == ["ALL"]
    assert not described["user"].startswith(("0", "root"))


@pytest.mark.parametrize("service", [*SERVERS, *SETTINGS])
def test_every_container_that_stays_is_watched(service: str) -> None:
    described = compose()["services"][service]
    assert described["restart"] == "unless-stopped"
    assert described["healthcheck"]["test"]


def test_ports_are_published_on_loopback_unless_chosen_otherwise() -> None:
    ports = [port for each in compose()["services"].values() for port in each.get("ports", ())]
    assert len(ports) == 5
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in ports)


@pytest.mark.parametrize("door", ["HTTP", "GRPC"])
def test_the_router_listens_where_its_published_port_leads(door: str) -> None:
    published = [port.rpartition(":")[2] for port in compose()["services"]["router"]["ports"]]
    assert environment("router")[f"FERRYMAN_{door}_PORT"] in published


def test_the_routers_behind_one_name_are_routers_without_published_ports() -> None:
    services = compose()["services"]
    own = {"profiles": ["dns"], "ports": [], "deploy": {"replicas": 2}}
    assert services[ROUTERS] == {**services["router"], **own}


def test_the_image_has_the_demo_model_where_compose_looks() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ferryman_cli/demo_model /models/demo" in dockerfile
    assert environment("router")["FERRYMAN_MODEL"] == "/models/demo"


def test_the_image_runs_as_the_user_who_owns_its_volumes() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    assert user is not None
    assert f"uid={user[1]},gid={user[2]}" in compose()["volumes"]["arena"]["driver_opts"]["o"]
    assert compose()["services"]["prefill"]["user"] == f"{user[1]}:{user[2]}"


@pytest.mark.parametrize("service", [ONCE, *SERVERS, *SETTINGS])
def test_every_container_has_limits_that_hold_what_it_is_told_to_take(service: str) -> None:
    described = compose()["services"][service]
    limit = size_of(CHOICE.sub(r"\2", described["mem_limit"]).upper())
    told = environment(service) if service in SETTINGS else {}
    sizes = [told.get(f"FERRYMAN_{name}", "0") for name in ("MEMORY_BYTES", "HOST_MEMORY")]
    assert limit >= 2 * sum(map(size_of, sizes))
    assert limit >= 512 << 20
    assert 0 < described["pids_limit"] <= 4096
