"""`ferryman status`: a cluster of this machine on one screen, from its state folder and `/proc`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ferryman.errors import ConfigError, NotFound
from ferryman.settings.declaration import size_text
from ferryman_launcher.folder_lock import holder_of
from ferryman_launcher.readiness import ready_status
from ferryman_launcher.state_folder import RunningCluster, running_cluster

STOPPED = ("T", "t")
HOUR, MINUTE = 3600, 60


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process. `state` is `running`, `stopped` by a signal, or how it ended; `seconds` is its
    age and `num_bytes` its memory, 0 for one that is down."""

    name: str
    pid: int
    state: str
    seconds: float = 0.0
    num_bytes: int = 0

    @property
    def is_well(self) -> bool:
        return self.state == "running"


def process_status(name: str, pid: int, down: Mapping[str, str]) -> ProcessStatus:
    """A process that the cluster's file names; `down` says how others ended."""
    if name in down:
        return ProcessStatus(name, pid, down[name])
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return ProcessStatus(name, pid, "has ended")
    state, began = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if state == "Z":
        return ProcessStatus(name, pid, "has ended")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    num_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    words = "stopped by a signal" if state in STOPPED else "running"
    return ProcessStatus(name, pid, words, seconds, num_bytes)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster: its processes, and for each router whether it is ready for requests."""

    cluster: RunningCluster
    processes: tuple[ProcessStatus, ...]
    ready: Mapping[str, bool]

    @property
    def is_well(self) -> bool:
        return all(process.is_well for process in self.processes) and all(self.ready.values())


def cluster_status(state_dir: Path) -> ClusterStatus:
    """Raises NotFound where no cluster runs, or one that starts has no endpoints yet."""
    try:
        cluster = running_cluster(state_dir)
    except ConfigError:
        if holder_of(state_dir):
            raise NotFound(f"the cluster in {state_dir} is starting: `ferryman logs -f`") from None
        raise NotFound(f"no cluster runs in {state_dir}: `ferryman up` starts one") from None
    processes = tuple(process_status(name, pid, cluster.down) for name, pid in cluster.pids.items())
    ready = {
        url: ready_status(url.partition("//")[2], cluster.ca) == HTTPStatus.OK
        for url in cluster.http_urls
    }
    return ClusterStatus(cluster, processes, ready)


def run_status(state_dir: Path, *, as_json: bool) -> int:
    """Prints it; returns 0 if all processes run and all routers are ready, else 1."""
    status = cluster_status(state_dir)
    if as_json:
        print(json.dumps(_as_object(status)))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for line in _lines(status, state_dir):
            console.print(line, markup=False)
        console.print(_table(status.processes))
    return 0 if status.is_well else 1


def _as_object(status: ClusterStatus) -> Mapping[str, object]:
    cluster = status.cluster
    return {
        "is_well": status.is_well,
        "model": cluster.model,
        "cluster": cluster.name,
        "up_pid": cluster.up_pid,
        "http": cluster.http,
        "grpc": cluster.grpc,
        "nats": cluster.nats,
        "redis": cluster.redis,
        "ready": dict(status.ready),
        "processes": [asdict(process) for process in status.processes],
    }


def _lines(status: ClusterStatus, state_dir: Path) -> Iterator[str]:
    cluster = status.cluster
    words = "all is well" if status.is_well else "NOT all is well"
    yield f"{cluster.model} in {state_dir}: {words} (`ferryman up` is process {cluster.up_pid})"
    for url, is_ready in status.ready.items():
        yield f"  HTTP   {url}/v1  {'ready' if is_ready else 'NOT ready: `ferryman doctor`'}"
    yield f"  gRPC   {cluster.grpc}"
    yield f"  NATS   {cluster.nats}"
    yield f"  Redis  {cluster.redis}"


def _table(processes: tuple[ProcessStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("process", "pid", "for", "memory", "state"):
        table.add_column(name, justify="right" if name in ("pid", "for", "memory") else "left")
    for process in processes:
        is_there = bool(process.num_bytes)
        table.add_row(
            process.name,
            str(process.pid),
            age_text(process.seconds) if is_there else "-",
            size_text(process.num_bytes) if is_there else "-",
            process.state,
        )
    return table


def age_text(seconds: float) -> str:
    """`2h05m`, `5m12s` or `12s`."""
    whole = int(seconds)
    if whole >= HOUR:
        return f"{whole // HOUR}h{whole % HOUR // MINUTE:02}m"
    return f"{whole // MINUTE}m{whole % MINUTE:02}s" if whole >= MINUTE else f"{whole}s"
