"""Settings as a person gives them: a file, variables and flags, to commands and to services.

A command that imports takes two seconds, so one of each kind has a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves
from ferryman_cli.app import run

CONFIG = "ferryman.toml"
TOLD = """
cluster = "of-the-file"
page_size = 32
max_running = 5
api_keys = "from-the-file"

[decode]
max_running = 3
workers = 2
"""


def ran(folder: Path, module: str, *arguments: str, **variables: str) -> Any:
    """Runs a command in a folder, with no variables of ours but `variables`; returns its result."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("FERRYMAN_")}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**around, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@dataclass(frozen=True, slots=True)
class EndedCommand:
    """A command that has run in this process, with the names of a process that has ended."""

    returncode: int
    stdout: str
    stderr: str


def called(folder: Path, *arguments: str, **variables: str) -> EndedCommand:
    """Runs a command of `ferryman` in a folder as `ran` does, but in this process."""
    output, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("FERRYMAN_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        status = run(arguments)
    return EndedCommand(status, output.getvalue(), errors.getvalue())


def shown(
    folder: Path, *arguments: str, **variables: str
) -> dict[tuple[str, str], tuple[str, str]]:
    """Value and origin of each setting by table and name."""
    done = called(folder, "config", "--show", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return listed(done.stdout)


def listed(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Value and origin by table and name, as `ferryman config --show` lists them."""
    tomllib.loads(text)
    found, table = {}, ""
    for line in filter(None, text.splitlines()):
        if head := re.fullmatch(r"\[(\w+)\]", line):
            table = head[1]
            continue
        name, _, rest = line.partition(" = ")
        value, _, origin = rest.rpartition("  # ")
        found[table, name] = value, origin
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).write_text(TOLD)
    return tmp_path


def test_every_value_is_shown_with_where_it_comes_from(folder: Path) -> None:
    variables = {"FERRYMAN_MAX_RUNNING": "6", "FERRYMAN_CLUSTER": "of-the-environment"}
    flags = "--config", CONFIG, "--cluster", "of-the-flag"
    done = ran(folder, "ferryman_cli", "config", "--show", *flags, **variables)
    assert done.returncode == 0, done.stderr
    found = listed(done.stdout)
    assert found["", "cluster"] == ('"of-the-flag"', "flag --cluster")
    assert found["", "max_running"] == ("6", "environment FERRYMAN_MAX_RUNNING")
    assert found["", "page_size"] == ("32", f"file {CONFIG}: page_size")
    assert found["", "chunk_tokens"] == ("512", "derived")
    assert found["", "dtype"] == ('"float32"', "derived"), "the demo model's"
    assert found["", "device"][1] == "derived"
    for role in ("prefill", "decode"):
        value, origin = found[role, "memory_bytes"]
        assert origin == "derived"
        assert int(value) > 0
    assert found["", "served_name"] == ('"ferryman-demo"', "derived")
    assert found["decode", "workers"] == ("2", f"file {CONFIG}: decode.workers")
    assert found["prefill", "workers"] == ("1", "default")
    assert ("prefill", "max_running") not in found, "as for all"


def test_a_value_for_one_role_is_shown_there(folder: Path) -> None:
    found = shown(folder, FERRYMAN_CONFIG=CONFIG)
    assert found["", "max_running"] == ("5", f"file {CONFIG}: max_running")
    assert found["decode", "max_running"] == ("3", f"file {CONFIG}: decode.max_running")


def test_the_address_of_the_doors_is_shown_for_the_router_alone(folder: Path) -> None:
    found = shown(folder, FERRYMAN_HOST="0.0.0.0", FERRYMAN_HOSTCACHE_HOST="::1")
    assert found["router", "host"] == ('"0.0.0.0"', "environment FERRYMAN_HOST")
    assert found["decode", "host"] == ('"127.0.0.1"', "default")
    assert found["hostcache", "host"] == ('"::1"', "environment FERRYMAN_HOSTCACHE_HOST")


def test_secrets_are_masked(folder: Path) -> None:
    done = called(folder, "config", "--show", "--config", CONFIG)
    assert "from-the-file" not in done.stdout + done.stderr
    assert f'api_keys = "**********"  # file {CONFIG}: api_keys' in done.stdout
    done = called(folder, "config", "--show", FERRYMAN_API_KEYS="of-the-environment")
    assert "of-the-environment" not in done.stdout + done.stderr
    (folder / CONFIG).write_text('api_keys = ["in-a-list"]')
    done = called(folder, "config", "--config", CONFIG)
    assert done.returncode == 2
    assert done.stderr == f"error: {CONFIG}: api_keys: it should be a string\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            "page_sise = 16", "page_sise is no setting; did you mean page_size?", id="unknown key"
        ),
        pytest.param(
            "[decode]\nworker = 2",
            "decode.worker is no setting; did you mean workers?",
            id="unknown key of a role",
        ),
        pytest.param(
            "page_size = 'many'",
            "page_size='many': should be a valid integer, unable to parse string as an integer",
            id="wrong type",
        ),
        pytest.param("page_size = 24", "page_size=24: should be a power of two", id="wrong value"),
        pytest.param(
            "max_queued = 0",
            "max_queued=0: should be greater than or equal to 1",
            id="wrong value for a service",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_status_2(folder: Path, text: str, line: str) -> None:
    (folder / CONFIG).write_text(text)
    done = called(folder, "up", "--config", CONFIG)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {CONFIG}: {line}\n"


def test_two_mistakes_are_two_lines(folder: Path) -> None:
    (folder / CONFIG).write_text("pge_size = 2")
    done = ran(folder, "ferryman_cli", "up", "--config", CONFIG, "--page-size", "24")
    assert done.stderr.splitlines() == [
        "error: --page-size 24: should be a power of two",
        f"error: {CONFIG}: pge_size is no setting; did you mean page_size?",
    ]


def test_a_variable_that_is_no_setting_is_told_by_up(folder: Path) -> None:
    done = called(folder, "up", FERRYMAN_PREFILL_WORKER__PAGE_SIZE="16")
    assert done.returncode == 2
    assert done.stderr == (
        "error: FERRYMAN_PREFILL_WORKER__PAGE_SIZE is no setting; did you mean "
        "FERRYMAN_PAGE_SIZE?\n"
    )


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "hostcache"])
def test_a_service_takes_what_it_has_from_the_same_file(folder: Path, role: str) -> None:
    """It says what it lacks, and what it has no use for is no mistake."""
    (folder / CONFIG).write_text(TOLD + "[router]\nhttp_port = -1\n[hostcache]\nport = -1\n")
    done = ran(folder, f"ferryman_{role}", FERRYMAN_CONFIG=CONFIG)
    assert done.returncode == 2
    own = {"router": "router.http_port", "hostcache": "hostcache.port"}.get(role, "")
    assert ("-1: should be" in done.stderr) == bool(own)
    assert own in done.stderr
    lacking = "FERRYMAN_CLUSTER_KEY_FILE" if role == "hostcache" else "FERRYMAN_MODEL"
    assert f"error: {lacking} is not set\n" in done.stderr


def test_every_setting_of_a_cluster_is_a_flag_of_up(tmp_path: Path) -> None:
    said = called(tmp_path, "up", "--help").stdout
    assert [leaf.flag for leaf in leaves(UpOptions) if f"  {leaf.flag}" not in said] == []
