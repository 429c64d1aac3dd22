"""Checks of the processes that a state folder names: down, stopped, short of files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from ferryman_cli.doctor.fault_report import DoctorFinding
from ferryman_cli.doctor.machine import limit_findings
from ferryman_cli.running.status import ProcessStatus, process_status
from ferryman_launcher.readiness import ready_status
from ferryman_launcher.state_folder import RunningCluster

TRIES = 3


def process_findings(cluster: RunningCluster) -> Iterator[DoctorFinding]:
    """The state of each, as `/proc` has it."""
    for name, pid in cluster.pids.items():
        status = process_status(name, pid, cluster.down)
        if status.is_well:
            yield from _files_of(status)
        elif status.state.startswith("stopped"):
            yield DoctorFinding(
                "stopped",
                f"{name} (process {pid}) is stopped by a signal: it lives, and does nothing",
                f"kill -CONT {pid}",
            )
        else:
            yield DoctorFinding(
                "down",
                f"{name} {status.state}; it is started again, later each time",
                f"ferryman logs {name} says why",
            )


def _files_of(status: ProcessStatus) -> Iterator[DoctorFinding]:
    try:
        soft, _ = resource.prlimit(status.pid, resource.RLIMIT_NOFILE)
        yield from limit_findings(soft, f"{status.name} (process {status.pid})")
    except OSError:
        return  # of another user, or it has ended just now


def door_findings(cluster: RunningCluster) -> Iterator[DoctorFinding]:
    """Whether each router takes requests."""
    for url in cluster.http_urls:
        # A busy machine may be late once.
        asked = (ready_status(url.partition("//")[2], cluster.ca) for _ in range(TRIES))
        status = next(filter(None, asked), 0)
        if not status:
            yield DoctorFinding(
                "door-away",
                f"the router at {url} does not answer",
                "ferryman status shows whether its process runs; curl -i URL/ready asks it",
            )
        elif status != HTTPStatus.OK:
            yield DoctorFinding(
                "not-ready",
                f"the router at {url} takes no requests: it knows no worker of some role",
                f"curl {url}/ready says which; ferryman top shows the workers",
            )


def arena_findings(path: str) -> Iterator[DoctorFinding]:
    """The file of a host-cache on this machine, which workers map."""
    try:
        with Path(path).open("rb"):
            return
    except OSError as error:
        yield DoctorFinding(
            "arena",
            f"the host-cache's memory {path} cannot be read ({error.strerror}): a worker that"
            " starts now has no host tier",
            "ferryman roll --even-last, which begins it anew; look for what cleans /dev/shm",
        )
