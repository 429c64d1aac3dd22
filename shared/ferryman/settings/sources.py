"""The sources of settings: flags, environment, a file, defaults; the first that has one wins.

Every mistake becomes one line that names the place and what to change. Within one source, a value
for one role (`FERRYMAN_DECODE_TP_SIZE`, `[decode] tp_size`) counts more than one for all.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from ferryman.errors import ConfigError
from ferryman.settings.declaration import Leaf, leaves, nearest, reason_of
from ferryman.settings.names import (
    KNOWN,
    PREFIX,
    SERVICES,
    Key,
    key_of,
    names_of,
    nearest_variable,
    variable,
    variables_in,
)

M = TypeVar("M", bound=BaseModel)

CONFIG = variable("config")
OTLP_ENDPOINT, OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"


class Origin(StrEnum):
    """The source of a value. DERIVED values follow from others, or from the machine."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"
    DERIVED = "derived"


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value as it was given, and its name in that source."""

    value: object
    origin: Origin
    spelled: str

    def __str__(self) -> str:
        if self.origin is Origin.FLAG:
            return f"{self.spelled} {self.value}"
        return f"{self.spelled}={self.value!r}"


@dataclass(frozen=True, slots=True)
class Source:
    """The values of one source: by role (empty: for all) and name, and the errors in it."""

    values: Mapping[Key, GivenValue]
    mistakes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources; an earlier one takes precedence."""

    sources: tuple[Source, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str], *flags: Source, config: str = "") -> Sources:
        """Flags, environment, and the file that `config` or FERRYMAN_CONFIG names.

        Raises ConfigError for a file that cannot be read.
        """
        path = config or environment.get(CONFIG, "")
        files = (file_source(Path(path)),) if path else ()
        return cls((*flags, environment_source(environment), *files))

    def find(self, role: str, name: str) -> GivenValue | None:
        """The value that counts for a process of this role."""
        for source in self.sources:
            for key in ((role, name), ("", name)):
                if (value := source.values.get(key)) is not None:
                    return value
        return None

    def is_for_role(self, role: str, name: str) -> bool:
        """Whether the value that counts was given for this role alone."""
        return self.find(role, name) is not self.find("", name)

    @property
    def mistakes(self) -> Iterator[str]:
        for source in self.sources:
            yield from source.mistakes


def environment_source(environment: Mapping[str, str]) -> Source:
    """The variables that begin with FERRYMAN_, and below them the collector by OpenTelemetry's
    name; an empty one counts as not set."""
    values = dict(_collector(environment))
    mistakes: list[str] = []
    for called in sorted(variables_in(environment)):
        name = called.removeprefix(PREFIX).lower()
        key = key_of(name)
        if key is None:
            mistakes.append(_unknown(called, nearest_variable(name)))
        elif value := environment[called]:
            values[key] = GivenValue(value, Origin.ENVIRONMENT, called)
    return Source(values, tuple(mistakes))


def _collector(environment: Mapping[str, str]) -> Iterator[tuple[Key, GivenValue]]:
    """https://opentelemetry.io/docs/specs/otel/protocol/exporter/: one URL for both protocols, and
    a variable that names the protocol; here the URL's scheme does."""
    url = environment.get(OTLP_ENDPOINT, "")
    if environment.get(OTLP_PROTOCOL) == "grpc" and url.startswith("http"):
        url = "grpc" + url.removeprefix("http")
    if url:
        yield ("", "otlp_endpoint"), GivenValue(url, Origin.ENVIRONMENT, OTLP_ENDPOINT)


def file_source(path: Path) -> Source:
    """A TOML file: settings by name, and those of one role in a table of its name.

    Raises ConfigError for a file that is not there, or is no TOML.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it should be UTF-8"
        raise ConfigError(f"{path}: {why}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    values: dict[Key, GivenValue] = {}
    mistakes: list[str] = []
    for role, name, value in _entries(table):
        spelled = f"{path}: {role}.{name}" if role else f"{path}: {name}"
        if name in (names_of(role) if role else KNOWN):
            values[role, name] = GivenValue(value, Origin.FILE, spelled)
        else:
            names = names_of(role) if role else {*KNOWN, *SERVICES}
            mistakes.append(_unknown(spelled, nearest(name, names)))
    return Source(values, tuple(mistakes))


def _unknown(spelled: str, near: str) -> str:
    return f"{spelled} is no setting" + (f"; did you mean {near}?" if near else "")


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    for name, value in table.items():
        if name in SERVICES and isinstance(value, dict):
            yield from ((name, inner, setting) for inner, setting in value.items())
        else:
            yield "", name, value


def read_settings(kind: type[M], role: str, sources: Sources) -> M:
    """The settings of a process, or a ConfigError that lists every mistake."""
    by_path = {leaf.path: leaf for leaf in leaves(kind)}
    try:
        settings = kind.model_validate(_nested(kind, role, sources))
    except ValidationError as error:
        lines = [_line(mistake, by_path, role, sources) for mistake in error.errors()]
        raise ConfigError("\nerror: ".join([*lines, *sources.mistakes])) from None
    if mistakes := list(sources.mistakes):
        raise ConfigError("\nerror: ".join(mistakes))
    return settings


def _nested(kind: type[BaseModel], role: str, sources: Sources) -> dict[str, Any]:
    """The given values in the shape of the model. A group keeps its defaults for the rest."""
    tree: dict[str, Any] = {}
    for leaf in leaves(kind):
        entry = sources.find(leaf.role or role, leaf.name)
        inside, model = tree, kind
        for name in leaf.path[:-1]:
            field = model.model_fields[name]
            inside = inside.setdefault(name, _chosen_in(field.default))
            model = cast("type[BaseModel]", field.annotation)
        if entry is not None:
            inside[leaf.path[-1]] = entry.value
    return tree


def _chosen_in(default: object) -> dict[str, Any]:
    """The values that a group's default has and its class does not; empty without a default."""
    if not isinstance(default, BaseModel):
        return {}
    return {name: getattr(default, name) for name in default.model_fields_set}


def flat_values(group: BaseModel) -> dict[str, Any]:
    """The values of a model by the names that they have from outside."""
    flat: dict[str, Any] = {}
    for leaf in leaves(type(group)):
        value: Any = group
        for name in leaf.path:
            value = getattr(value, name)
        flat[leaf.name] = value
    return flat


def as_environment(values: Mapping[str, object], role: str = "") -> dict[str, str]:
    """Settings as the variables that a child process reads."""
    return {variable(name, role): str(value) for name, value in values.items()}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process that gets its settings separately, or has none."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def _line(
    error: ErrorDetails, by_path: Mapping[tuple[str, ...], Leaf], role: str, sources: Sources
) -> str:
    leaf = by_path[tuple(str(part) for part in error["loc"])]
    entry = sources.find(leaf.role or role, leaf.name)
    if entry is None:
        return f"{variable(leaf.name)} is not set"
    if leaf.field.annotation is SecretStr:
        return f"{entry.spelled}: it should be a string"
    return f"{entry}: {reason_of(error)}"
