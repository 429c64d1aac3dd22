"""Processes kept alive, given up, and ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside
from ferryman_cli.child import Job, ready_event
from ferryman_cli.state_folder import StateFolder
from ferryman_cli.supervisor import GivenUp, Supervisor

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
first = not os.path.exists(os.environ["ENDED"])
open(os.environ["ENDED"], "a").close()
if not first: sys.exit(print("error: no longer", file=sys.stderr) or 2)
print('{"event": "ready"}', flush=True)
signal.pause()
"""


def job(name: str, rank: int = 0, program: str = SERVICE) -> Job:
    return Job(name, (sys.executable, "-c", program, name), rank, ready_event)


class Watched:
    """A supervisor and what it said."""

    def __init__(self, folder: Path) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.ended = folder / "ended"
        environment = {**os.environ, "ENDED": str(self.ended)}
        say = self.lines.put_nowait
        self.supervisor = Supervisor(StateFolder(folder), environment, say=say, start_seconds=60)


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
