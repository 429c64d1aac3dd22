"""The settings that a simulation knows, and the values that are tried for each.

All else that a cluster has is named with the reason why a simulation cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ferryman.errors import ConfigError
from ferryman.settings.declaration import size_text
from ferryman.settings.names import Key, key_of
from ferryman_simulator.what_if.served_settings import (
    SOMEWHERE,
    STORAGE_BYTES,
    STORAGE_DIR,
    ServedSettings,
)

WORKERS, NODE = ("prefill", "decode"), ("hostcache",)
ALL = (*WORKERS, *NODE)
GRID_PAGES = (32, 128)
SIZES = ("host_memory", "memory_bytes", STORAGE_BYTES)


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting with another value, as text. `key` has a role, or none: all that have it."""

    key: Key
    before: str
    text: str

    @property
    def name(self) -> str:
        return "_".join(filter(None, self.key))

    def assignments(self) -> Mapping[Key, str]:
        """The values by role and name."""
        role, name = self.key
        roles = (role,) if role else TUNABLE[name].roles
        values = {(of, name): self.text for of in roles}
        if name == STORAGE_BYTES:
            values[("hostcache", STORAGE_DIR)] = SOMEWHERE
        return values


@dataclass(frozen=True, slots=True)
class Ladder:
    """Values to try for one setting, each expected to gain at least what the one before it gains;
    or a single choice."""

    changes: tuple[SettingChange, ...]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A setting of these roles. `ladders` are texts of values to try, from the value there is and
    all settings of the cluster. `is_for_each` role a value of its own is tried."""

    roles: tuple[str, ...]
    ladders: Callable[[object, ServedSettings], Sequence[Sequence[str]]]
    is_for_each: bool = False


def _larger(*factors: int) -> Callable[[object, ServedSettings], Sequence[Sequence[str]]]:
    def sizes(value: object, _: ServedSettings) -> Sequence[Sequence[str]]:
        assert isinstance(value, int)
        return ([exact_size(value * factor) for factor in factors],)

    return sizes


def _doubled(value: object, _: ServedSettings) -> Sequence[Sequence[str]]:
    assert isinstance(value, int)
    return ([str(2 * value)],)


def _one_of(*words: str) -> Callable[[object, ServedSettings], Sequence[Sequence[str]]]:
    return lambda value, _: [[word] for word in words if word != str(value)]


def _storage(_: object, served: ServedSettings) -> Sequence[Sequence[str]]:
    size = served.storage_bytes or served.hostcache.memory_bytes
    return ([exact_size(size * factor) for factor in (4, 16)],)


def _grid(value: object, served: ServedSettings) -> Sequence[Sequence[str]]:
    page_size = served.prefill.worker.page_size
    return [["0"]] if value else [[str(pages * page_size)] for pages in GRID_PAGES]


def _halved_types(value: object, _: ServedSettings) -> Sequence[Sequence[str]]:
    return [["bfloat16"]] if value in ("float32", "float64") else []


def _untried(_: object, __: ServedSettings) -> Sequence[Sequence[str]]:
    return ()


TUNABLE: Mapping[str, Tunable] = MappingProxyType(
    {
        "host_memory": Tunable(NODE, _larger(2, 4, 16)),
        "memory_bytes": Tunable(WORKERS, _larger(2, 4), is_for_each=True),
        STORAGE_BYTES: Tunable(NODE, _storage),
        "snapshot_grid": Tunable(WORKERS, _grid),
        "kv_dtype": Tunable(WORKERS, _one_of("fp8")),
        "dtype": Tunable(WORKERS, _halved_types),
        "snapshot_share": Tunable(NODE, _one_of("0.25", "0.75")),
        "write_policy": Tunable(ALL, _one_of("write_through")),
        "prefetch_policy": Tunable(ALL, _one_of("wait_complete")),
        "max_running": Tunable(WORKERS, _doubled, is_for_each=True),
        "chunk_tokens": Tunable(WORKERS, _doubled),
        "prefetch_threshold": Tunable(ALL, _untried),
        "recurrent_slots": Tunable(WORKERS, _untried, is_for_each=True),
        "max_reserved": Tunable(("decode",), _untried),
        "overlap": Tunable(WORKERS, _untried),
        "page_size": Tunable(WORKERS, _untried),
    }
)

_ONE_WORKER = "a simulation has one worker of each role, with the memory and the pace of all"
_ONE_TOKEN = "a simulation draws one token a step"
_NO_DEVICE = "a simulation has the pace that the log measured, and no device"
UNKNOWN: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("draft", "draft_tokens"), _ONE_TOKEN),
        **dict.fromkeys(("workers", "nodes", "worker"), _ONE_WORKER),
        **dict.fromkeys(
            ("device", "tp_size", "quantize", "num_threads", "replay_steps"), _NO_DEVICE
        ),
        "audit_share": "a simulation computes nothing again",
        "planes": "hand-offs take the time that was guessed for a byte",
    }
)


def exact_size(num_bytes: int) -> str:
    """A size as people write it, if that has all its digits; else in bytes."""
    text = size_text(num_bytes)
    return str(num_bytes) if "." in text else text


def parse_change(text: str, served: ServedSettings) -> SettingChange:
    """A change from `NAME=VALUE`. NAME is a setting as a variable, a flag or the file has it.
    Raises ConfigError for a setting that no simulation knows, saying why."""
    spelled, separator, value = text.partition("=")
    name = spelled.strip().lower().removeprefix("ferryman_").removeprefix("--").replace("-", "_")
    key = key_of(name)
    if key is None or not separator or not value:
        raise ConfigError(f"--with {text}: it should be SETTING=VALUE, such as host_memory=64G")
    role, setting = key
    if setting not in TUNABLE:
        why = UNKNOWN.get(setting, "nothing of a simulation depends on it")
        raise ConfigError(f"--with {setting}: {why}; it knows {', '.join(TUNABLE)}")
    if role and role not in TUNABLE[setting].roles:
        raise ConfigError(f"--with {text}: {setting} is simulated for {_roles(setting)} alone")
    before = value_text(served, role or TUNABLE[setting].roles[0], setting)
    return SettingChange(key, before, value.strip())


def _roles(setting: str) -> str:
    return " and ".join(TUNABLE[setting].roles)


def value_text(served: ServedSettings, role: str, name: str) -> str:
    """The value that a cluster has, as `--with` takes it."""
    value = served.storage_bytes if name == STORAGE_BYTES else served.value(role, name)
    return exact_size(value) if name in SIZES else str(value)


def ladders(served: ServedSettings) -> list[Ladder]:
    """The values to try, in the order of what they often gain."""
    return [
        Ladder(tuple(SettingChange(key, value_text(served, role, name), text) for text in texts))
        for name, tunable in TUNABLE.items()
        for role, key in _keys(name, tunable)
        for texts in tunable.ladders(served.value(role, name), served)
        if texts
    ]


def _keys(name: str, tunable: Tunable) -> list[tuple[str, Key]]:
    """A role that has the value, and the key under which it is changed."""
    if tunable.is_for_each:
        return [(role, (role, name)) for role in tunable.roles]
    return [(tunable.roles[0], ("", name))]
