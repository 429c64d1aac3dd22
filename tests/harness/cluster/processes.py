"""The processes of a cluster over a broker and an index that run already."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from tests.cluster_keys import KEY, key_file_in
from tests.harness.cluster.service import Service
from tests.harness.cluster.shape import PAGE_SIZE, ClusterShape
from tests.harness.forked_services import start_service
from tests.waiting import wait_until

from ferryman.runtime.embedded import free_ports
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import write_all_credentials
from ferryman.settings.sources import as_environment

NO_SETTINGS: Mapping[str, Any] = {}
WORKERS = ("prefill", "decode", "both")


class ServiceProcesses:
    """The processes of one cluster, each started, found, counted and stopped by its role."""

    def __init__(
        self, model: Path, folder: Path, shape: ClusterShape, nats: str, redis: str
    ) -> None:
        self.model, self.folder, self.shape = model, folder, shape
        self.nats, self.redis = nats, redis
        self.key_file = key_file_in(folder)
        self.credentials = write_all_credentials(folder, KEY)
        self.hostcache_ports = free_ports(shape.num_nodes)
        self.services: list[Service] = []

    def start(self, role: str, node: int = 0, settings: Mapping[str, Any] = NO_SETTINGS) -> Service:
        """A process of this role on a node; `settings` for this one alone come on top."""
        log = self.folder / f"{role}-{len(self.services)}.log"
        of_shape = {**self._settings(role, node), **self.shape.settings.get(role, {})}
        environment = {
            **os.environ,
            **as_environment({**of_shape, **settings}, role),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as stderr:
            process = start_service(f"ferryman_{role}", environment, stderr)
        service = Service(role, process, log, node)
        self.services.append(service)
        return service

    def storage_folder(self, node: int = 0) -> Path:
        """Where the host-cache of a node keeps its storage tier."""
        return self.folder / f"storage-{node}"

    @property
    def redis_of_services(self) -> str:
        """Its Redis has no users but the default one."""
        return self.redis.replace("redis://", "redis://default@")

    def _settings(self, role: str, node: int) -> dict[str, Any]:
        common: dict[str, Any] = {
            "nats_url": self.nats,
            "credentials_file": self.credentials[ClusterRole(role)],
            "parent_pid": os.getpid(),
            "drain_seconds": 20,
            "lookup_seconds": self.shape.patience_seconds,
        }
        if role == "hostcache":
            return {**common, **self._hostcache(node)}
        if role == "router":
            return {
                **common,
                "http_port": 0,
                "grpc_port": 0,
                "redis_url": self.redis_of_services,
                "cluster_key_file": self.key_file,
                "model": self.model,
                "served_name": "tiny",
            }
        return {
            **common,
            "model": self.model,
            "dtype": self.shape.dtype,
            "page_size": PAGE_SIZE,
            "chunk_tokens": self.shape.chunk_tokens,
            "max_running": self.shape.max_running,
            "memory_bytes": self.shape.memory_bytes,
            "overlap": self.shape.overlap,
            "num_threads": 1,
            "hostcache_address": f"127.0.0.1:{self.hostcache_ports[node]}",
        }

    def _hostcache(self, node: int) -> dict[str, Any]:
        mine: dict[str, Any] = {
            "port": self.hostcache_ports[node],
            "redis_url": self.redis_of_services,
            "host_memory": 32 << 20,
            "node": f"node-{node}",
            "cluster_key_file": self.key_file,
        }
        if self.shape.has_storage:
            mine["storage_dir"] = self.storage_folder(node)
        return mine

    def of_role(self, role: str) -> list[Service]:
        """Those that run."""
        alive = [service for service in self.services if service.process.poll() is None]
        return [service for service in alive if service.role == role]

    def hostcache(self, node: int = 0) -> Service:
        """The host-cache of a node, which runs."""
        (one,) = (service for service in self.of_role("hostcache") if service.node == node)
        return one

    @property
    def http(self) -> str:
        return f"http://{self.of_role('router')[0].ready['http']}"

    @property
    def grpc(self) -> str:
        return str(self.of_role("router")[0].ready["grpc"])

    def await_workers(self, **wanted: int) -> None:
        """Waits until the router counts the wanted number of workers of each role."""

        def counts() -> bool:
            with suppress(httpx.HTTPError):
                answer = self.of_role("router")[0].read("/ready").json()
                return all(answer["workers"].get(role, 0) == n for role, n in wanted.items())
            return False

        wait_until(counts, f"workers {wanted}")

    def await_routers(self, number: int) -> None:
        """Until so many routers run, and each is ready."""
        routers = self.of_role("router")
        assert len(routers) == number
        wait_until(
            lambda: all(one.read("/ready").status_code == 200 for one in routers),
            f"{number} routers",
            seconds=90,
        )

    def await_attached(self) -> None:
        """Until every worker maps its node's arena."""
        wait_until(lambda: all(map(self._is_attached, self.of_role("hostcache"))), "attachment")

    def _is_attached(self, hostcache: Service) -> bool:
        workers = [worker for role in WORKERS for worker in self.of_role(role)]
        wanted = sum(worker.node == hostcache.node for worker in workers)
        return f"ferryman_hostcache_store_workers {wanted}.0" in hostcache.metrics()

    def assert_ledgers_balance(self) -> None:
        """Waits until only the prefix trees hold slots."""
        workers = [worker for role in WORKERS for worker in self.of_role(role)]

        def all_quiet() -> bool:
            ledgers = [one for worker in workers for one in worker.ledger().values()]
            return all(one["balances"] and set(one["by_role"]) <= {"tree"} for one in ledgers)

        wait_until(all_quiet, "ledgers to balance", lambda: [w.ledger() for w in workers])

    def stop(self) -> None:
        for role in ("router", *WORKERS, "hostcache"):
            for service in self.of_role(role):
                service.process.send_signal(signal.SIGTERM)
        for service in self.services:
            try:
                service.process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                service.kill()
            assert service.process.stdout is not None
            service.process.stdout.close()
