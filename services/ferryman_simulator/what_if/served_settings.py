"""The settings of a cluster, as its processes have them, and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ferryman.errors import ConfigError
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.settings.names import Key, variable
from ferryman.settings.sources import (
    GivenValue,
    Origin,
    Source,
    Sources,
    flat_values,
    read_settings,
)
from ferryman.settings.workers import DecodeSettings, PrefillSettings
from ferryman_simulator.what_if.observed import ObservedLog

STORAGE_DIR, STORAGE_BYTES = "storage_dir", "storage_bytes"
# Where a recorded cluster has a storage tier, a word stands for its place.
SOMEWHERE = "recorded"
_NO_KEY = Source({("hostcache", "cluster_key_file"): GivenValue("none", Origin.DERIVED, "")})


@dataclass(frozen=True, slots=True)
class ServedSettings:
    """The settings of the three roles that a simulation runs."""

    prefill: PrefillSettings
    decode: DecodeSettings
    hostcache: HostCacheServiceSettings

    def value(self, role: str, name: str) -> Any:
        """The value of a setting of this role."""
        settings: BaseModel = getattr(self, role)
        return flat_values(settings)[name]

    @property
    def storage_bytes(self) -> int:
        """The size of a node's storage tier; 0 if there is none."""
        storage = self.hostcache.storage
        return storage.capacity_bytes if storage.folder else 0


@dataclass(frozen=True, slots=True)
class ServedFleet:
    """The workers of each role, and the nodes. `slots` are the pools of one worker of each role by
    kind, as heartbeats say; empty where none was heard."""

    num_prefill: int
    num_decode: int
    num_nodes: int
    slots: Mapping[str, Mapping[str, int]]

    @classmethod
    def of_log(cls, observed: ObservedLog) -> ServedFleet:
        """The workers that the log names."""
        roles = ("prefill", "decode", "hostcache")
        prefill, decode, nodes = (max(1, observed.count(role)) for role in roles)
        return cls(prefill, decode, nodes, {})


def read_served(sources: Sources) -> ServedSettings:
    """Raises ConfigError for a value that a process would refuse, and for one that `up` derives
    from model and machine and nobody gave here."""
    every = Sources((*sources.sources, _NO_KEY))
    prefill = read_settings(PrefillSettings, "prefill", every)
    decode = read_settings(DecodeSettings, "decode", every)
    for role, settings in (("prefill", prefill), ("decode", decode)):
        if not settings.worker.is_complete:
            names = ", ".join(variable(name) for name in ("MEMORY_BYTES", "DTYPE"))
            raise ConfigError(
                f"the settings of the {role} worker are not known; give them as its process has "
                f"them ({names}, …), or name the --state-dir of `ferryman up`"
            )
    return ServedSettings(
        prefill, decode, read_settings(HostCacheServiceSettings, "hostcache", every)
    )


def page_size_of(sources: Sources) -> int:
    """The tokens of a page there."""
    return read_settings(PrefillSettings, "prefill", sources).worker.page_size


def recorded_source(settings: Mapping[str, str]) -> Mapping[str, str]:
    """Recorded variables as an environment: a storage tier with a size has a place as well."""
    size, place = variable(STORAGE_BYTES, "hostcache"), variable(STORAGE_DIR, "hostcache")
    return {**settings, **({place: SOMEWHERE} if size in settings else {})}


def with_changes(sources: Sources, changes: Mapping[Key, str]) -> Sources:
    """The same with other values, which take precedence."""
    changed = {
        key: GivenValue(text, Origin.FLAG, f"--with {'_'.join(filter(None, key))}")
        for key, text in changes.items()
    }
    return Sources((Source(changed), *sources.sources))
