"""The names of settings from outside, and the processes that have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves, nearest
from ferryman.settings.hostcache import HostCacheServiceSettings
from ferryman.settings.router import RouterSettings
from ferryman.settings.workers import BothSettings, DecodeSettings, PrefillSettings

Key = tuple[str, str]
"""The role that a value is for (empty: all of them), and the setting's name."""

SERVICES: Mapping[str, type[BaseModel]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "both": BothSettings,
    "hostcache": HostCacheServiceSettings,
}
# Of commands: the key of a tenant that asks, and the file itself.
OF_COMMANDS = frozenset({"api_key", "config"})
PREFIX = "FERRYMAN_"
# These say how much tests try; a service that a test starts ignores them.
FOR_TESTS = f"{PREFIX}TEST_"

_OF_CLUSTERS = {(leaf.role, leaf.name) for leaf in leaves(UpOptions)}
_NAMES = {
    role: frozenset(leaf.name for leaf in leaves(kind))
    | {name for of, name in _OF_CLUSTERS if of == role}
    for role, kind in SERVICES.items()
}
KNOWN = OF_COMMANDS.union({name for of, name in _OF_CLUSTERS if not of}, *_NAMES.values())


def names_of(role: str) -> frozenset[str]:
    """The settings that can be given for this role alone; none for a word that is no role."""
    return _NAMES.get(role, frozenset())


def variable(name: str, role: str = "") -> str:
    """The environment variable of a setting, for all roles or for one."""
    return f"{PREFIX}{role.upper()}_{name.upper()}" if role else PREFIX + name.upper()


def variables_in(environment: Iterable[str]) -> Iterator[str]:
    """The variables that name settings; those for tests are none."""
    return (
        name for name in environment if name.startswith(PREFIX) and not name.startswith(FOR_TESTS)
    )


def key_of(name: str) -> Key | None:
    """Role and name as a variable joins them; None for a name that is no setting."""
    if name in KNOWN:
        return "", name
    role, _, rest = name.partition("_")
    return (role, rest) if rest in names_of(role) else None


def nearest_variable(name: str) -> str:
    """The setting with the most similar name, by its name or by its place in the models.

    Names once were made of groups (`BUS__URL`); so the old ones are found.
    """
    role, _, rest = name.partition("_")
    roles, rest = ([role], rest) if role in SERVICES else (list(SERVICES), name)
    meant = {setting: setting for setting in KNOWN}
    meant |= {
        "_".join(leaf.path): leaf.name for service in roles for leaf in leaves(SERVICES[service])
    }
    near = nearest(rest.replace("__", "_"), meant)
    return variable(meant[near]) if near else ""
