"""compose.yaml and the Dockerfile against the settings they name; no docker is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic_settings import BaseSettings

from ferryman.runtime.settings import read_settings
from ferryman_decode.service import DecodeSettings
from ferryman_hostcache.settings import Settings as HostCacheSettings
from ferryman_prefill.service import PrefillSettings
from ferryman_router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, type[BaseSettings]] = {
    "host-cache": HostCacheSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}
WORKERS = ("prefill", "decode")
CHOICE = re.compile(r"\$\{(\w+):-([^}]*)\}")
ASSIGNED = re.compile(r"\b(FERRYMAN_\w+)=\$\$")


def compose() -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((ROOT / "compose.yaml").read_text()))


def environment(service: str) -> dict[str, str]:
    """What compose gives a service when nobody chooses anything, its command's own included."""
    described = compose()["services"][service]
    given = {name: CHOICE.sub(r"\2", value) for name, value in described["environment"].items()}
    assigned = dict.fromkeys(ASSIGNED.findall(" ".join(described["command"])), "a-container")
    return {**given, **assigned}


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_of_a_service_is_one_of_its_settings(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(service).items():
        monkeypatch.setenv(name, str(tmp_path) if value == "/models/demo" else value)
    read_settings(SETTINGS[service])


@pytest.mark.parametrize("service", SETTINGS)
def test_no_service_is_given_the_variables_of_another(service: str) -> None:
    prefix = SETTINGS[service].model_config.get("env_prefix", "")
    assert all(name.startswith(prefix) for name in environment(service))


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_maps_the_arena_under_the_path_that_the_host_cache_gives(service: str) -> None:
    services = compose()["services"]
    folder = environment("host-cache")["FERRYMAN_HOSTCACHE_ARENA_FOLDER"]
    mount = f"arena:{folder}"
    assert mount in services[service]["volumes"]
    assert mount in services["host-cache"]["volumes"]


def test_the_arena_s_volume_holds_the_arena_twice() -> None:
    options = compose()["volumes"]["arena"]["driver_opts"]
    megabytes = re.search(r"size=(\d+)m", options["o"])
    assert options["type"] == "tmpfs"
    assert megabytes is not None
    arena_bytes = int(environment("host-cache")["FERRYMAN_HOSTCACHE_MEMORY_BYTES"])
    assert int(megabytes[1]) << 20 >= 2 * arena_bytes


@pytest.mark.parametrize("service", WORKERS)
def test_workers_find_the_host_cache_where_it_listens(service: str) -> None:
    address = environment(service)[f"FERRYMAN_{service.upper()}_HOSTCACHE__ADDRESS"]
    assert address == f"host-cache:{environment('host-cache')['FERRYMAN_HOSTCACHE_LISTEN__PORT']}"


def test_the_host_cache_says_where_others_reach_it() -> None:
    """A router told 0.0.0.0 asked itself for prefetches."""
    told = environment("host-cache")["FERRYMAN_HOSTCACHE_ADVERTISE"]
    assert told in compose()["services"], "a name that the network resolves"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_may_drain_before_it_is_killed(service: str, tmp_path: Path) -> None:
    grace = compose()["services"][service]["stop_grace_period"]
    given = {"worker": {"model": tmp_path}} if service in WORKERS else {"model": tmp_path}
    settings: Any = SETTINGS[service](**({} if service == "host-cache" else given))
    assert float(grace.removesuffix("s")) > settings.life.drain_seconds


@pytest.mark.parametrize("service", ["nats", "redis", *SETTINGS])
def test_every_container_is_confined_and_watched(service: str) -> None:
    described = compose()["services"][service]
    assert described["read_only"]
    assert described["cap_drop"] == ["ALL"]
    assert not described["user"].startswith(("0", "root"))
    assert described["restart"] == "unless-stopped"
    assert described["healthcheck"]["test"]


def test_ports_are_published_on_loopback_unless_chosen_otherwise() -> None:
    ports = [port for each in compose()["services"].values() for port in each.get("ports", ())]
    assert len(ports) == 3
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in ports)


@pytest.mark.parametrize("door", ["HTTP", "GRPC"])
def test_the_router_listens_where_its_published_port_leads(door: str) -> None:
    published = [port.rpartition(":")[2] for port in compose()["services"]["router"]["ports"]]
    assert environment("router")[f"FERRYMAN_ROUTER_{door}__PORT"] in published


def test_the_image_has_the_demo_model_where_compose_looks() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ferryman_cli/demo_model /models/demo" in dockerfile
    assert environment("router")["FERRYMAN_ROUTER_MODEL"] == "/models/demo"


def test_the_image_runs_as_the_user_who_owns_its_volumes() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    assert user is not None
    assert f"uid={user[1]},gid={user[2]}" in compose()["volumes"]["arena"]["driver_opts"]["o"]
    assert compose()["services"]["prefill"]["user"] == f"{user[1]}:{user[2]}"
