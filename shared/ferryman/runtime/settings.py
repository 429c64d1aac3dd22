"""Settings: read once in `main`, from `FERRYMAN_<SERVICE>_*`, and checked at the door.

A service composes its settings from the groups here, as nested values:

    class Settings(BaseSettings):
        model_config = settings_config("prefill")
        bus: BusSettings = BusSettings()          # FERRYMAN_PREFILL_BUS__URL

Every mistake becomes one line that names the variable and what to change.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from ferryman.errors import ConfigError

S = TypeVar("S", bound=BaseSettings)
Spell = Callable[[tuple[str, ...]], str]

NESTED = "__"
_GROUP = ConfigDict(frozen=True, extra="forbid")

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicyName = Literal["best_effort", "wait_complete", "timeout"]
# Tokens; below them a prefetch is not worth its trouble.
PrefetchThreshold = Annotated[int, Field(ge=0)]
PREFETCH_THRESHOLD = 64


class LifeSettings(BaseModel):
    """How the process lives. `parent_pid` is who to end with; 0 is nobody."""

    model_config = _GROUP
    drain_seconds: Seconds = 30.0
    parent_pid: Annotated[int, Field(ge=0)] = 0
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class ListenSettings(BaseModel):
    """Where a server listens; port 0 takes a free one."""

    model_config = _GROUP
    host: str = "127.0.0.1"
    port: Port = 0


class BusSettings(BaseModel):
    """Where NATS is, and which cluster's subjects are spoken."""

    model_config = _GROUP
    url: str = "nats://127.0.0.1:4222"
    cluster: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] = "local"


class IndexSettings(BaseModel):
    """Where Redis is, and how long it may take to answer before it counts as away."""

    model_config = _GROUP
    url: str = "redis://127.0.0.1:6379/0"
    lookup_seconds: Annotated[float, Field(gt=0, le=10)] = 0.2


class WorkerSettings(BaseModel):
    """What a prefill and a decode worker share: the model and what the machine gives it.

    `memory_bytes` is a hard bound on all slabs together. `num_threads` 0 takes what torch takes.
    `recurrent_slots` sizes the pool of recurrent states, 0 by its share of the memory.
    `tp_size` ranks share the model, each a process; one that is silent for `rank_silence_seconds`
    is lost, and the worker with it. `memory_bytes` is for all of them, `num_threads` for each.
    `snapshot_grid` keeps a snapshot each so many tokens of a prompt, 0 only where a path ends or
    is left. `draft` is empty, "ngram", or the folder of a draft model: the same for prefill and
    decode workers, which verify up to `draft_tokens` drafts of a request in a step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    model: Path
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    page_size: Count = 64
    chunk_tokens: Count = 512
    max_running: Count = 32
    max_waiting: Count = 256
    memory_bytes: Count = 1 << 30
    recurrent_slots: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    num_threads: Annotated[int, Field(ge=0)] = 0
    prefix_cache: bool = True
    overlap: bool = True
    snapshot_grid: Annotated[int, Field(ge=0)] = 0
    draft: str = ""
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    tp_size: Annotated[int, Field(ge=1, le=64)] = 1
    rank_silence_seconds: Seconds = 300.0

    @field_validator("page_size")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("should be a power of two")
        return value

    @model_validator(mode="after")
    def _grid_is_pages(self) -> Self:
        if self.snapshot_grid % self.page_size:
            raise ValueError(f"snapshot_grid should be a multiple of page_size={self.page_size}")
        return self

    @field_validator("draft")
    @classmethod
    def _is_known_draft(cls, value: str) -> str:
        if value not in ("", "ngram") and not Path(value).is_dir():
            raise ValueError("should be ngram, or the folder of a draft model")
        return value

    @field_validator("model")
    @classmethod
    def _is_folder(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError("should be a folder that exists")
        return value


def settings_config(service: str) -> SettingsConfigDict:
    """The `model_config` of a service's settings; `service` is its role in lower case."""
    return SettingsConfigDict(
        env_prefix=f"FERRYMAN_{service.upper()}_",
        env_nested_delimiter=NESTED,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
    )


def read_settings(
    kind: type[S], given: Mapping[str, Any] | None = None, *, spell: Spell | None = None
) -> S:
    """Settings from `given` and the environment, or a ConfigError that lists every mistake.

    `spell` says how the caller calls a setting, for one who gave flags and not variables.
    """
    prefix = kind.model_config.get("env_prefix", "")
    spelled = spell or (lambda path: variable(prefix, path))
    unknown = list(_unknown_variables(kind, prefix, os.environ))
    try:
        settings = kind(**(given or {}))
    except ValidationError as error:
        mistakes = [_line(spelled, cast("dict[str, Any]", one)) for one in error.errors()]
        raise ConfigError("\nerror: ".join([*mistakes, *unknown])) from None
    except SettingsError as error:
        raise ConfigError("\nerror: ".join([str(error), *unknown])) from None
    if unknown:
        raise ConfigError("\nerror: ".join(unknown))
    return settings


def variable(prefix: str, path: tuple[str, ...]) -> str:
    """The environment variable of a setting: `("bus", "url")` → `FERRYMAN_PREFILL_BUS__URL`."""
    return prefix + NESTED.join(path).upper()


def as_environment(prefix: str, values: Mapping[str, object]) -> dict[str, str]:
    """Nested values as the variables that `read_settings` reads in a child process."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= as_environment(f"{prefix}{name.upper()}{NESTED}", value)
        else:
            found[prefix + name.upper()] = str(value)
    return found


def _line(spell: Spell, error: dict[str, Any]) -> str:
    name = spell(tuple(str(part) for part in error["loc"]))
    if error["type"] == "missing":
        return f"{name} is not set"
    if error["type"] == "extra_forbidden":
        return f"{name} is no setting"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}={str(error['input'])!r}: {message}"


def _unknown_variables(
    kind: type[BaseSettings], prefix: str, environment: Mapping[str, str]
) -> Iterator[str]:
    """pydantic-settings passes over what it does not know; a typing mistake should be seen."""
    known = {variable(prefix, (name,)) for name in kind.model_fields}
    for name in sorted(environment):
        first = prefix + name.removeprefix(prefix).split(NESTED)[0]
        if name.startswith(prefix) and first not in known:
            near = difflib.get_close_matches(first, sorted(known), n=1)
            yield f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else "")
