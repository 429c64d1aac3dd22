"""A cluster that `docker compose` runs, from a copy of the tree, under names of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compose.container_engine import ContainerEngine
from tests.deploy.compose_file import ROOT, SERVERS, SETTINGS

PROJECT = "ferryman-compose-test"
IMAGE = "ferryman:0.1.0"
MINE = f"label=com.docker.compose.project={PROJECT}"
DOORS = ("HTTP", "GRPC", "NATS", "PROMETHEUS")
STAYING = {*SERVERS, *SETTINGS}


@dataclass(frozen=True, slots=True)
class ComposedCluster:
    """`choices` are variables of compose.yaml; ports are on 127.0.0.1."""

    engine: ContainerEngine
    tree: Path
    choices: Mapping[str, str]

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.choices['HTTP_PORT']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.choices['GRPC_PORT']}"

    def compose(self, *words: str) -> str:
        """`docker compose WORDS`, which has to succeed: its output."""
        return self.engine.output("compose", "-p", PROJECT, *words, cwd=self.tree, **self.choices)

    def up(self, *words: str) -> float:
        """`up --wait`, with seconds from its start to the last container's health."""
        begin = time.monotonic()
        self.compose("up", "--wait", *words)
        return time.monotonic() - begin

    def containers(self) -> list[dict[str, Any]]:
        """All that there are, ended ones too: `Name`, `Service`, `State`, `Health`, `ExitCode`."""
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return [json.loads(line) for line in lines]

    def names_of(self, service: str) -> list[str]:
        return sorted(each["Name"] for each in self.containers() if each["Service"] == service)

    def read(self, service: str, path: str) -> str:
        return self.compose("exec", "-T", service, "cat", path).strip()

    def ready_line(self, name: str) -> dict[str, Any]:
        """The last line by which a container said that it is ready."""
        lines = self.engine.output("logs", name).splitlines()
        said = [json.loads(line) for line in lines if line.startswith('{"event": "ready"')]
        return dict(said[-1])

    def stranger(self, program: str, *arguments: str) -> dict[str, Any]:
        """The JSON that a program prints in a container on the same network, without secrets."""
        words = ("--network", f"{PROJECT}_default", IMAGE, "python", "-", *arguments)
        said = self.engine.output("run", "--rm", "-i", *words, stdin=program)
        return dict(json.loads(said))

    def leftovers(self) -> Sequence[str]:
        """Containers, networks and volumes of this project."""
        listed = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        return "".join(self.engine.output(*words, "--filter", MINE) for words in listed).split()


@contextmanager
def composed_cluster(
    engine: ContainerEngine, tree: Path, **choices: str
) -> Iterator[ComposedCluster]:
    """A cluster that is not up yet, and is taken down in the end, with its volumes."""
    ports = {f"{door}_PORT": _free_port() for door in DOORS}
    cluster = ComposedCluster(engine, tree, {**ports, **choices})
    try:
        yield cluster
    finally:
        cluster.compose("down", "--volumes", "--timeout", "5")


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def copy_tree(folder: Path) -> Path:
    """A copy of the files that git knows or would add, as they lie here."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder
