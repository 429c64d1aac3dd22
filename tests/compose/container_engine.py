"""The container engine that the tests run on: the one of this machine, or one that they start."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

START_SECONDS = 120
COMMAND_SECONDS = 1200


class NoEngineError(Exception):
    """There is no engine here, and none can be started; the message says why."""


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """`environment` leads the docker command to it. A `private` one is gone with the tests, so it
    may have stand-ins under the names of others' images."""

    environment: Mapping[str, str]
    private: bool

    def run(
        self, *words: str, cwd: Path | None = None, stdin: str = "", **more: str
    ) -> subprocess.CompletedProcess[str]:
        """`docker WORDS`, however it ends; `more` are variables of its environment."""
        return subprocess.run(
            ["docker", *words],
            cwd=cwd,
            env={**self.environment, **more},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    def output(self, *words: str, cwd: Path | None = None, stdin: str = "", **more: str) -> str:
        """`docker WORDS`, which has to succeed: its output."""
        ended = self.run(*words, cwd=cwd, stdin=stdin, **more)
        assert ended.returncode == 0, f"docker {words}:\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


@contextmanager
def container_engine() -> Iterator[ContainerEngine]:
    """Raises NoEngineError."""
    if shutil.which("docker") is None:
        raise NoEngineError("there is no command `docker`")
    found = ContainerEngine(dict(os.environ), private=False)
    if found.run("compose", "version").returncode:
        raise NoEngineError("docker has no `compose` (version 2)")
    if found.run("info").returncode == 0:
        yield found
        return
    if os.geteuid() or shutil.which("dockerd") is None:
        raise NoEngineError("no engine runs, and only root with dockerd can start one")
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir="/var/tmp"))
    try:
        with _daemon(folder) as engine:
            yield engine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _daemon(folder: Path) -> Iterator[ContainerEngine]:
    socket = f"unix://{folder}/docker.sock"
    options = (
        *("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
        *("--pidfile", f"{folder}/pid", "--host", socket),
        # Its containers reach each other and this machine, which is all they need.
        *("--iptables=false", "--ip-forward=false"),
    )
    engine = ContainerEngine({**os.environ, "DOCKER_HOST": socket}, private=True)
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(["dockerd", *options], stdout=file, stderr=file)
    try:
        wait_until(
            lambda: process.poll() is not None or engine.run("info").returncode == 0,
            "the engine",
            log.read_text,
            seconds=START_SECONDS,
        )
        if process.poll() is not None:
            raise NoEngineError(f"dockerd does not start: {_last_line(log)}")
        yield engine
    finally:
        process.terminate()
        process.wait(START_SECONDS)
        # It leaves its network namespace mounted, and a folder with a mount cannot be removed.
        namespace = str(folder / "exec" / "netns" / "default")
        subprocess.run(["umount", namespace], capture_output=True, check=False)


def _last_line(log: Path) -> str:
    lines: Sequence[str] = log.read_text().splitlines()
    return lines[-1] if lines else "it says nothing"
