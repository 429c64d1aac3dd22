"""A copy of the tree in which a defect is planted and tests run; the original is never written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PACKAGE_FOLDERS = ("services", "shared", "kernels", ".")
NOT_COPIED = (".git", ".venv", ".ferryman", ".*_cache", ".hypothesis", "dist", "wheels")
# A defect shows when code runs. These errors show that the planted text is not code at all.
NOT_A_FAILURE = (
    "SyntaxError:",
    "IndentationError:",
    "NameError:",
    "ImportError:",
    "ModuleNotFoundError:",
    "collection failure",
)
WORDS_SHOWN = 600


@dataclass(frozen=True, slots=True)
class PytestRun:
    """The end of one pytest process. `is_failure`: a test ran, and failed as tests are meant to."""

    is_success: bool
    is_failure: bool
    detail: str


class Plantable(Protocol):
    """A change of one file's text."""

    @property
    def file(self) -> str: ...

    def planted_in(self, text: str) -> str: ...


class TreeCopy:
    """A copy of the tree at `source` in the folder `root`, which must not be used otherwise."""

    def __init__(self, source: Path, root: Path) -> None:
        self._root = root
        # Times are copied too, so compiled files remain valid.
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(source, root, dirs_exist_ok=True, ignore=ignored)

    @contextmanager
    def planted(self, mutant: Plantable) -> Iterator[None]:
        """Plants the defect in the copy for the length of a block."""
        path = self._root / mutant.file
        text, times = path.read_text(), path.stat()
        path.write_text(mutant.planted_in(text))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[str], seconds: float) -> PytestRun:
        """Runs the tests in a new process until one fails or `seconds` have passed."""
        report = self._root / "report.xml"
        report.unlink(missing_ok=True)
        # An example that failed for one mutant must not help to catch the next.
        shutil.rmtree(self._root / ".hypothesis", ignore_errors=True)
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--hypothesis-seed=0"]
        status, output = _run([*pytest, f"--junitxml={report}", *tests], self._root, seconds)
        if status is None:
            return PytestRun(False, False, f"no end after {seconds:.0f} s")
        if status == 1 and report.exists():
            return _failed_run(ET.parse(report).getroot())
        return PytestRun(status == 0, False, output.strip()[-WORDS_SHOWN:])


def _failed_run(report: ET.Element) -> PytestRun:
    """The result when pytest exits with "tests failed": whether a test failed, and its message."""
    found = [*report.iter("failure"), *report.iter("error")]
    message = (found[0].get("message") or "").strip() if found else "no failure is reported"
    is_failure = bool(found) and not any(words in message for words in NOT_A_FAILURE)
    return PytestRun(False, is_failure, message[:WORDS_SHOWN])


def _run(command: list[str], root: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status, or None after `seconds`, and output. All child processes end with it."""
    # Processes started by tests import the copy too, not the installed original.
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in PACKAGE_FOLDERS),
        # Python would take a planted file's bytecode for the original's if size and second agree.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
