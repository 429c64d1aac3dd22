"""The ways in which a setting is given to a cluster, from the settings' own declarations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves, size_of
from ferryman.settings.names import Key, variable
from ferryman_simulator.what_if.served_settings import STORAGE_BYTES
from ferryman_simulator.what_if.tunable import TUNABLE, SettingChange, exact_size

# The chart's values that are not below a role's `settings`.
CHART_VALUES: Mapping[Key, str] = MappingProxyType(
    {
        ("hostcache", "host_memory"): "hostCache.hostMemory",
        ("hostcache", STORAGE_BYTES): "hostCache.storageBytes",
        ("prefill", "memory_bytes"): "prefill.memoryBytes",
        ("decode", "memory_bytes"): "decode.memoryBytes",
        ("", "dtype"): "model.dtype",
        ("", "page_size"): "model.pageSize",
    }
)
CHART_ROLES: Mapping[str, str] = MappingProxyType(
    {"prefill": "prefill", "decode": "decode", "hostcache": "hostCache"}
)
_FLAGS = MappingProxyType({leaf.name: leaf.flag for leaf in leaves(UpOptions) if not leaf.role})
# `up` divides them among its nodes.
_OF_ALL_NODES = ("host_memory", STORAGE_BYTES)


@dataclass(frozen=True, slots=True)
class SettingWords:
    """One value: the flag of `ferryman up` (empty if no flag sets it), the environment variable,
    and the values of the Helm chart."""

    flag: str
    variable: str
    chart: tuple[str, ...]


def spelled(change: SettingChange, num_nodes: int = 1) -> SettingWords:
    """The words that set a change. A size that nodes share is theirs together but in the chart."""
    role, name = change.key
    text = _shared(name, change.text, num_nodes)
    flag = f"{_FLAGS[name]} {text}" if not role and name in _FLAGS else ""
    # A host-cache's own settings are given to no other process, so `up` has them by their name.
    return SettingWords(
        _switch(flag), f"{variable(name, role)}={text}", tuple(_chart(change.key, change.text))
    )


def _switch(flag: str) -> str:
    name, _, value = flag.partition(" ")
    if value in ("True", "true", "False", "false"):
        return name if value in ("True", "true") else f"--no-{name.removeprefix('--')}"
    return flag


def _shared(name: str, text: str, num_nodes: int) -> str:
    if name not in _OF_ALL_NODES or num_nodes == 1:
        return text
    return exact_size(size_of(name, text) * num_nodes)


def _chart(key: Key, text: str) -> list[str]:
    role, name = key
    if key in CHART_VALUES:
        return [f"{CHART_VALUES[key]}: {text}"]
    roles = (role,) if role else TUNABLE[name].roles
    paths = [CHART_VALUES.get((of, name), f"{CHART_ROLES[of]}.settings.{name}") for of in roles]
    return [f"{path}: {text}" for path in paths]
