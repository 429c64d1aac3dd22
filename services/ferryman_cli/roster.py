"""From choices to the processes of a cluster: which, with which settings, in which order."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
    services = _Services(choices, nats_url, redis_url, f"{LOOPBACK}:{free_port()}").all()
    return Roster(tuple(servers), services, nats_url, redis_url)


def _server(command: ServerCommand, folder: StateFolder) -> Job:
    (folder.path / command.name).mkdir(exist_ok=True)
    argv = leashed(command.argv, os.getpid())
    return Job(command.name, argv, SERVERS, ready_words(command.ready))


@dataclass(frozen=True, slots=True)
class _Services:
    choices: Choices
    nats_url: str
    redis_url: str
    host_cache: str

    def all(self) -> tuple[Job, ...]:
        choices = self.choices
        return (
            self._job("hostcache", "hostcache", HOST_CACHE, self._host_cache()),
            *(self._worker("prefill", name) for name in names("prefill", choices.num_prefill)),
            *(self._worker("decode", name) for name in names("decode", choices.num_decode)),
            self._job("router", "router", ROUTER, self._router()),
        )

    def _worker(self, role: str, name: str) -> Job:
        engine = self.choices.engine
        worker = {
            "model": self.choices.model.absolute(),
            "dtype": engine.dtype,
            "page_size": engine.page_size,
            "chunk_tokens": engine.chunk_tokens,
            "max_running": engine.max_running,
            "memory_bytes": engine.memory_bytes,
            "num_threads": self.choices.threads,
        }
        settings = {"worker": worker, "hostcache": {"address": self.host_cache}}
        return self._job(name, role, WORKERS, settings, self.choices.threads)

    def _host_cache(self) -> Mapping[str, Any]:
        host, _, port = self.host_cache.rpartition(":")
        return {
            "listen": {"host": host, "port": port},
            "memory_bytes": self.choices.arena_bytes,
            "index": {"url": self.redis_url},
        }

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
