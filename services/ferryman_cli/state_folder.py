"""The state folder of a cluster: its logs, its broker's files, and where it can be reached.

<state-dir>/cluster.json    endpoints and process ids, while `ferryman up` runs
<state-dir>/lock            held by that `ferryman up`
<state-dir>/logs/NAME.log   what each process says
<state-dir>/nats, redis     what the embedded servers keep
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ferryman.errors import ConfigError

DEFAULT = Path(".ferryman")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a running cluster is. `http` is a URL, `grpc` is host:port; `up_pid` watches over it.

    `name` is the word in its NATS subjects.
    """

    http: str
    grpc: str
    nats: str
    redis: str
    name: str
    model: str
    up_pid: int
    pids: Mapping[str, int] = field(default_factory=dict)


class StateFolder:
    """A state folder that exists. ConfigError when it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def write(self, cluster: Cluster) -> None:
        """Readers see the old file or the new one, never half of one."""
        draft = self.path / "cluster.json.new"
        draft.write_text(json.dumps(asdict(cluster), indent=1) + "\n")
        draft.replace(_cluster_file(self.path))

    def forget(self) -> None:
        """The cluster is no more."""
        _cluster_file(self.path).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else starts a cluster here; the kernel drops the lock of a process that died."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another ferryman up runs in {self.path}; choose another --state-dir"
                ) from None
            yield


def running_cluster(state_dir: Path) -> Cluster:
    """The cluster that `ferryman up` started there; ConfigError when none runs."""
    try:
        raw = json.loads(_cluster_file(state_dir).read_text())
        cluster = Cluster(**raw)
        os.kill(cluster.up_pid, 0)
    except PermissionError:
        return cluster
    except (OSError, ValueError, TypeError):
        raise ConfigError(
            f"no cluster runs in {state_dir}: start one with `ferryman up`, or say where it is"
            " (--state-dir, --grpc, --nats)"
        ) from None
    return cluster


def _cluster_file(folder: Path) -> Path:
    return folder / "cluster.json"
