"""Sessions of agents: what a shell says, and that it leaves nothing running."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

import pytest
from tools.agents.guide import AgentGuide
from tools.agents.scripted_model import ANSWER
from tools.agents.session import SessionResult, run_session

from tools.agents import session

LINE = "INFO request done id=req-1 prompt=8 cached=4 tokens=2"


def _ran(commands: str, folder: Path) -> SessionResult:
    log = folder / "router.log"
    log.write_text("")
    guide = AgentGuide({}, commands.replace("LOG", str(log)))
    return run_session(guide, "/usr/bin", folder, folder / "session", log)


def test_a_session_is_right_if_both_answers_took_a_call(tmp_path: Path) -> None:
    asked = f"echo '{LINE}' >> LOG; echo '{LINE}' >> LOG; echo '{ANSWER}'\n"
    done = _ran(asked * 2, tmp_path)
    assert done.is_right
    assert [(request.prompt_len, request.cached_len) for request in done.requests] == [(8, 4)] * 4


@pytest.mark.parametrize("status", [0, 3])
def test_a_server_that_was_started_is_ended_with_the_session(status: int, tmp_path: Path) -> None:
    """It holds what the session prints to, so it must not be waited for."""
    done = _ran(f"sleep 600 &\necho $! > pid\necho '{ANSWER}'\nexit {status}", tmp_path)
    assert (done.status, done.num_right) == (status, 1)
    _assert_ended(int((tmp_path / "session" / "work" / "pid").read_text()))


def test_a_session_that_takes_too_long_is_ended_and_shows_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_SECONDS", 1.0)
    done = _ran("echo begun\nsleep 600 &\necho $! > pid\nwait", tmp_path)
    assert (done.status, done.last_words) == (124, "begun\n")
    _assert_ended(int((tmp_path / "session" / "work" / "pid").read_text()))


def _assert_ended(pid: int) -> None:
    """The process is gone, or soon is: it was killed."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], 10)[0]
        os.close(process)
