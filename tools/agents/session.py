"""One agent's session: two questions about a file, each answered by way of a tool."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tools.agents.guide import AgentGuide
from tools.agents.scripted_model import ANSWER, WORD

NUM_QUESTIONS = 2
_SECONDS = 240.0
_TIMED_OUT = 124
_LAST_CHARS = 2_000
_DONE = re.compile(r"request done id=\S+ prompt=(\d+) cached=(\d+)")


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """The lengths of a request that an agent sent, in tokens."""

    prompt_len: int
    cached_len: int


@dataclass(frozen=True, slots=True)
class SessionResult:
    """An agent's exit status, its right answers, the last that it printed, and its requests."""

    status: int
    num_right: int
    last_words: str
    requests: tuple[AgentRequest, ...]

    @property
    def is_right(self) -> bool:
        """Whether each question was answered, and each in two requests: a call and an answer."""
        enough = len(self.requests) >= 2 * NUM_QUESTIONS
        return self.status == 0 and self.num_right == NUM_QUESTIONS and enough


def run_session(
    guide: AgentGuide, path: str, node_modules: Path, folder: Path, router_log: Path
) -> SessionResult:
    """Runs an agent in `folder`, its home, with the file that it is asked about.

    Its commands are found on `path`.
    """
    home, workspace = folder / "home", folder / "work"
    home.mkdir(parents=True)
    workspace.mkdir()
    (workspace / "node_modules").symlink_to(node_modules)
    (workspace / "note.txt").write_text(f"{WORD}\n")
    guide.write_files(home, workspace)
    num_before = len(_served(router_log))
    status, text, errors = _output(guide.commands, home, workspace, path)
    last_words = (errors + text)[-_LAST_CHARS:]
    requests = tuple(_served(router_log)[num_before:])
    return SessionResult(status, text.count(ANSWER), last_words, requests)


def _output(commands: str, home: Path, workspace: Path, path: str) -> tuple[int, str, str]:
    """The exit status of a shell, and what it prints, and to its errors.

    Nothing of this process's environment but the path reaches it, so no key of its user does. A
    server that it leaves running is ended with it.
    """
    with TemporaryFile() as text, TemporaryFile() as errors:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", commands],
            cwd=workspace,
            env={"HOME": str(home), "PATH": f"{path}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = shell.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            status = _TIMED_OUT
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        return status, _printed(text), _printed(errors)


def _printed(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _served(router_log: Path) -> list[AgentRequest]:
    """The requests that the router has answered so far."""
    lines = _DONE.findall(router_log.read_text())
    return [AgentRequest(int(prompt), int(cached)) for prompt, cached in lines]
