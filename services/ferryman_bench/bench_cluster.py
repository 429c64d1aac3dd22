"""Clusters as `ferryman up` starts them, for the length of a measurement, and their clients."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import clock_gettime
from typing import Any

from ferryman.client import Client
from ferryman.settings.cluster import DoorOptions, UpOptions
from ferryman.settings.engine import EngineOptions
from ferryman_launcher.process_plan import plan_processes
from ferryman_launcher.readiness import ReadyEvent
from ferryman_launcher.state_folder import StateFolder
from ferryman_launcher.supervisor import Supervisor

DRAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """A client of a cluster, and the process of each worker by its id."""

    client: Client
    pids: Mapping[str, int]

    def processor_seconds(self, worker_id: str) -> float:
        """The processor time that a worker has taken since its start, of all threads."""
        # The kernel's clock of another process: clock_getcpuclockid(3).
        return clock_gettime((~self.pids[worker_id] << 3) | 2)


@dataclass(frozen=True, slots=True)
class RunningJobs:
    """Processes that are ready: what each said of itself by its job's name, and its pid."""

    nats_url: str
    said: Mapping[str, ReadyEvent]
    pids: Mapping[str, int]


@asynccontextmanager
async def running_jobs(
    options: UpOptions, folder: Path, without: Collection[str] = ()
) -> AsyncIterator[RunningJobs]:
    """The servers and services of a cluster, ready, with state and logs in `folder`; they end with
    the block. Services `without` are not started."""
    state = StateFolder(folder)
    jobs = plan_processes(options, state)
    supervisor = Supervisor(state, os.environ, say=_ignore_line)
    try:
        await supervisor.start(jobs.servers)
        said = await supervisor.start(job for job in jobs.services if job.name not in without)
        pids = {name: pid for name, pid in supervisor.pids.items() if name in said}
        yield RunningJobs(jobs.nats_url, said, pids)
    finally:
        await supervisor.drain(DRAIN_SECONDS)


@asynccontextmanager
async def bench_cluster(options: UpOptions, folder: Path) -> AsyncIterator[BenchCluster]:
    """A cluster that is ready, with its state and logs in `folder`; it ends with the block."""
    async with (
        running_jobs(options, folder) as jobs,
        Client(jobs.said["router"]["grpc"]) as client,
    ):
        ids = {jobs.said[name].get("worker_id", ""): pid for name, pid in jobs.pids.items()}
        yield BenchCluster(client, ids)


def bench_options(engine: dict[str, Any], **workers: Any) -> UpOptions:
    """The options of a cluster with free ports; `workers` are those of its roles."""
    return UpOptions(
        engine=EngineOptions.model_validate(engine),
        served_name="bench",
        insecure=True,  # a bench orders workers itself
        doors=DoorOptions(http_port=0, grpc_port=0),
        **workers,
    )


def _ignore_line(_line: str) -> None:
    """A process that dies shows up as an error of the calls to it."""
