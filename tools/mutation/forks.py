"""One forked process for each defect: its tests run there until one fails."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tools.mutation.planting import FunctionIndex, plant

from ferryman.runtime.parent import end_with_parent

# A test may take this many seconds, and so many times its usual ones: others use the machine too.
PATIENCE, TIMES = 20.0, 8.0
WORDS_SHOWN = 300


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Tests to run with their usual seconds, and a file with its planted bytes, or none."""

    tests: Mapping[str, float]
    file: str = ""
    source: str = ""


@dataclass(slots=True)
class ForkEnd:
    """How a fork ended: `failed` is the test that failed or hung, `why` its message."""

    failed: str = ""
    why: str = ""
    is_hung: bool = False
    is_unsure: bool = False
    is_impossible: bool = False


Examination = Generator[ForkOrder, ForkEnd, dict[str, Any]]


@dataclass(slots=True)
class Fork:
    """A running fork and the examination that waits for its end."""

    pid: int
    pipe: int
    folder: str
    order: ForkOrder
    examination: Examination
    end: ForkEnd = field(default_factory=ForkEnd)
    test: str = ""
    limit: float = 0.0
    is_over: bool = False
    unread: bytes = b""


class ForkQueue:
    """Runs examinations, `jobs` at once, in forks of this process."""

    def __init__(self, session: pytest.Session, index: FunctionIndex, jobs: int) -> None:
        self._session, self._index, self._jobs = session, index, jobs
        self._items = {item.nodeid: item for item in session.items}
        self._is_sound: dict[str, bool] = {}
        self._running: list[Fork] = []

    def results(self, defects: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The defects' results as they come: their index, status, detail and seconds."""
        waiting = [self._examined(defect) for defect in reversed(defects)]
        while waiting or self._running:
            while waiting and len(self._running) < self._jobs:
                examination = waiting.pop()
                self._start(next(examination), examination)
            fork = self._ended()
            try:
                self._start(fork.examination.send(fork.end), fork.examination)
            except StopIteration as stop:
                yield stop.value

    def _examined(self, defect: dict[str, Any]) -> Examination:
        """A test that fails with the defect catches it if it passes without: each is asked once.

        One that does not end must do so twice, for other processes may have stood in its way.
        """
        began = time.monotonic()
        tests = {n: s for n, s in defect["tests"].items() if n in self._items}
        status, detail = "survived", ""
        while True:
            end = yield ForkOrder(tests, defect["file"], defect["source"])
            if end.is_hung and end.failed:
                end = yield from self._hangs_again(end.failed, tests[end.failed], defect)
            if end.is_impossible:
                status, detail = "apart", end.why
            if end.is_impossible or not end.failed:
                detail = detail or f"{len(tests)} tests pass"
                break
            if not end.is_unsure and (yield from self._passes(end.failed, tests[end.failed])):
                status, detail = "caught", f"{end.failed}: {end.why}"
                break
            del tests[end.failed]
        seconds = round(time.monotonic() - began, 1)
        return {"index": defect["index"], "status": status, "detail": detail, "seconds": seconds}

    def _hangs_again(
        self, name: str, seconds: float, defect: dict[str, Any]
    ) -> Generator[ForkOrder, ForkEnd, ForkEnd]:
        """The end of a test that seemed to hang, run once more, alone.

        It gets eight times as long as the same test takes without the defect, at this hour and on
        this machine; others may be at work on it.
        """
        began = time.monotonic()
        sound = yield ForkOrder({name: seconds})
        took = time.monotonic() - began
        self._is_sound[name] = not sound.failed and not sound.is_impossible
        end = yield ForkOrder({name: max(seconds, took)}, defect["file"], defect["source"])
        if not end.failed:
            end.failed, end.is_unsure = name, True
        return end

    def _passes(self, name: str, seconds: float) -> Generator[ForkOrder, ForkEnd, bool]:
        """Whether a test passes in a fork without any defect."""
        if name not in self._is_sound:
            end = yield ForkOrder({name: seconds})
            self._is_sound[name] = not end.failed and not end.is_impossible
        return self._is_sound[name]

    def _start(self, order: ForkOrder, examination: Examination) -> None:
        folder = tempfile.mkdtemp(prefix="fm-")
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._run_in_fork(order, Path(folder), writing, parent)
        os.close(writing)
        limit = time.monotonic() + 2 * PATIENCE
        self._running.append(Fork(pid, reading, folder, order, examination, limit=limit))

    def _run_in_fork(self, order: ForkOrder, folder: Path, writing: int, parent: int) -> None:
        try:
            os.setsid()
            end_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            run = ForkedRun(self._session, writing)
            run.settle(folder)
            why = None
            if order.file:
                root = self._session.config.rootpath
                source = order.source.encode()
                why = plant(root, order.file, source, self._index, folder / "links")
            if why is None:
                run.run([self._items[name] for name in order.tests])
            else:
                run.say(impossible=why)
        except BaseException as error:
            os.write(writing, json.dumps({"impossible": repr(error)}).encode() + b"\n")
        finally:
            os.write(writing, b'{"bye": ""}\n')
            os._exit(0)

    def _ended(self) -> Fork:
        """Waits for the end of a fork; those whose test takes too long are ended."""
        while True:
            pipes = [fork.pipe for fork in self._running]
            ready, _, _ = select.select(pipes, [], [], 0.5)
            for fork in self._running:
                if fork.pipe in ready and not self._heard(fork):
                    return self._finished(fork)
                if time.monotonic() > fork.limit:
                    fork.end.is_hung = True
                    return self._finished(fork)

    def _heard(self, fork: Fork) -> bool:
        """Reads what a fork says; False at its end."""
        data = os.read(fork.pipe, 65536)
        *lines, fork.unread = (fork.unread + data).split(b"\n")
        for line in lines:
            self._hear(fork, json.loads(line))
        # Processes that were forked from this one hold its pipe open, so it says that it goes.
        return bool(data) and b'{"bye": ""}' not in lines

    def _hear(self, fork: Fork, words: dict[str, str]) -> None:
        if name := words.get("begins"):
            fork.test = name
            fork.limit = time.monotonic() + PATIENCE + TIMES * fork.order.tests[name]
        if name := words.get("failed"):
            fork.end.failed, fork.end.why = name, words["why"]
        if why := words.get("impossible"):
            fork.end.why, fork.end.is_impossible = why, True
        if "tests end" in words:
            fork.is_over, fork.limit = True, time.monotonic() + PATIENCE

    def _finished(self, fork: Fork) -> Fork:
        """Ends what is left of the fork. One that fell silent has failed where it was."""
        if not fork.is_over and not fork.end.is_impossible:
            fork.end.failed = fork.test
            fork.end.why = "no end" if fork.end.is_hung else "the process ended"
            fork.end.is_impossible = not fork.test
        self._running.remove(fork)
        with suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)
        os.waitpid(fork.pid, 0)
        os.close(fork.pipe)
        _end_strays(fork.folder)
        shutil.rmtree(fork.folder, ignore_errors=True)
        return fork


def _end_strays(folder: str) -> None:
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
