"""Commands that compute nothing start without what computes: no torch, no compilers, no oracle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "numba", "triton", "transformers", "huggingface_hub")
LISTS_MODULES = f"""
import sys
from ferryman_cli.app import run
status = run(sys.argv[1:])
print(status, *(name for name in {SLOW!r} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        pytest.param(["--help"], 0, id="help"),
        pytest.param(["--version"], 0, id="version"),
        pytest.param(["trace", "some-id"], 2, id="trace without a cluster"),
        pytest.param(["explain", "some-id"], 2, id="explain without a cluster"),
        pytest.param(["events"], 2, id="events without a cluster"),
        pytest.param(["up", "--model", "/nope"], 2, id="up with a model that is not there"),
        pytest.param(["simulate", "--help"], 0, id="the simulator's flags"),
        pytest.param(["bench", "--help"], 0, id="the bench's flags"),
    ],
)
def test_a_command_that_computes_nothing_imports_nothing_that_computes(
    arguments: list[str], status: int, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LISTS_MODULES, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == str(status), ended.stderr


def test_a_worker_on_the_processor_imports_no_compiler_for_cards() -> None:
    script = "import ferryman_decode.service, sys; print('triton' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.strip() == "False", ended.stderr


def test_the_check_of_an_up_imports_no_compiler() -> None:
    script = """
import sys
from ferryman_launcher.checks.option_checks import check
from ferryman_launcher.options import up_options, up_sources
check(up_options(up_sources({}, {})))
print(any(name in sys.modules for name in ("torch._dynamo", "sympy")))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.strip() == "False", ended.stderr
