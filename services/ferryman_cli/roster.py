"""From choices to the processes of a cluster: which, with which settings, in which order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.runtime.embedded import ServerCommand, free_port, nats_command, redis_command
from ferryman.runtime.settings import as_environment
from ferryman_cli.child import Job, ready_event, ready_words
from ferryman_cli.choices import Choices
from ferryman_cli.leash import leashed
from ferryman_cli.state_folder import StateFolder

ROUTER, WORKERS, HOST_CACHE, SERVERS = range(4)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Roster:
    """All processes of a cluster: the servers are there before any service starts."""

    servers: tuple[Job, ...]
    services: tuple[Job, ...]
    nats_url: str
    redis_url: str


def roster(choices: Choices, folder: StateFolder) -> Roster:
    """Addresses that others must know are fixed here, so that a restart keeps them."""
    servers, nats_url, redis_url = [], choices.nats_url, choices.redis_url
    if not nats_url:
        command = nats_command(folder.path / "nats")
        servers.append(_server(command, folder))
        nats_url = command.url
    if not redis_url:
        command = redis_command(folder.path / "redis")
        servers.append(_server(command, folder))
        redis_url = command.url
    services = _Services(choices, folder.path, nats_url, redis_url, _nodes(choices)).all()
    return Roster(tuple(servers), services, nats_url, redis_url)


def _nodes(choices: Choices) -> tuple[_Node, ...]:
    return tuple(_Node(name, f"{LOOPBACK}:{free_port()}") for name in choices.tiers.nodes())


def _server(command: ServerCommand, folder: StateFolder) -> Job:
    (folder.path / command.name).mkdir(exist_ok=True)
    argv = leashed(command.argv, os.getpid())
    return Job(command.name, argv, SERVERS, ready_words(command.ready))


@dataclass(frozen=True, slots=True)
class _Node:
    """One host-cache and whoever uses it; `address` is where it will listen."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class _Services:
    choices: Choices
    state_folder: Path
    nats_url: str
    redis_url: str
    nodes: tuple[_Node, ...]

    def all(self) -> tuple[Job, ...]:
        choices = self.choices
        caches = zip(names("hostcache", len(self.nodes)), self.nodes, strict=True)
        return (
            *(self._job(name, "hostcache", HOST_CACHE, self._host_cache(n)) for name, n in caches),
            *self._workers("prefill", choices.num_prefill, choices.prefill_tp),
            *self._workers("decode", choices.num_decode, choices.decode_tp),
            self._job("router", "router", ROUTER, self._router()),
        )

    def _workers(self, role: str, number: int, tp_size: int) -> Iterator[Job]:
        """Dealt out over the nodes."""
        for i, name in enumerate(names(role, number)):
            yield self._worker(role, name, self.nodes[i % len(self.nodes)], tp_size)

    def _worker(self, role: str, name: str, node: _Node, tp_size: int) -> Job:
        engine, tiers = self.choices.engine, self.choices.tiers
        worker = {
            "model": self.choices.model.absolute(),
            "dtype": engine.dtype,
            "page_size": engine.page_size,
            "chunk_tokens": engine.chunk_tokens,
            "max_running": engine.max_running,
            "memory_bytes": engine.memory_bytes,
            "num_threads": self.choices.threads,
            "snapshot_grid": engine.snapshot_grid,
            "draft": engine.drafts_by,
            "draft_tokens": engine.draft_tokens,
            "tp_size": tp_size,
        }
        host = {
            "address": node.address,
            "write_policy": tiers.write_policy,
            "prefetch_policy": tiers.prefetch_policy,
            "prefetch_threshold": tiers.prefetch_threshold,
        }
        settings = {"worker": worker, "hostcache": host}
        return self._job(name, role, WORKERS, settings, self.choices.threads)

    def _host_cache(self, node: _Node) -> Mapping[str, Any]:
        tiers = self.choices.tiers
        host, _, port = node.address.rpartition(":")
        settings = {
            "listen": {"host": host, "port": port},
            "node": node.name,
            "memory_bytes": tiers.arena_bytes,
            "write_policy": tiers.write_policy,
            "prefetch_policy": tiers.prefetch_policy,
            "prefetch_threshold": tiers.prefetch_threshold,
            "index": {"url": self.redis_url},
        }
        if folder := tiers.storage_folder(self.state_folder, node.name):
            settings["storage"] = {"folder": folder, "capacity_bytes": tiers.node_storage_bytes}
        return settings

    def _router(self) -> Mapping[str, Any]:
        doors = self.choices.doors
        return {
            "model": self.choices.model.absolute(),
            "served_name": self.choices.served_name,
            "http": {"host": doors.host, "port": doors.http_port},
            "grpc": {"host": doors.host, "port": doors.grpc_port},
            "index": {"url": self.redis_url},
        }

    def _job(
        self, name: str, role: str, drain_rank: int, own: Mapping[str, Any], threads: int = 1
    ) -> Job:
        settings = {
            **own,
            "bus": {"url": self.nats_url, "cluster": self.choices.cluster},
            "life": {
                "parent_pid": os.getpid(),
                "drain_seconds": self.choices.drain_seconds,
                "log_level": self.choices.log_level,
            },
        }
        environment = {
            **as_environment(f"FERRYMAN_{role.upper()}_", settings),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
        argv = (sys.executable, "-m", f"ferryman_{role}")
        return Job(name, argv, drain_rank, ready_event, environment)


def names(role: str, number: int) -> list[str]:
    """`prefill`; of several `prefill-1`, `prefill-2`, …"""
    return [role] if number == 1 else [f"{role}-{i}" for i in range(1, number + 1)]
