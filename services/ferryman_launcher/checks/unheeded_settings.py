"""Settings that were given for one role of a cluster, and that none of its processes gets.

A cluster has one model, one broker, one host tier for all of its nodes: a process is told of these
by the launcher, whatever its role was given. Nobody must believe that such a value counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ferryman.settings.names import variable
from ferryman.settings.sources import Sources

_LAUNCHER = "the launcher sets it for each process"
_SAY = "give it for the cluster: {flag}, or {variable}"

# By name: the flag of the cluster's own value; empty where it has none.
_OF_CLUSTERS: Mapping[str, str] = {
    "model": "--model",
    "draft": "--draft",
    "lora": "--lora",
    "host_memory": "--host-memory",
    "storage_bytes": "--storage-bytes",
    "http_port": "--http-port",
    "grpc_port": "--grpc-port",
    "nats_url": "--nats-url",
    "redis_url": "--redis-url",
    "tls_dir": "--tls-dir",
    "cluster_key_file": "",
    "credentials_file": "",
    "parent_pid": "",
    "hostcache_address": "",
    "node": "",
}
# Other roles have these for themselves.
_OF_ROLES: Mapping[str, frozenset[str]] = {
    "lora": frozenset({"router"}),
    "host": frozenset({"hostcache"}),
    "port": frozenset({"hostcache"}),
}


def unheeded(sources: Sources, roles: frozenset[str]) -> Iterator[str]:
    """A line for each; `roles` are those of the cluster's processes."""
    for source in sources.sources:
        for (role, name), value in source.values.items():
            if role and role not in roles:
                yield f"{value.spelled} changes nothing: no process of this cluster is a {role}"
            elif role and (why := _reason(role, name)):
                yield f"{value.spelled} changes nothing: {why}"


def _reason(role: str, name: str) -> str:
    """The reason why processes of that role have another value; empty if they have this one."""
    if role not in _OF_ROLES.get(name, (role,)):
        return ""
    if flag := _OF_CLUSTERS.get(name):
        return _SAY.format(flag=flag, variable=variable(name))
    return _LAUNCHER if name in _OF_CLUSTERS or name in _OF_ROLES else ""
