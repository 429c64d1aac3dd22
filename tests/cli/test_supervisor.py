"""Processes are restarted for ever once they were ready, and ended in order."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.skipped_time import SkippedTime, skipped_time

from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside
from ferryman_launcher.child import ChildSpec
from ferryman_launcher.readiness import ready_event
from ferryman_launcher.restarts import RestartLimits
from ferryman_launcher.state_folder import StateFolder
from ferryman_launcher.supervisor import Supervisor

SERVICE = """
import os, signal, sys
def stop(*_):
    with open(os.environ["ENDED"], "a") as ended: ended.write(sys.argv[1] + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('{"event": "ready"}', flush=True)
while True: signal.pause()
"""
REFUSES = "import sys; print('error: too small', file=sys.stderr); sys.exit(2)"
ONCE = """
import os, signal, sys
try: open(os.environ["ENDED"] + sys.argv[1], "x").close()
except FileExistsError: sys.exit(print("error: no longer", file=sys.stderr) or 2)
print('{"event": "ready"}', flush=True)
signal.pause()
"""
STANDS_STILL = """
import os, signal, sys
try: open(os.environ["ENDED"] + sys.argv[1], "x").close()
except FileExistsError: signal.pause()
print('{"event": "ready"}', flush=True)
signal.pause()
"""
POISONED = """
import sys
print('{"event": "ready"}', flush=True)
sys.exit(print("a request\\nkilled \\x1b[31mit", file=sys.stderr) or 3)
"""
CHATTY = f"print('something\\n' * 20000, flush=True)\n{SERVICE}"


def job(name: str, rank: int = 0, program: str = SERVICE, role: str = "") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program, name), rank, ready_event, role=role)


QUICK = RestartLimits(refused_seconds=0.1, most_seconds=0.2, loop_deaths=2, standstill_seconds=60)


class Watched:
    """A supervisor and what it said."""

    def __init__(self, folder: Path, limits: RestartLimits = QUICK) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.ended = folder / "ended"
        environment = {**os.environ, "ENDED": str(self.ended)}
        self.said: list[str] = []
        self.supervisor = Supervisor(
            StateFolder(folder),
            environment,
            say=self._say,
            limits=limits,
        )

    def _say(self, line: str) -> None:
        self.said.append(line)
        self.lines.put_nowait(line)


async def test_everything_ends_in_the_order_of_its_rank(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("last", 3), job("first", 0), job("second", 1)])
    assert set(watched.supervisor.pids) == {"last", "first", "second"}
    assert await watched.supervisor.drain(30)
    assert watched.ended.read_text().split() == ["first", "second", "last"]


async def test_what_was_killed_is_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one"), job("two")])
    before = watched.supervisor.pids
    async with alongside(watched.supervisor.watch()):
        os.kill(before["one"], signal.SIGKILL)
        assert "one was ended by signal 9" in await watched.lines.get()
        assert "one is back" in await watched.lines.get()
    after = watched.supervisor.pids
    assert after["two"] == before["two"]
    assert after["one"] != before["one"]
    assert await watched.supervisor.drain(30)


async def heard(watched: Watched, words: str) -> str:
    """The next line that has these words."""
    async with asyncio.timeout(120):
        while words not in (line := await watched.lines.get()):
            pass
    return line


async def test_what_stands_still_when_it_comes_back_is_killed_and_tried_again(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one", program=STANDS_STILL)])
    watched.supervisor._limits = replace(QUICK, standstill_seconds=0.5)
    async with alongside(watched.supervisor.watch()):
        os.kill(watched.supervisor.pids["one"], signal.SIGKILL)
        assert "death 2 in a row" in await heard(watched, "in a row")
    watched.supervisor.hurry()
    await watched.supervisor.drain(30)


async def test_what_refuses_to_come_back_is_tried_on_though_nothing_replaces_it(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one", program=ONCE)])
    async with alongside(watched.supervisor.watch()):
        os.kill(watched.supervisor.pids["one"], signal.SIGKILL)
        line = await heard(watched, "death 4 in a row")
        assert "one refuses to start: no longer" in line
        assert set(watched.supervisor.down) == {"one"}
        os.unlink(f"{watched.ended}one")  # what was wrong with it is over
        await heard(watched, "one is back")
        assert not watched.supervisor.down
    await watched.supervisor.drain(30)


async def next_pause(watched: Watched, time: SkippedTime, name: str) -> float:
    """Kills a process; returns the pause before its next start, which is skipped, once it is
    back."""
    os.kill(watched.supervisor.pids[name], signal.SIGKILL)
    line = await heard(watched, f"{name} was ended by signal 9")
    words = line.splitlines()[0].split()
    seconds = float(words[words.index("in", words.index("again")) + 1])
    await time.skip(seconds)
    await heard(watched, f"{name} is back")
    return seconds


async def test_a_process_killed_many_times_comes_back_each_time_and_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, time = Watched(tmp_path, RestartLimits()), skipped_time(monkeypatch)
    await watched.supervisor.start([job("one"), job("other")])
    before = watched.supervisor.pids
    async with alongside(watched.supervisor.watch()):
        pauses = [await next_pause(watched, time, "one") for _ in range(10)]
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
        await time.skip(30)
        assert await next_pause(watched, time, "one") == 0.1, "it was ready long enough"
    assert watched.supervisor.pids["other"] == before["other"]
    assert await watched.supervisor.drain(30)


async def test_a_crash_loop_says_what_is_missing_and_the_last_words(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    one = replace(job("one", program=POISONED, role="decode"), absence="requests wait")
    await watched.supervisor.start([one])
    async with alongside(watched.supervisor.watch()):
        line = await heard(watched, "death 2 in a row")
    assert line.startswith("WARNING: one exited with status 3, death 2 in a row")
    assert str(StateFolder(tmp_path).log_path("one")) in line
    assert "requests wait; trying again in 0.2 s" in line
    assert {"    one: a request", "    one: killed  [31mit"} <= set(line.splitlines()[1:])
    await watched.supervisor.drain(30)


async def test_full_disks_are_said_once_and_cost_no_process(tmp_path: Path) -> None:
    watched, folder = Watched(tmp_path), StateFolder(tmp_path)
    for name in ("one", "two"):
        folder.log_path(name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), folder.log_path("one").open("wb", 0) as log:
        log.write(b"the fault takes effect")
    await watched.supervisor.start([job(name, program=CHATTY) for name in ("one", "two")])
    async with alongside(watched.supervisor.watch()):
        for name in ("one", "two", "one"):
            os.kill(watched.supervisor.pids[name], signal.SIGKILL)
            await heard(watched, f"{name} is back")
        folder.log_path("one").unlink()
        folder.log_path("two").unlink()
        for name in ("one", "two"):
            os.kill(watched.supervisor.pids[name], signal.SIGKILL)
            await heard(watched, f"{name} is back")
    assert [line for line in watched.said if "cannot be written" in line] == [watched.said[0]]
    assert [line for line in watched.said if "can be written again" in line]
    assert "something" in folder.log_path("one").read_text()
    await watched.supervisor.drain(30)


async def test_a_process_whose_log_a_full_disk_does_not_let_open_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one")])
    opened = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "one.log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    async with asyncio.timeout(60), alongside(watched.supervisor.watch()):
        os.kill(watched.supervisor.pids["one"], signal.SIGKILL)
        assert "No space left" in await heard(watched, "one.log cannot be written")
        await heard(watched, "one is back")
    assert await watched.supervisor.drain(30)


async def test_a_process_that_is_down_gets_no_signal(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one")])
    watched.supervisor.hurry()
    await watched.supervisor.drain(30)
    watched.supervisor.send("one", signal.SIGHUP)  # its id may be another's by now
    watched.supervisor.send("never", signal.SIGHUP)


async def test_what_refuses_to_come_back_is_tried_on_while_another_of_its_role_serves(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start(
        [job("one", program=ONCE, role="worker"), job("two", role="worker"), job("other")]
    )
    before = watched.supervisor.pids
    async with alongside(watched.supervisor.watch()):
        os.kill(before["one"], signal.SIGKILL)
        line = await heard(watched, "WARNING: one refuses to start: no longer")
        assert "two serves; trying again" in line
        os.kill(before["two"], signal.SIGKILL)
        await heard(watched, "two is back")
        os.unlink(f"{watched.ended}one")  # what was wrong with it is over
        await heard(watched, "one is back")
    assert watched.supervisor.pids["other"] == before["other"]
    await watched.supervisor.drain(30)


async def test_a_role_of_which_none_comes_back_is_tried_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    jobs = [job(name, program=ONCE, role="worker") for name in ("one", "two")]
    await watched.supervisor.start([*jobs, job("other")])
    before = watched.supervisor.pids
    async with alongside(watched.supervisor.watch()):
        for name in ("one", "two"):
            os.kill(before[name], signal.SIGKILL)
            await heard(watched, f"WARNING: {name} refuses to start: no longer")
        assert "it is missing; trying again" in await heard(watched, "WARNING: one")
        os.unlink(f"{watched.ended}two")
        await heard(watched, "two is back")
    assert watched.supervisor.pids["other"] == before["other"]
    await watched.supervisor.drain(30)


async def test_one_that_cannot_start_at_all_does_not_keep_the_others_of_its_role_from_it(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path)
    jobs = [job("one", role="worker"), job("two", program=REFUSES, role="worker")]
    assert set(await watched.supervisor.start(jobs)) == {"one"}
    assert "two: too small" in await heard(watched, "WARNING")
    async with alongside(watched.supervisor.watch()):
        await heard(watched, "one serves; trying again")
    assert await watched.supervisor.drain(30)


async def test_a_role_of_which_none_can_start_ends_the_start(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    jobs = [job(name, program=REFUSES, role="worker") for name in ("one", "two")]
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="too small")):
        await watched.supervisor.start([*jobs, job("other")])
    await watched.supervisor.drain(30)


async def test_a_log_that_cannot_be_opened_is_a_start_that_failed(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    (StateFolder(tmp_path).log_path("two")).mkdir()
    jobs = [job("one", role="worker"), job("two", role="worker")]
    assert set(await watched.supervisor.start(jobs)) == {"one"}
    assert "two could not be started" in await heard(watched, "WARNING")
    assert await watched.supervisor.drain(30)


async def test_a_start_that_is_refused_says_why_and_the_others_can_be_ended(
    tmp_path: Path,
) -> None:
    watched = Watched(tmp_path)
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="two: too small")):
        await watched.supervisor.start([job("one"), job("two", program=REFUSES)])
    await watched.supervisor.drain(30)
    for pid in watched.supervisor.pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_hurrying_kills(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one"), job("two", 1)])
    watched.supervisor.hurry()
    assert not await watched.supervisor.drain(30)
    assert not watched.ended.exists()
