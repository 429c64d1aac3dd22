"""Processes are restarted, abandoned after repeated failures, and ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside
from ferryman_launcher.child import ChildSpec
from ferryman_launcher.readiness import ready_event
from ferryman_launcher.restarts import RestartLimits
from ferryman_launcher.state_folder import StateFolder
from ferryman_launcher.supervisor import GivenUp, Supervisor

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


def job(name: str, rank: int = 0, program: str = SERVICE, role: str = "") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program, name), rank, ready_event, role=role)


class Watched:
    """A supervisor and what it said."""

    def __init__(self, folder: Path) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.ended = folder / "ended"
        environment = {**os.environ, "ENDED": str(self.ended)}
        say = self.lines.put_nowait
        self.supervisor = Supervisor(
            StateFolder(folder),
            environment,
            say=say,
            patience=RestartLimits(max_seconds=0.1, most_seconds=0.2, standstill_seconds=60),
        )


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


async def test_what_refuses_to_come_back_is_given_up(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    await watched.supervisor.start([job("one", program=ONCE)])
    os.kill(watched.supervisor.pids["one"], signal.SIGKILL)
    with pytest.RaisesGroup(pytest.RaisesExc(GivenUp, match="no longer")):
        await watched.supervisor.watch()
    await watched.supervisor.drain(30)


async def heard(watched: Watched, words: str) -> str:
    """The next line that has these words."""
    async with asyncio.timeout(120):
        while words not in (line := await watched.lines.get()):
            pass
    return line


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
        assert "no longer" in await heard(watched, "one: ")
        assert "two serves; trying again" in await heard(watched, "WARNING: one exited")
        os.kill(before["two"], signal.SIGKILL)
        await heard(watched, "two is back")
        os.unlink(f"{watched.ended}one")  # what was wrong with it is over
        await heard(watched, "one is back")
    assert watched.supervisor.pids["other"] == before["other"]
    await watched.supervisor.drain(30)


async def test_a_role_is_given_up_when_none_of_it_comes_back(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    jobs = [job(name, program=ONCE, role="worker") for name in ("one", "two")]
    await watched.supervisor.start([*jobs, job("other")])

    async def kill_both() -> None:
        os.kill(watched.supervisor.pids["one"], signal.SIGKILL)
        await heard(watched, "WARNING: one exited")
        os.kill(watched.supervisor.pids["two"], signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.RaisesGroup(pytest.RaisesExc(GivenUp, match="no longer"), flatten_subgroups=True):
        async with asyncio.timeout(120), alongside(kill_both()):
            await watched.supervisor.watch()
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
