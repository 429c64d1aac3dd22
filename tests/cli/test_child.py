"""Child processes that start, fail, refuse to end, and say why."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman_cli.child import Child, Ended, Job, ready_event, ready_words, spawn

READY = 'print(\'{"event": "ready", "address": "here:1"}\', flush=True);'
WAIT = "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def job(program: str, name: str = "thing") -> Job:
    return Job(name, (sys.executable, "-c", program), 0, ready_event)


async def started(program: str, folder: Path) -> Child:
    return await spawn(job(program), folder / "thing.log", os.environ)


async def test_a_service_is_ready_when_it_says_so(tmp_path: Path) -> None:
    child = await started(f"print('hello');{READY}{WAIT}", tmp_path)
    assert (await child.ready(30))["address"] == "here:1"
    assert child.is_running
    assert not await child.stop(30)  # a signal is not status 0
    assert not child.is_running
    assert "hello" in (tmp_path / "thing.log").read_text()


async def test_a_server_is_ready_when_its_output_fits(tmp_path: Path) -> None:
    program = f"import sys; print('Server is up', file=sys.stderr, flush=True); {WAIT}"
    argv = (sys.executable, "-c", program)
    server = Job("thing", argv, 0, ready_words(re.compile("is up")))
    child = await spawn(server, tmp_path / "thing.log", os.environ)
    assert await child.ready(30) == {}
    child.kill()
    assert await child.ended() == "was ended by signal 9"


async def test_a_service_that_is_set_up_wrongly_says_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "thing.log").write_text("error: of an earlier life\n")
    child = await started(
        "import sys; sys.exit(print('error: less', file=sys.stderr) or 2)", tmp_path
    )
    with pytest.raises(ConfigError, match=r"^thing: less$"):
        await child.ready(30)


async def test_a_service_that_ends_before_it_is_ready_is_named(tmp_path: Path) -> None:
    child = await started("raise SystemExit('oh dear')", tmp_path)
    with pytest.raises(Ended, match="thing exited with status 1 before it was ready: oh dear"):
        await child.ready(30)


async def test_a_silent_end_is_told_too(tmp_path: Path) -> None:
    child = await started("raise SystemExit(3)", tmp_path)
    with pytest.raises(Ended, match="said nothing"):
        await child.ready(30)


async def test_a_service_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    child = await started(WAIT, tmp_path)
    with pytest.raises(Ended, match="not ready within"):
        await child.ready(0.01)
    child.kill()
    await child.ended()


async def test_a_deaf_service_is_killed(tmp_path: Path) -> None:
    child = await started(f"{DEAF}{READY}{WAIT}", tmp_path)
    await child.ready(30)
    assert not await child.stop(0.05)
    assert await child.ended() == f"was ended by signal {signal.SIGKILL.value}"


async def test_a_polite_service_ends_well(tmp_path: Path) -> None:
    polite = "import signal,sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
    child = await started(f"{polite}{READY}{WAIT}", tmp_path)
    await child.ready(30)
    assert await child.stop(30)


@pytest.mark.parametrize("line", ["", "[]", "{", '{"event": "other"}', "ready", "{]"])
def test_other_lines_are_not_ready(line: str) -> None:
    assert ready_event(line) is None
