"""Shells complete commands, flags, choices, and names in a state folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman_launcher.state_folder import StateFolder

# Loads what `ferryman` gives bash to load, and asks bash for its completion of a line.
ASK_BASH = """
source <(_FERRYMAN_COMPLETE=source_bash ferryman)
read -r _ _ _ _ function _ <<< "$(complete -p ferryman)"
"$function" ferryman
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder whose decode worker was started twice, with a `ferryman` beside it."""
    program = tmp_path / "bin" / "ferryman"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ferryman_cli "$@"\n')
    program.chmod(0o755)
    state = StateFolder(tmp_path / ".ferryman")
    ready = '{"event": "ready", "worker_id": "decode-%s"}\n'
    state.log_path("decode").write_text(ready % "old" + "a line\n" + ready % "new")
    state.log_path("router").write_text('{"event": "ready", "worker_id": "router-a"}\n')
    state.log_path("redis").write_text("Ready to accept connections\n")
    return tmp_path


def asked(folder: Path, program: str, *arguments: str, **variables: str) -> list[str]:
    """The words that a program prints, with our `ferryman` before others."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    around = {name: text for name, text in os.environ.items() if not name.startswith("FERRYMAN_")}
    done = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={**around, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def completed(folder: Path, line: str) -> list[str]:
    """The words that bash offers for the last word of a line, which may be empty."""
    words = line.split(" ")
    quoted = " ".join(map(shlex.quote, words))
    script = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n{ASK_BASH}"
    return asked(folder, "bash", "--norc", "-c", script)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("ferryman tr", ["trace"], id="a command"),
        pytest.param("ferryman bench co", ["compare", "colocated"], id="a command of a command"),
        pytest.param("ferryman explain --js", ["--json"], id="a flag"),
        pytest.param("ferryman up --write-p", ["--write-policy"], id="a flag of a setting"),
        pytest.param("ferryman up --write-policy write_b", ["write_back"], id="a choice"),
        pytest.param("ferryman logs r", ["redis", "router"], id="a log"),
        pytest.param("ferryman drain ", ["decode-new", "router-a"], id="a process that runs"),
        pytest.param("ferryman drain --state-dir none ", [], id="a folder of no cluster"),
    ],
)
def test_bash_completes(folder: Path, line: str, words: list[str]) -> None:
    assert completed(folder, line) == words


def test_a_state_folder_of_the_environment_counts(folder: Path, tmp_path: Path) -> None:
    StateFolder(tmp_path / "other").log_path("prefill").write_text("")
    variables = {
        "_FERRYMAN_COMPLETE": "complete_bash",
        "COMP_WORDS": "ferryman logs ",
        "COMP_CWORD": "2",
        "FERRYMAN_STATE_DIR": str(tmp_path / "other"),
    }
    assert asked(folder, "ferryman", **variables) == ["prefill"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_and_words(folder: Path, shell: str) -> None:
    script = asked(folder, "ferryman", _FERRYMAN_COMPLETE=f"source_{shell}")
    assert f"_FERRYMAN_COMPLETE=complete_{shell}" in script
    variables = {
        "_FERRYMAN_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "ferryman logs rou",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert "router" in " ".join(asked(folder, "ferryman", **variables))
