"""Plans the processes of a cluster from its options: their settings and their order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.errors import ConfigError
from ferryman.runtime.embedded import ServerCommand, free_ports, nats_command
from ferryman.runtime.parent import with_parent
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.key_file import make_key_file, read_key_file
from ferryman.settings.cluster import (
    DEFAULT_STORAGE_BYTES,
    DoorPorts,
    UpOptions,
    WorkerRole,
    usable_cores,
)
from ferryman.settings.groups import TierPolicySettings
from ferryman.settings.sources import as_environment, flat_values
from ferryman_launcher.child import ChildSpec
from ferryman_launcher.cluster_locks import (
    ClusterLocks,
    locked_cluster,
    open_cluster,
    write_nats_context,
)
from ferryman_launcher.readiness import ready_event, ready_words
from ferryman_launcher.state_folder import CREDENTIALS, StateFolder

ROUTER, WORKERS, HOST_CACHE, SERVERS = range(4)
LOOPBACK = "127.0.0.1"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
NO_WORKER = "requests wait, and get 503 if it stays away"
ABSENCES = {
    "router": "callers cannot connect",
    "prefill": NO_WORKER,
    "decode": NO_WORKER,
    "both": NO_WORKER,
    "hostcache": "requests are answered, and compute what it held",
    "nats": "answers go on, and routers keep what they last knew of workers",
    "redis": "requests are answered, and reuse what their own node holds",
}
"""The effect on callers while no process of a role is ready."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """All processes of a cluster: the servers are ready before any service starts. `credentials`
    are the files of all roles, which no process asks for in an open cluster; `locks` has the
    rest."""

    servers: tuple[ChildSpec, ...]
    services: tuple[ChildSpec, ...]
    nats_url: str
    redis_url: str
    credentials: Mapping[ClusterRole, Path]
    locks: ClusterLocks


def plan_processes(choices: UpOptions, folder: StateFolder) -> ProcessPlan:
    """Fixes the addresses that other processes must know, so that a restart keeps them."""
    servers, nats_url, redis_url = [], choices.nats_url, choices.redis_url
    make_key_file(folder.key_path)
    locks, nodes = _locks(choices, folder), choices.tiers.nodes()
    nats_port, redis_port, *node_ports = free_ports(2 + len(nodes))
    if not nats_url:
        command = nats_command(
            folder.path / "nats", nats_port, locks.nats_config, locks.nats_scheme
        )
        servers.append(_server(command, folder))
        nats_url = command.url
    if redis_url:
        index_url, observer_redis = locks.foreign_redis(redis_url), redis_url
    else:
        command = locks.own_redis(folder.path / "redis", redis_port)
        servers.append(_server(command, folder))
        redis_url = index_url = command.url
        observer_redis = locks.observer_redis(redis_url)
    observer_nats = locks.observer_nats(nats_url)
    folder.write_observer_urls(observer_nats, observer_redis)
    described = f"Cluster {choices.cluster} of Ferryman, to observe"
    write_nats_context(folder.private("nats"), observer_nats, described, locks.ca)
    placed = tuple(
        _Node(name, f"{LOOPBACK}:{port}") for name, port in zip(nodes, node_ports, strict=True)
    )
    services = _Services(choices, folder, nats_url, index_url, placed, locks).all()
    return ProcessPlan(tuple(servers), services, nats_url, redis_url, locks.credentials, locks)


def _locks(choices: UpOptions, folder: StateFolder) -> ClusterLocks:
    key, private = read_key_file(folder.key_path), folder.private(CREDENTIALS)
    folder.write_metrics_token(credentials_of(key, ClusterRole.OBSERVER).grpc_token)
    if choices.insecure:
        if choices.tls_dir:
            raise ConfigError("--tls-dir: certificates are for those who ask; drop --insecure")
        return open_cluster(private, key)
    tls_dir = Path(choices.tls_dir).absolute() if choices.tls_dir else None
    return locked_cluster(private, key, choices.cluster, tls_dir)


def _server(command: ServerCommand, folder: StateFolder) -> ChildSpec:
    folder.private(command.name)
    argv = with_parent(command.argv, os.getpid())
    return ChildSpec(
        command.name,
        argv,
        SERVERS,
        ready_words(command.ready),
        absence=ABSENCES[command.name],
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """One host-cache and its workers; `address` is where it will listen."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class _Services:
    choices: UpOptions
    folder: StateFolder
    nats_url: str
    redis_url: str
    nodes: tuple[_Node, ...]
    locks: ClusterLocks

    def all(self) -> tuple[ChildSpec, ...]:
        choices = self.choices
        caches = zip(names("hostcache", len(self.nodes)), self.nodes, strict=True)
        return (
            *(self._host_cache(name, node) for name, node in caches),
            *(worker for role in choices.roles for worker in self._workers(role)),
            *self._routers(),
        )

    def _workers(self, workers: WorkerRole) -> Iterator[ChildSpec]:
        """Distributes the workers over the nodes."""
        for i, name in enumerate(names(workers.role, workers.number)):
            yield self._worker(workers.role, name, self.nodes[i % len(self.nodes)], workers.tp_size)

    def _worker(self, role: str, name: str, node: _Node, tp_size: int) -> ChildSpec:
        choices, engine = self.choices, self.choices.engine
        chosen = {
            **flat_values(engine),
            **self._policies(),
            "num_threads": choices.threads,
            "planes": choices.planes,
        }
        fixed = {
            "model": engine.model.absolute(),
            "draft": choices.draft_model or engine.draft,
            "tp_size": tp_size,
            "hostcache_address": node.address,
        }
        return self._job(name, role, WORKERS, chosen, fixed)

    def _host_cache(self, name: str, node: _Node) -> ChildSpec:
        tiers = self.choices.tiers
        host, _, port = node.address.rpartition(":")
        fixed = {
            "host": host,
            "port": port,
            "node": node.name,
            "cluster_key_file": self.folder.key_path,
            "host_memory": tiers.arena_bytes,
            "redis_url": self.redis_url,
        }
        settings = self.choices.told.get("hostcache", {})
        # A folder given for host-caches alone, by FERRYMAN_HOSTCACHE_STORAGE_DIR, is theirs.
        is_theirs = "storage_dir" in settings and not tiers.storage_dir
        if tiers.has_storage and not is_theirs:
            fixed["storage_dir"] = tiers.storage_folder(self.folder.path, node.name)
            fixed["storage_bytes"] = tiers.node_storage_bytes
        elif not tiers.has_storage and "storage_dir" not in settings:
            # For a host-cache the folder says whether there is a tier; no size is 0.
            fixed["storage_bytes"] = DEFAULT_STORAGE_BYTES
        return self._job(name, "hostcache", HOST_CACHE, self._policies(), fixed)

    def _routers(self) -> Iterator[ChildSpec]:
        doors = self.choices.doors
        for name, ports in zip(names("router", doors.num_routers), doors.ports, strict=True):
            yield self._router(name, ports)

    def _router(self, name: str, ports: DoorPorts) -> ChildSpec:
        doors = self.choices.doors
        fixed = {
            "model": self.choices.engine.model.absolute(),
            "served_name": self.choices.served_name,
            "lora": self.choices.engine.lora,
            "tool_parser": self.choices.tool_parser,
            "reasoning_parser": self.choices.reasoning_parser,
            "cluster_key_file": self.folder.key_path,
            "host": doors.host,
            "cors_origin": doors.cors_origin,
            "strict_fields": doors.strict_fields,
            "default_max_tokens": doors.default_max_tokens,
            "verbatim_prompts": doors.verbatim_prompts,
            "web_page": doors.web_page,
            "state_signers": doors.state_signers,
            "http_port": ports.http,
            "grpc_port": ports.grpc,
            "redis_url": self.redis_url,
        }
        return self._job(name, "router", ROUTER, {}, fixed)

    def _policies(self) -> Mapping[str, Any]:
        values = flat_values(self.choices.tiers)
        return {name: values[name] for name in TierPolicySettings.model_fields}

    def _job(
        self,
        name: str,
        role: str,
        drain_rank: int,
        chosen: Mapping[str, Any],
        fixed: Mapping[str, Any],
    ) -> ChildSpec:
        """A setting given for a role replaces one in `chosen`, but not one in `fixed`."""
        choices = self.choices
        # A later value replaces an earlier one, so the launcher's own come last.
        settings = {
            "cluster": choices.cluster,
            "drain_seconds": choices.drain_seconds,
            "log_level": choices.log_level,
            **flat_values(choices.traced),
            **chosen,
            **choices.told.get(role, {}),
            **fixed,
            **self.locks.settings_of(role),
            "nats_url": self.nats_url,
            "parent_pid": os.getpid(),
        }
        environment = {
            **as_environment(settings, role),
            "OMP_NUM_THREADS": str(settings.get("num_threads", 1)),
            "PYTHONUNBUFFERED": "1",
        }
        argv = (sys.executable, "-m", f"ferryman_{role}")
        return ChildSpec(
            name,
            argv,
            drain_rank,
            ready_event,
            environment,
            role=role,
            defaults=waiting(choices),
            absence=ABSENCES[role],
        )


def waiting(choices: UpOptions) -> Mapping[str, str]:
    """The way in which a worker's idle threads wait, if all workers have more threads than cores.

    OpenMP's threads spin between two products, for milliseconds, and take the core from a thread
    that has work: docs/operating.md has the figures. A library reads this when loaded.
    """
    return PASSIVE if choices.all_threads > usable_cores() else {}


def names(role: str, number: int) -> list[str]:
    """`prefill`; for several `prefill-1`, `prefill-2`, …"""
    return [role] if number == 1 else [f"{role}-{i}" for i in range(1, number + 1)]
