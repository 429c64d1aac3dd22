"""compose.yaml and what is laid over it, as values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel

from ferryman.settings.hostcache import HostCacheServiceSettings as HostCacheSettings
from ferryman.settings.router import RouterSettings
from ferryman.settings.workers import DecodeSettings, PrefillSettings

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, type[BaseModel]] = {
    "host-cache": HostCacheSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}
ROUTERS = "routers"  # of the profile `dns`: the router again, in several containers
SERVERS = ("nats", "redis")
WORKERS = ("prefill", "decode")
CHOICE = re.compile(r"\$\{(\w+):-([^}]*)\}")
ASSIGNED = re.compile(r"\b(FERRYMAN_\w+)=\$\$")


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load((ROOT / name).read_text()))


def environment(service: str) -> dict[str, str]:
    """A service's environment by compose's defaults, with variables that its command sets."""
    described = compose()["services"][service]
    given = {name: CHOICE.sub(r"\2", value) for name, value in described["environment"].items()}
    assigned = dict.fromkeys(ASSIGNED.findall(" ".join(described["command"])), "a-container")
    return {**given, **assigned}


def mounts(service: str) -> dict[str, tuple[str, bool]]:
    """The volumes of a service by name: the path, and whether it can be written to."""
    described = (volume.split(":") for volume in compose()["services"][service]["volumes"])
    return {name: (path, "ro" not in mode) for name, path, *mode in described}


def role_of(service: str) -> str:
    return service.replace("-", "")
