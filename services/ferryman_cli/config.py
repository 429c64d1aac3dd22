"""`ferryman config`: every setting of a cluster as a line of a file or as JSON, with its origin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from ferryman.errors import ConfigError
from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import Leaf, leaves
from ferryman.settings.engine import AUTO
from ferryman.settings.names import SERVICES
from ferryman.settings.sources import Origin, Sources
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.options import NOTHING, service_sources, services_settings, up_options

MASKED = "**********"
# `up` gives each process one of its own.
BY_PROCESS = frozenset(
    {
        "advertise",
        "cluster_key_file",
        "credentials_file",
        "hostcache_address",
        "node",
        "parent_pid",
        "port",
    }
)


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """The value of one setting, of one `role` or (empty) of all. `origin` says what has set it."""

    role: str
    name: str
    value: Any
    origin: str


def toml_lines(values: Iterable[ConfigValue]) -> Iterator[str]:
    """A table for each role, the origin of each value after it."""
    role = ""
    for setting in values:
        if setting.role != role:
            role = setting.role
            yield f"\n[{role}]"
        yield f"{setting.name} = {json.dumps(_plain(setting.value))}  # {setting.origin}"


def as_object(values: Iterable[ConfigValue]) -> dict[str, object]:
    """The same for programs, by role and name; the role of all is `cluster`."""
    by_role: dict[str, dict[str, object]] = {}
    for setting in values:
        of_role = by_role.setdefault(setting.role or "cluster", {})
        of_role[setting.name] = {"value": _plain(setting.value), "origin": setting.origin}
    return dict(by_role)


def print_values(values: Iterable[ConfigValue], *, as_json: bool) -> None:
    """Prints them as a file of settings, or as JSON."""
    print(json.dumps(as_object(values)) if as_json else "\n".join(toml_lines(values)))


def config_values(
    sources: Sources, planned: Mapping[str, Mapping[str, Any]]
) -> Iterator[ConfigValue]:
    """The settings of the cluster, then those of each role. Raises ConfigError for a mistake.

    `planned` are values that follow from model and machine, by role and name; empty if they cannot
    be known. If roles differ, each has a value of its own.
    """
    options = up_options(sources)
    of_all = _equal_in_all(planned)
    derived = {
        **of_all,
        "served_name": options.served_name,
        "num_threads": options.threads,
        "host_memory": options.tiers.arena_bytes * options.tiers.num_nodes,
    }
    of_cluster = list(leaves(UpOptions))
    for leaf in of_cluster:
        if not leaf.role and leaf.name != "tp_size":
            value = derived.get(leaf.name, _value(options, leaf))
            yield _setting(leaf, value, sources, leaf.name in derived)
    # A role has settings of its own alone: what all share was said above, unless it differs here.
    common = {leaf.name for leaf in of_cluster if not leaf.role}
    of_services = service_sources(sources)
    for role, settings in services_settings(sources).items():
        role_leaves = [leaf for leaf in of_cluster if leaf.role == role]
        for leaf in role_leaves:
            yield _setting(leaf, _value(options, leaf), sources, role=role)
        hidden = BY_PROCESS | {leaf.name for leaf in role_leaves}
        once = {leaf.name: leaf for leaf in leaves(SERVICES[role]) if leaf.name not in hidden}
        of_role = {k: v for k, v in planned.get(role, {}).items() if k not in of_all}
        for leaf in once.values():
            if (
                leaf.name not in common
                or leaf.name in of_role
                or of_services.is_for_role(role, leaf.name)
            ):
                value = of_role.get(leaf.name, _value(settings, leaf))
                yield _setting(leaf, value, of_services, leaf.name in of_role, role)


def planned_values(options: UpOptions, places: ModelPlaces) -> Mapping[str, Mapping[str, Any]]:
    """The values that follow from model and machine; empty if none is left open, or the model does
    not fit."""
    if options.engine.is_complete:
        return {}
    from ferryman_launcher.checks.cluster_memory import derived_values, plan_memory

    try:
        return derived_values(plan_memory(options, places))
    except ConfigError:
        return {}


def _equal_in_all(planned: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    roles = list(planned.values())
    names = roles[0] if roles else ()
    return {name: roles[0][name] for name in names if len({values[name] for values in roles}) == 1}


def _value(settings: BaseModel, leaf: Leaf) -> Any:
    value: Any = settings
    for name in leaf.path:
        value = getattr(value, name)
    return value


def _setting(
    leaf: Leaf, value: Any, sources: Sources, is_derived: bool = False, role: str = ""
) -> ConfigValue:
    setting = sources.find(leaf.role or role, leaf.name)
    if is_derived and (setting is None or setting.value in (*NOTHING, AUTO)):
        origin: str = Origin.DERIVED
    else:
        origin = f"{setting.origin} {setting.spelled}".strip() if setting else Origin.DEFAULT
    return ConfigValue(role, leaf.name, value, origin)


def _plain(value: Any) -> object:
    """The value as both formats have it; a secret is masked."""
    if isinstance(value, SecretStr):
        return MASKED if value.get_secret_value() else ""
    if isinstance(value, bool | int | float):
        return value
    return str(value) if isinstance(value, Path) else value
