"""One forked process for each defect: its tests run there until one fails."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tools.mutation.forked_run import ForkedRun, end_strays
from tools.mutation.planting import FunctionIndex, plant

from ferryman.runtime.parent import end_with_parent

# After this many seconds and so many times its usual ones a test seems to hang.
PATIENCE, TIMES = float(os.environ.get("DRAWN_PATIENCE", "12")), 4.0
# It hangs if it passes so often beside that without the defect, in at least so many seconds.
PASSES_BESIDE, SECONDS_BESIDE = 3, 2 * PATIENCE


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
    is_impossible: bool = False


Examination = Generator[ForkOrder, ForkEnd, dict[str, Any]]


@dataclass(slots=True)
class Fork:
    """A running fork. `patience`: seconds that a test may take besides its usual ones."""

    pid: int
    pipe: int
    folder: str
    order: ForkOrder
    end: ForkEnd = field(default_factory=ForkEnd)
    test: str = ""
    limit: float = 0.0
    patience: float = PATIENCE
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
        running: dict[int, Examination] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs:
                examination = waiting.pop()
                running[self._start(next(examination)).pid] = examination
            fork = self._ended(self._running)
            examination = running.pop(fork.pid)
            try:
                running[self._start(examination.send(fork.end)).pid] = examination
            except StopIteration as stop:
                yield stop.value

    def _examined(self, defect: dict[str, Any]) -> Examination:
        """A test catches the defect if it fails with it, fails again alone, and passes without it.

        One that seems to hang does so only if it passes without the defect meanwhile.
        """
        began = time.monotonic()
        tests = {n: s for n, s in defect["tests"].items() if n in self._items}
        num_tests, status, detail = len(tests), "survived", ""
        while tests:
            end = yield ForkOrder(tests, defect["file"], defect["source"])
            if end.is_impossible:
                status, detail = "apart", end.why
            if end.is_impossible or not end.failed:
                break
            alone = ForkOrder({end.failed: tests[end.failed]}, defect["file"], defect["source"])
            end = self._beside(alone) if end.is_hung else (yield alone)
            if end.is_hung or (end.failed and (yield from self._passes(end.failed, tests))):
                status = "hung" if end.is_hung else "caught"
                detail = f"{end.failed}: {end.why}"
                break
            del tests[next(iter(alone.tests))]
        detail = detail or f"{len(tests)} of {num_tests} tests pass"
        seconds = round(time.monotonic() - began, 1)
        return {"index": defect["index"], "status": status, "detail": detail, "seconds": seconds}

    def _beside(self, order: ForkOrder) -> ForkEnd:
        """The end of a test that seemed to hang, run alone beside itself without the defect.

        Others may be at work on this machine, so no number of seconds says that it hangs: it does
        if the other has passed several times meanwhile. Neither hangs nor fails if that fails.
        """
        began, passes = time.monotonic(), 0
        pair = [self._start(order, math.inf), self._start(ForkOrder(order.tests), 10 * PATIENCE)]
        while True:
            ended = self._ended(pair)
            if ended is pair[0]:
                self._finish(pair[1])
                return ended.end
            passes += not ended.end.failed
            is_long = time.monotonic() - began >= SECONDS_BESIDE
            if ended.end.failed or (passes >= PASSES_BESIDE and is_long):
                self._finish(pair[0])
                why = f"no end while it passed {passes} times without the defect"
                return ForkEnd() if ended.end.failed else ForkEnd(pair[0].test, why, is_hung=True)
            pair[1] = self._start(ForkOrder(order.tests), 10 * PATIENCE)

    def _passes(
        self, name: str, seconds: Mapping[str, float]
    ) -> Generator[ForkOrder, ForkEnd, bool]:
        """Whether a test passes in a fork without any defect."""
        if name not in self._is_sound:
            end = yield ForkOrder({name: seconds[name]})
            self._is_sound[name] = not end.failed and not end.is_impossible
        return self._is_sound[name]

    def _start(self, order: ForkOrder, patience: float = PATIENCE) -> Fork:
        folder = tempfile.mkdtemp(prefix="fm-")
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._run_in_fork(order, Path(folder), writing, parent)
        os.close(writing)
        limit = time.monotonic() + 4 * PATIENCE
        fork = Fork(pid, reading, folder, order, limit=limit, patience=patience)
        self._running.append(fork)
        return fork

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

    def _ended(self, forks: Sequence[Fork]) -> Fork:
        """Waits for the end of one of the forks; those whose test takes too long are ended."""
        while True:
            ready, _, _ = select.select([fork.pipe for fork in forks], [], [], 0.5)
            for fork in forks:
                if fork.pipe in ready and not self._heard(fork):
                    return self._finish(fork)
                if time.monotonic() > fork.limit:
                    fork.end.is_hung = True
                    return self._finish(fork)

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
            fork.limit = time.monotonic() + fork.patience + TIMES * fork.order.tests[name]
        if name := words.get("failed"):
            fork.end.failed, fork.end.why = name, words["why"]
        if why := words.get("impossible"):
            fork.end.why, fork.end.is_impossible = why, True
        if "tests end" in words:
            fork.is_over, fork.limit = True, time.monotonic() + PATIENCE

    def _finish(self, fork: Fork) -> Fork:
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
        end_strays(fork.folder)
        shutil.rmtree(fork.folder, ignore_errors=True)
        return fork
