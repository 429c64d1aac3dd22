"""`ferryman up` as people start it: a process with the real servers and the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from tests.waiting import wait_until

from ferryman.security.credentials import ClusterRole, RoleCredentials
from ferryman.security.credentials_file import read_credentials
from ferryman_launcher.state_folder import METRICS_TOKEN, credentials_path, running_cluster

SMALL = ("--memory-bytes", "67108864", "--host-memory", "32M", "--max-running", "8")
API_KEY = "sk-for-the-router-alone"


@dataclass(frozen=True)
class EndedUp:
    """The exit status of `ferryman up`, and what it wrote after its ready line."""

    status: int
    stdout: str
    stderr: str


@dataclass
class Up:
    """A `ferryman up --json` that runs: its folder, and what it said when it was ready."""

    process: subprocess.Popen[str]
    state_dir: Path
    errors: IO[str]
    said: dict[str, Any] = field(default_factory=dict)

    def await_ready(self) -> None:
        """Reads the line that says where the doors are; fails if the process ends before it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended before it was ready: {self.stderr()}"
        self.said = json.loads(line)

    def stderr(self) -> str:
        """All that it has written so far.

        The process writes where this file stands, so reading must not move that.
        """
        descriptor = self.errors.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def await_said(self, *lines: str) -> None:
        """Waits until it has written each of these."""
        wait_until(lambda: all(line in self.stderr() for line in lines), str(lines), seconds=90)

    def end(self, sig: int = signal.SIGINT) -> EndedUp:
        """Signals it to end, and waits for that."""
        self.process.send_signal(sig)
        out, _ = self.process.communicate(timeout=120)
        return EndedUp(self.process.returncode, out, self.stderr())

    @property
    def pids(self) -> dict[str, int]:
        """The id of each process, as cluster.json has it."""
        return dict(running_cluster(self.state_dir).pids)

    @property
    def doors(self) -> list[str]:
        """The URL of each router."""
        return str(self.said["http"]).split(",")

    @property
    def arena(self) -> Path:
        for line in self.log("hostcache").splitlines():
            if line.startswith('{"event": "ready"'):
                return Path(json.loads(line)["arena"])
        raise AssertionError("the host-cache never said where its arena is")

    @property
    def as_observer(self) -> dict[str, str]:
        """The header of a caller that may read numbers."""
        token = (self.state_dir / METRICS_TOKEN).read_text()
        return {"authorization": f"Bearer {token}"}

    def credentials(self, role: ClusterRole) -> RoleCredentials:
        """The credentials in a role's file."""
        return read_credentials(credentials_path(self.state_dir, role))

    def log(self, name: str) -> str:
        """All that a process has said."""
        return (self.state_dir / "logs" / f"{name}.log").read_text()

    def readiness(self) -> dict[str, Any]:
        """The answer of the first router's `/ready` to an observer."""
        answer = httpx.get(f"{self.doors[0]}/ready", headers=self.as_observer, timeout=120)
        body: dict[str, Any] = answer.json()
        return body

    def complete(
        self,
        request_id: str,
        prompt: str = "The red box is in the",
        max_tokens: int = 6,
        router: int = 0,
    ) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.doors[router]}/v1/completions",
            json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
            headers={"x-request-id": request_id, "authorization": f"Bearer {API_KEY}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def kill(self, name: str) -> int:
        """Kills a process; returns its id, which the next one of that name has not."""
        pid = self.pids[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def await_return(self, name: str, before: int) -> None:
        """Waits until cluster.json has the id of the next process of that name."""
        wait_until(lambda: self.pids[name] != before, f"the return of {name}", seconds=90)

    def is_gone(self, pids: dict[str, int]) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def name_of(pid: int) -> str:
    """A process's name as `ps -o comm` shows it: a forked service has its own."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def up_command(state_dir: Path, *arguments: str) -> tuple[str, ...]:
    """The command line, with free ports unless the arguments name some."""
    folder = ("--state-dir", str(state_dir))
    ports = ("--http-port", "0", "--grpc-port", "0")
    return (sys.executable, "-m", "ferryman_cli", "up", *folder, *ports, *arguments)


@contextmanager
def starting(state_dir: Path, *arguments: str, **variables: str) -> Iterator[Up]:
    """A cluster that has just been begun; killed, if the block leaves it running.

    It is SMALL but for what `arguments` say; `variables` are those of its environment.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            up_command(state_dir, "--json", *SMALL, *arguments),
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                yield Up(process, state_dir, errors)
            finally:
                process.kill()
                process.wait()


@contextmanager
def up(state_dir: Path, *arguments: str, **variables: str) -> Iterator[Up]:
    """A cluster that is ready; killed, if the block leaves it running."""
    with starting(state_dir, *arguments, **variables) as cluster:
        cluster.await_ready()
        yield cluster
