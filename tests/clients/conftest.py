"""A cluster as people start it, `ferryman up` with the demo model, for the tests of a client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL = ("--memory-bytes", "67108864", "--host-memory", "32M", "--max-running", "8")


@pytest.fixture(scope="package")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """OpenAI's `base_url` of a running cluster, one for all clients."""
    folder: Path = tmp_path_factory.mktemp("up")
    command = [sys.executable, "-m", "ferryman_cli", "up", "--json", *SMALL]
    ports = ["--http-port", "0", "--grpc-port", "0", "--state-dir", str(folder)]
    log = (folder / "up.log").open("w")
    with (
        log,
        subprocess.Popen(
            [*command, *ports], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield f"{_ready(process, folder)}/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


def _ready(process: subprocess.Popen[str], folder: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        said = json.loads(line)
        if said.get("event") == "ready":
            return str(said["http"])
    raise AssertionError((folder / "up.log").read_text()[-3000:])
