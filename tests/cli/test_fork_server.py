"""Services forked from one process: children like others, which share what they import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.waiting import wait_until

from ferryman.errors import ConfigError
from ferryman_launcher.child import Child, ChildSpec, spawn
from ferryman_launcher.fork_server import ForkServer, fork_server, own_module
from ferryman_launcher.fork_server_process import why_not_fork
from ferryman_launcher.readiness import ready_event
from ferryman_launcher.write_failures import ChildLog, WriteFailures

SERVICE = "import os; MADE_AT_IMPORT = os.urandom(8).hex()"
THREADED = f"""{SERVICE}
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
MAIN = """
import json, os, signal, sys
from ferryman_toy.service import MADE_AT_IMPORT
if "REFUSES" in os.environ:
    sys.exit(print("error: too small", file=sys.stderr) or 2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({
    "event": "ready", "import": MADE_AT_IMPORT, "variables": dict(os.environ), "name": __name__,
    "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv,
    "files": sorted(int(file) for file in os.listdir("/proc/self/fd")),
}), flush=True)
signal.pause()
"""


class Toy:
    """A service of ours in a folder, and the processes of it that a fork server has started."""

    def __init__(self, folder: Path, forks: ForkServer, said: list[str]) -> None:
        self.folder, self.forks, self.said = folder, forks, said
        self.spec = ChildSpec("toy", (sys.executable, "-m", "ferryman_toy"), 0, ready_event)

    async def start(self, **variables: str) -> tuple[Child, Mapping[str, Any]]:
        """One that is ready, and what it said."""
        child = await self.spawn(**variables)
        return child, await child.ready(120)

    async def spawn(self, **variables: str) -> Child:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.folder), **variables}
        log = ChildLog(self.folder / "toy.log", WriteFailures(self.said.append))
        return await spawn(self.spec, log, environment, launch=self.forks.launch)


@contextmanager
def toys(folder: Path, service: str = SERVICE) -> Iterator[Toy]:
    package = folder / "ferryman_toy"
    package.mkdir()
    for name, program in (("__init__", ""), ("service", service), ("__main__", MAIN)):
        (package / f"{name}.py").write_text(program)
    said: list[str] = []
    environment = {**os.environ, "PYTHONPATH": str(folder), "FERRYMAN_API_KEYS": "sk-secret"}
    with fork_server(environment, said.append, "json") as forks:
        assert forks is not None
        yield Toy(folder, forks, said)


async def test_a_forked_service_is_a_child_like_another(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        child, told = await toy.start(NUMBER="1")
        assert told["parent"] == os.getpid()
        assert told["session"] == child.pid
        assert (told["name"], len(told["argv"])) == ("__main__", 1)
        assert told["variables"]["NUMBER"] == "1"
        assert told["files"][:3] == [0, 1, 2]
        assert len(told["files"]) == 4, "its own, and the one that lists them"
        assert own_processes("ferryman-toy") == [child.pid]
        assert "ready" in (tmp_path / "toy.log").read_text()
        assert await child.stop(120), "status 0"
    assert toy.said == []


async def test_what_one_service_imported_the_next_one_has_after_its_death(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        first, told = await toy.start()
        os.kill(first.pid, signal.SIGKILL)
        assert await first.ended() == "was ended by signal 9"
        second, told_again = await toy.start()
        assert second.pid != first.pid
        assert told_again["import"] == told["import"]
        assert await second.stop(120)


async def test_no_service_has_the_variables_of_another(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        children = [await toy.start(NAME=name) for name in ("one", "two")]
        assert [told["variables"].get("NAME") for _, told in children] == ["one", "two"]
        for child, told in children:
            assert "FERRYMAN_API_KEYS" not in told["variables"]
            assert "sk-secret" not in variables_at_start(child.pid)
            child.kill()
            await child.ended()


async def test_a_forked_service_that_is_set_up_wrongly_says_what_to_change(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        child = await toy.spawn(REFUSES="yes")
        with pytest.raises(ConfigError, match=r"^toy: too small$"):
            await child.ready(120)


async def test_a_service_whose_imports_start_a_thread_is_executed(tmp_path: Path) -> None:
    with toys(tmp_path, THREADED) as toy:
        (one, told), (two, told_too) = await toy.start(), await toy.start()
        assert told["import"] != told_too["import"], "each has imported by itself"
        assert told["parent"] == os.getpid()
        assert len(toy.said) == 1
        assert "imports have started 1 threads" in toy.said[0]
        for child in (one, two):
            child.kill()
            await child.ended()


async def test_services_outlive_the_fork_server_and_are_executed_without_it(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        forked, told = await toy.start()
        os.kill(toy.forks.pid, signal.SIGKILL)
        executed, told_too = await toy.start()
        assert forked.is_running
        assert told_too["import"] != told["import"]
        assert "it has ended" in toy.said[0]
    assert await forked.stop(120)
    assert await executed.stop(120)


async def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    os.mkfifo(imported)
    with toys(tmp_path, f"{SERVICE}; open({str(imported)!r}).read()") as toy:
        starting = asyncio.create_task(toy.spawn())
        opened = asyncio.create_task(asyncio.to_thread(imported.open, "w"))
        with await opened:  # it is importing now, until this is closed
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        wait_until(lambda: not own_processes("ferryman-toy"), "the end of what was given up")
        imported.unlink()
        imported.touch()
        child, _ = await toy.start()  # executed: an answer to the first must not be taken for it
        assert await child.stop(120)


def own_processes(name: str) -> list[int]:
    """Children of ours with this name."""
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]


def variables_at_start(pid: int) -> str:
    """A process's environment as its kernel shows it."""
    return Path(f"/proc/{pid}/environ").read_text()


def test_the_fork_server_ends_with_its_block(tmp_path: Path) -> None:
    with toys(tmp_path) as toy:
        assert Path(f"/proc/{toy.forks.pid}").exists()
    assert not Path(f"/proc/{toy.forks.pid}").exists()


def test_nothing_is_forked_that_has_touched_a_card() -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    modules: Any = {"torch": SimpleNamespace(cuda=cuda)}
    assert why_not_fork(modules) is not None


def test_only_our_own_programs_are_forked() -> None:
    assert own_module((sys.executable, "-m", "ferryman_decode")) == "ferryman_decode"
    assert own_module((sys.executable, "-m", "http.server")) is None
    assert own_module((sys.executable, "-m", "ferryman_hostcache", "1", "x")) is None
    assert own_module(("/bin/true",)) is None
