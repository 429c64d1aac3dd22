"""The tests of one fork, and the end of all processes that they left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

WORDS_SHOWN = 300


def end_strays(folder: str) -> None:
    """Ends the servers that a fork's tests started in sessions of their own: all have its TMPDIR.

    A fork that is ended in the middle of a test leaves its broker behind.
    """
    mark = f"TMPDIR={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


class ForkedRun:
    """The tests of one fork, until one fails; the pipe hears when each begins."""

    def __init__(self, session: pytest.Session, writing: int) -> None:
        self._session, self._writing = session, writing
        self._has_failed = False

    def say(self, **words: str) -> None:
        os.write(self._writing, json.dumps(words).encode() + b"\n")

    def settle(self, folder: Path) -> None:
        """Files of this run go to `folder`, and examples that failed for others are not known."""
        from hypothesis.configuration import set_hypothesis_home_dir

        set_hypothesis_home_dir(folder / "hypothesis")
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        temporary = folder / "t"
        temporary.mkdir()
        self._session.config._tmp_path_factory._basetemp = temporary  # type: ignore[attr-defined]
        self._session.config.pluginmanager.register(self)

    def run(self, items: Sequence[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.say(begins=item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._has_failed:
                break
        self.say(**{"tests end": "yes"})
        with suppress(BaseException):
            self._session._setupstate.teardown_exact(None)
        sys.stdout.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._has_failed:
            self._has_failed = True
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr)
            self.say(failed=report.nodeid, why=why.strip()[:WORDS_SHOWN])
