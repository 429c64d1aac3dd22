"""The state folder of a cluster: its logs, its broker's files, and its endpoints.

<state-dir>/cluster.json    endpoints and process ids, while `ferryman up` runs
<state-dir>/cluster.room    holds the room for the next one, which a full disk would not have
<state-dir>/lock            held by that `ferryman up`, with its process id
<state-dir>/cluster.key     the cluster's secret, made once; without it stored state is no use
<state-dir>/credentials    made from the key: those of each role, ROLE.json, and the servers' files
<state-dir>/nats.url       by which people and their tools may listen; redis.url: may read
<state-dir>/metrics.token  by which Prometheus and people may read `/metrics`
<state-dir>/logs/NAME.log   the output of each process
<state-dir>/up.log          the output of a `ferryman up --detach`
<state-dir>/nats, redis     what the embedded servers keep; nats/context: for `nats --context`

A state folder that is made here, and all its contents, are private to its owner.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.security.credentials import ClusterRole
from ferryman.security.credentials_file import write_private_text
from ferryman.security.key_file import FULL_DISK, cannot_write
from ferryman_launcher.folder_lock import held_lock
from ferryman_launcher.write_failures import WriteFailures

DEFAULT = Path(".ferryman")
NATS_URL, REDIS_URL = "nats.url", "redis.url"
METRICS_TOKEN = "metrics.token"
CREDENTIALS = "credentials"
LOGS, UP_LOG, UP = "logs", "up.log", "up"
PRIVATE, PRIVATE_FILE = 0o700, 0o600
RETRY_SECONDS = 5.0
ROOM_BYTES = 64 << 10  # a cluster of a hundred processes takes 16 KiB


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The endpoints of a running cluster. `http` is a URL, `grpc` is host:port; of several routers
    they have all, with commas between. `up_pid` supervises it.

    `name` is the word in its NATS subjects. With TLS `ca` is the file of its authorities. `down`
    has each process that has ended and waits for its next start, with how it ended. `model_files`
    are the stamps that the files in `model_folder` had at the start. `settings` are the variables
    of processes that a simulation of this cluster needs.
    """

    http: str
    grpc: str
    nats: str
    redis: str
    name: str
    model: str
    up_pid: int
    pids: Mapping[str, int] = field(default_factory=dict)
    ca: str = ""
    down: Mapping[str, str] = field(default_factory=dict)
    model_folder: str = ""
    model_files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def http_urls(self) -> tuple[str, ...]:
        """The URL of each router."""
        return tuple(self.http.split(","))


class StateFolder:
    """A state folder that exists. Raises ConfigError when it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            _make_private(self.logs)
        except OSError as error:
            raise cannot_write(f"--state-dir {path}", error) from None

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @property
    def up_log(self) -> Path:
        return self.path / UP_LOG

    @property
    def cluster_file(self) -> Path:
        return _cluster_file(self.path)

    @property
    def key_path(self) -> Path:
        return self.path / "cluster.key"

    def private(self, name: str) -> Path:
        """A folder of this name in here that only its owner can read. Raises ConfigError."""
        try:
            return _make_private(self.path / name)
        except OSError as error:
            raise cannot_write(f"--state-dir {self.path}", error) from None

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def write(self, cluster: RunningCluster) -> None:
        """Readers see the old file or the new one, never a part of one. On a full disk it takes the
        room that the last write has kept. Raises OSError."""
        text = json.dumps(asdict(cluster), indent=1) + "\n"
        try:
            self._replace_cluster_file(text)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            self._room.unlink(missing_ok=True)
            self._replace_cluster_file(text)
        self._keep_room()

    @property
    def _room(self) -> Path:
        return self.path / "cluster.room"

    def _replace_cluster_file(self, text: str) -> None:
        draft = self.path / "cluster.json.new"
        draft.touch(PRIVATE_FILE)  # URLs of a broker or an index may hold a password
        draft.write_text(text)
        draft.replace(self.cluster_file)

    def _keep_room(self) -> None:
        """Takes the room for the next write, as far as there is any."""
        if self._room.exists():
            return
        with suppress(OSError), self._room.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)

    def write_observer_urls(self, nats: str, redis: str) -> None:
        """The URLs for people and their tools, with the observer's password."""
        for name, url in ((NATS_URL, nats), (REDIS_URL, redis)):
            write_private_text(self.path / name, url + "\n")

    def write_metrics_token(self, token: str) -> None:
        """The token that a reader of `/metrics` shows."""
        write_private_text(self.path / METRICS_TOKEN, token)

    def forget(self) -> None:
        """Removes the file of a cluster that has ended, and the room for the next one."""
        for file in (self.cluster_file, self._room):
            file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps others from starting a cluster here; the kernel drops the lock of a process that
        died. Raises ConfigError."""
        with ExitStack() as stack:
            try:
                stack.enter_context(held_lock(self.path, os.getpid()))
            except BlockingIOError:
                raise ConfigError(
                    f"another ferryman up runs in {self.path}; choose another --state-dir"
                ) from None
            except OSError as error:
                raise cannot_write(f"--state-dir {self.path}", error) from None
            yield


def running_cluster(state_dir: Path) -> RunningCluster:
    """The cluster that `ferryman up` started there; ConfigError when none runs."""
    try:
        raw = json.loads(_cluster_file(state_dir).read_text())
        cluster = RunningCluster(**raw)
        os.kill(cluster.up_pid, 0)
    except PermissionError:
        return cluster
    except (OSError, ValueError, TypeError):
        raise ConfigError(
            f"no cluster runs in {state_dir}: start one with `ferryman up`, or say where it is"
            " (--state-dir, --grpc, --nats)"
        ) from None
    return cluster


def down_processes(state_dir: Path) -> Mapping[str, str]:
    """The processes there that wait for their next start, each with how it ended; none if no
    cluster runs."""
    try:
        return running_cluster(state_dir).down
    except ConfigError:
        return {}


def observer_nats_url(state_dir: Path, cluster: RunningCluster) -> str:
    """The broker's URL as an observer may use it; in folders of old versions it has no login."""
    try:
        return (state_dir / NATS_URL).read_text().strip()
    except OSError:
        return cluster.nats


def log_paths(state_dir: Path) -> Mapping[str, Path]:
    """The log of each process by its name; `up` is a detached `ferryman up` itself."""
    paths = {path.stem: path for path in sorted((state_dir / LOGS).glob("*.log"))}
    up_log = state_dir / UP_LOG
    return {**paths, UP: up_log} if up_log.exists() else paths


def credentials_path(state_dir: Path, role: ClusterRole) -> Path:
    """The file with the credentials of a role, if there are any."""
    return state_dir / CREDENTIALS / f"{role.value}.json"


def _make_private(folder: Path) -> Path:
    """Raises OSError."""
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    folder.chmod(PRIVATE)  # a folder of an older version was open
    return folder


def _cluster_file(folder: Path) -> Path:
    return folder / "cluster.json"


class ClusterFileWriter:
    """Keeps `cluster.json` up to date when processes change. A full disk delays it: until it is
    written, commands read the older one."""

    def __init__(
        self,
        folder: StateFolder,
        cluster: Callable[[], RunningCluster],
        failures: WriteFailures,
    ) -> None:
        self._folder, self._cluster, self._failures = folder, cluster, failures
        self._is_due = asyncio.Event()

    def write_first(self) -> None:
        """Writes it before the cluster is announced. Raises ConfigError: a cluster that no command
        can find is of little use, and no client depends on it yet."""
        try:
            self._folder.write(self._cluster())
        except OSError as error:
            raise cannot_write(f"--state-dir {self._folder.path}", error) from None

    def changed(self) -> None:
        """Something in the file is no longer true."""
        self._is_due.set()

    async def run(self) -> None:
        """Writes after each change, for ever."""
        while True:
            await self._is_due.wait()
            # Cleared before the write, which has all that changed until then.
            self._is_due.clear()
            if not self._is_written():
                await asyncio.sleep(RETRY_SECONDS)
                self._is_due.set()

    def _is_written(self) -> bool:
        try:
            self._folder.write(self._cluster())
        except OSError as error:
            self._failures.failed(self._folder.cluster_file, error)
            return False
        self._failures.written(self._folder.cluster_file)
        return True
