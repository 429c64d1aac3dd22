"""Makes the options of a cluster from flags, environment and file. Imports no module that is
slow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ferryman.errors import ConfigError
from ferryman.gguf.absent_models import why_no_config, why_no_model
from ferryman.gguf.documents import has_document
from ferryman.gguf.model_file import model_exists, model_name
from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves
from ferryman.settings.engine import AUTO
from ferryman.settings.names import SERVICES
from ferryman.settings.sources import GivenValue, Origin, Source, Sources, read_settings
from ferryman_launcher.checks.unheeded_settings import unheeded

DEMO_NAME = "ferryman-demo"
# Model and machine are known where a cluster starts, so these are derived from them.
UP_DEFAULTS: Mapping[str, object] = {
    "page_size": 16,
    "dtype": AUTO,
    "device": AUTO,
    "memory_bytes": 0,
    "max_running": 0,
    "chunk_tokens": 0,
}
# Each process gets a share of these, or its own path: errors must name the cluster's value.
_SHARED_OUT = {"cluster_key_file": "cluster.key", "host_memory": 1 << 20, "storage_bytes": 1 << 20}
# If given for no role, these do not apply to every service: one address would open the ports of
# workers, and one port would belong to several processes.
_NOT_FOR_ALL = frozenset({("", "host"), ("", "port"), ("", "observe_port")})
# With one of these a value is derived, as if it were not given.
NOTHING = ("", "0", 0)
_BY_PROCESS = Source(
    {("", name): GivenValue(value, Origin.DERIVED, name) for name, value in _SHARED_OUT.items()}
)


def flag_source(kind: type[BaseModel], flags: Mapping[str, object]) -> Source:
    """The settings of `kind` that were given as flags; `flags` by parameter of the command."""
    return Source(
        {
            (leaf.role, leaf.name): GivenValue(value, Origin.FLAG, leaf.flag)
            for leaf in leaves(kind)
            if (value := _joined(flags.get(parameter_of(leaf.flag)))) not in (None, "")
        }
    )


def up_sources(
    flags: Mapping[str, object], environment: Mapping[str, str], config: str = ""
) -> Sources:
    """All settings given for a cluster; of `flags`, by parameter, those that have a value."""
    defaults = {**UP_DEFAULTS, "model": demo_model()}
    lowest = {("", name): GivenValue(value, Origin.DEFAULT, "") for name, value in defaults.items()}
    settings = Sources.of(environment, flag_source(UpOptions, flags), config=config)
    return Sources((*settings.sources, Source(lowest)))


def _joined(value: object) -> object:
    """The value of a flag; of one that was given several times, all of them."""
    return ",".join(value) if isinstance(value, list) else value


def up_options(sources: Sources) -> UpOptions:
    """The options of a cluster, with all its services' settings checked. Raises ConfigError."""
    options = read_settings(UpOptions, "", sources)
    if idle := options.idle_flags:
        raise ConfigError(f"--worker {options.worker} has no {', '.join(idle)}")
    services_settings(sources)
    settings = {role: _told(service_sources(sources), role) for role in SERVICES}
    folder = options.engine.model
    name = DEMO_NAME if folder == demo_model() else model_name(folder)
    roles = frozenset({"router", "hostcache", *(workers.role for workers in options.roles)})
    more = {
        # Routers alone have it: a value for their role is the cluster's.
        "served_name": settings["router"].get("served_name") or name,
        "told": settings,
        "unheeded": tuple(unheeded(sources, roles)),
    }
    return options.model_copy(update=more)


def services_settings(sources: Sources) -> Mapping[str, BaseModel]:
    """The settings of a cluster's services by role, with placeholders for those of single
    processes.

    Raises ConfigError for a value that a service would refuse.
    """
    every = Sources((_BY_PROCESS, *service_sources(sources).sources))
    return {role: read_settings(kind, role, every) for role, kind in SERVICES.items()}


def service_sources(sources: Sources) -> Sources:
    """The settings given for a cluster that apply to its services."""
    return Sources(
        tuple(
            Source(
                {key: value for key, value in source.values.items() if key not in _NOT_FOR_ALL},
                source.mistakes,
            )
            for source in sources.sources
        )
    )


def _told(sources: Sources, role: str) -> Mapping[str, Any]:
    """The given values that apply to each process of a role, without derived ones."""
    of_role = {leaf.name: sources.find(role, leaf.name) for leaf in leaves(SERVICES[role])}
    settings = {name: setting.value for name, setting in of_role.items() if setting is not None}
    if settings.get("num_threads") in NOTHING:
        del settings["num_threads"]
    return settings


def parameter_of(flag: str) -> str:
    """The parameter of a command for a flag: `page_size` for `--page-size`."""
    return flag.removeprefix("--").replace("-", "_")


def demo_model() -> Path:
    """The model that comes with this package."""
    folder = Path(str(files("ferryman_cli"))) / "demo_model"
    if not (folder / "config.json").is_file():
        raise ConfigError("this installation has no demo model; choose one with --model DIR")
    return folder


def check_model_folder(folder: Path) -> None:
    """Raises ConfigError unless there is a folder with a config in it, or a GGUF file."""
    if not model_exists(folder):
        raise ConfigError(f"--model {folder}: {why_no_model(folder)}")
    if not has_document(folder / "config.json"):
        raise ConfigError(f"--model {folder}: {why_no_config(folder)}")
