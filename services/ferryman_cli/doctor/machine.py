"""Checks of this machine: limits of a process, room on disks, memory, ports, files with secrets."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.security.cluster_key import ClusterKey
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import read_credentials
from ferryman.security.key_file import read_key_file
from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import size_text
from ferryman_cli.doctor.fault_report import DoctorFinding
from ferryman_launcher.checks.model_places import EVERYTHING_HERE, ModelPlaces
from ferryman_launcher.state_folder import (
    CREDENTIALS,
    NATS_URL,
    REDIS_URL,
    StateFolder,
    credentials_path,
)

# A router holds a file for each stream of a client, a worker for each of its peers.
LEAST_OPEN_FILES = 1024
LEAST_FREE_BYTES = 64 << 20
OTHERS = 0o077


def limit_findings(soft: int | None = None, whose: str = "this shell") -> Iterator[DoctorFinding]:
    """The limit of open files of a process, by default of this one, as its children have it."""
    number = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    if number != resource.RLIM_INFINITY and number < LEAST_OPEN_FILES:
        yield DoctorFinding(
            "open-files",
            f"{whose} may open {number} files, and a router needs one for each stream",
            f"ulimit -n {max(65536, LEAST_OPEN_FILES)}, then start the process again",
        )


def disk_findings(folders: Iterable[Path]) -> Iterator[DoctorFinding]:
    """The room for logs, the broker's files and stored state. A folder that is yet to be made has
    its parent's."""
    for folder in dict.fromkeys(folders):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        free = shutil.disk_usage(there).free
        if free < LEAST_FREE_BYTES:
            yield DoctorFinding(
                "disk",
                f"{folder} has {size_text(free)} left, and {size_text(LEAST_FREE_BYTES)} are the"
                " least for logs and stored state",
                f"df -h {there}, then free room, or choose another --state-dir or --storage-dir",
            )


def secret_findings(state_dir: Path) -> Iterator[DoctorFinding]:
    """Files of the state folder that others of this machine may read, and credentials that are not
    of its key."""
    key_file = StateFolder(state_dir).key_path
    yield from _readable_secrets(state_dir, key_file)
    try:
        key = read_key_file(key_file) if key_file.exists() else None
    except ConfigError as error:
        yield DoctorFinding(
            "cluster-key",
            str(error),
            f"bring back {key_file}, without which stored"
            " state is no use; or remove it, and `ferryman up` makes a new one",
        )
        return
    if key is not None:
        yield from _credential_findings(state_dir, key_file, key)


def _readable_secrets(state_dir: Path, key_file: Path) -> Iterator[DoctorFinding]:
    private = [key_file, state_dir / NATS_URL, state_dir / REDIS_URL]
    for path in (*private, *sorted((state_dir / CREDENTIALS).glob("*.json"))):
        if path.exists() and (mode := path.stat().st_mode & 0o777) & OTHERS:
            yield DoctorFinding(
                "secret-file",
                f"{path} holds secrets, and others of this machine may use it (mode {mode:o})",
                f"chmod 600 {path}",
            )


def _credential_findings(
    state_dir: Path, key_file: Path, key: ClusterKey
) -> Iterator[DoctorFinding]:
    for role in ClusterRole:
        path = credentials_path(state_dir, role)
        try:
            if path.exists() and read_credentials(path) == credentials_of(key, role):
                continue
            if not path.exists():
                continue
            why = "they are of another cluster's key"
        except ConfigError as error:
            why = str(error)
        yield DoctorFinding(
            "credentials",
            f"{path}: {why}",
            f"ferryman credentials {path.parent} --key {key_file}",
        )


def port_findings(options: UpOptions) -> Iterator[DoctorFinding]:
    """The ports of the routers that a start would open."""
    from ferryman_launcher.checks.option_checks import check_doors

    try:
        check_doors(options.doors)
    except ConfigError as error:
        yield DoctorFinding(
            "port", str(error), "ss -ltnp shows who has it; or --http-port 0 --grpc-port 0"
        )


def memory_findings(
    options: UpOptions, places: ModelPlaces = EVERYTHING_HERE
) -> Iterator[DoctorFinding]:
    """The memory that a start would plan."""
    from ferryman_launcher.checks.cluster_memory import plan_memory

    try:
        plan_memory(options, places)
    except ConfigError as error:
        text, _, would = str(error).rpartition("; ")
        yield DoctorFinding("memory", text or would, would if text else "ferryman fit")
    asked, room = options.tiers.host_bytes, _shared_memory_room()
    if asked > room:
        yield DoctorFinding(
            "shared-memory",
            f"--host-memory {size_text(asked)}: /dev/shm has room for {size_text(room)}",
            f"--host-memory {size_text(room // 2)}, or mount -o remount,size={size_text(2 * asked)}"
            " /dev/shm",
        )


def _shared_memory_room() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0
