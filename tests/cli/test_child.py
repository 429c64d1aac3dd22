"""Child processes that start, fail, refuse to end, and say why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from tests.skipped_time import skipped_time

from ferryman.errors import ConfigError
from ferryman.runtime.life import EXIT_MISCONFIGURED
from ferryman_launcher import child as child_module
from ferryman_launcher.child import Child, ChildEnded, ChildSpec, OnLoad, ignored, spawn
from ferryman_launcher.readiness import (
    CompileReport,
    StartReport,
    WeightsReport,
    ready_event,
    ready_words,
    start_report,
)
from ferryman_launcher.write_failures import ChildLog, WriteFailures

READY = 'print(\'{"event": "ready", "address": "here:1"}\', flush=True);'
WAIT = "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def job(program: str, name: str = "thing") -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", program), 0, ready_event)


def thing_log(folder: Path) -> ChildLog:
    return ChildLog(folder / "thing.log", WriteFailures(print))


async def started(program: str, folder: Path, on_load: OnLoad = ignored) -> Child:
    return await spawn(job(program), thing_log(folder), os.environ, on_load)


class EndedProcess(asyncio.SubprocessTransport):
    """A process that has exited as one that is set up wrongly does."""

    def get_pid(self) -> int:
        return os.getpid()

    def get_returncode(self) -> int:
        return EXIT_MISCONFIGURED

    def close(self) -> None:
        pass


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
    server = ChildSpec("thing", argv, 0, ready_words(re.compile("is up")))
    child = await spawn(server, thing_log(tmp_path), os.environ)
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
    with pytest.raises(ChildEnded, match="thing exited with status 1 before it was ready: oh dear"):
        await child.ready(30)


async def test_the_reason_of_an_exception_group_is_the_error_within_it(tmp_path: Path) -> None:
    """Python draws a frame around a group, which would be the last line."""
    program = (
        "raise ExceptionGroup('unhandled errors in a TaskGroup', "
        "[ExceptionGroup('inner', [RuntimeError('no room')])])"
    )
    child = await started(program, tmp_path)
    with pytest.raises(ChildEnded, match=r"before it was ready: RuntimeError: no room$"):
        await child.ready(30)
    assert "+------" in (tmp_path / "thing.log").read_text().splitlines()[-1]


async def test_a_silent_end_is_told_too(tmp_path: Path) -> None:
    child = await started("raise SystemExit(3)", tmp_path)
    with pytest.raises(ChildEnded, match="said nothing"):
        await child.ready(30)


async def test_a_service_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    child = await started(WAIT, tmp_path)
    with pytest.raises(ChildEnded, match="not ready within"):
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


def loading(done: int) -> bytes:
    fields = {"model": "llama", "stage": "weights", "done_bytes": done, "total_bytes": 9}
    return json.dumps({"event": "loading", "role": "decode", **fields}).encode() + b"\n"


async def test_a_service_that_loads_is_waited_for_while_it_advances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[StartReport] = []
    child, time = await started(WAIT, tmp_path, heard.append), skipped_time(monkeypatch)
    waiting = asyncio.create_task(child.ready(1000))
    for done in range(10):
        await time.skip(900)
        child.pipe_data_received(1, loading(done))
    assert heard == [WeightsReport("llama", "weights", done, 9) for done in range(10)]
    await time.skip(900)
    child.pipe_data_received(1, b'{"event": "ready", "address": "here:1"}\n')
    assert (await waiting)["address"] == "here:1"
    child.kill()
    await child.ended()


async def test_a_service_that_repeats_itself_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, time = await started(WAIT, tmp_path), skipped_time(monkeypatch)
    waiting = asyncio.create_task(child.ready(1000))
    for _ in range(3):
        await time.skip(400)
        child.pipe_data_received(1, loading(4))
    assert not waiting.done(), "the first report was progress"
    await time.skip(400)
    with pytest.raises(ChildEnded, match="stood still for 1000 s after it had read 4 of 9 bytes"):
        await waiting
    child.kill()
    await child.ended()


async def test_a_service_that_compiles_loops_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[StartReport] = []
    child, time = await started(WAIT, tmp_path, heard.append), skipped_time(monkeypatch)
    waiting = asyncio.create_task(child.ready(1000))
    for loop in ("scan", "attend"):
        await time.skip(900)
        line = json.dumps({"event": "compiling", "role": "decode", "loop": loop})
        child.pipe_data_received(1, f"{line}\n".encode())
    assert heard == [CompileReport("scan"), CompileReport("attend")]
    await time.skip(1001)
    with pytest.raises(ChildEnded, match="was not ready, and has compiled attend for 1000 s"):
        await waiting
    child.kill()
    await child.ended()


async def test_a_service_that_computes_without_a_word_is_given_as_much_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "COMPUTING_SPELLS", 1)
    child, time = await started("while True: pass", tmp_path), skipped_time(monkeypatch)
    waiting = asyncio.create_task(child.ready(1000))
    for spell in (1, 2):
        assert not waiting.done()
        await asyncio.to_thread(_wait_for_processor_time, child.pid, 1.2 * spell)
        await time.skip(1001)
    with pytest.raises(ChildEnded, match="was not ready within 2000 s"):
        await waiting
    child.kill()
    await child.ended()


def _wait_for_processor_time(pid: int, seconds: float) -> None:
    """Returns once the process has computed for so long."""
    while int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) < seconds * 1e9:
        os.sched_yield()


async def test_reports_do_not_hide_the_last_words_in_the_log(tmp_path: Path) -> None:
    said = loading(4).decode().strip()
    child = await started(
        f"import sys; print('before'); print({said!r}); sys.stdout.write('the end'); sys.exit(2)",
        tmp_path,
    )
    with pytest.raises(ConfigError, match=r"^thing: the end$"):
        await child.ready(30)
    assert (tmp_path / "thing.log").read_text() == "before\nthe end"


async def test_reports_that_arrive_after_the_exit_stay_out_of_the_log(tmp_path: Path) -> None:
    """The loop may notice the exit before it reads what the process wrote last."""
    child = Child(job(""), thing_log(tmp_path), ignored)
    child.connection_made(EndedProcess())
    child.process_exited()
    child.pipe_data_received(1, b"before\n" + loading(4) + b"the end")
    child.connection_lost(None)
    with pytest.raises(ConfigError, match=r"^thing: the end$"):
        await child.ready(30)
    assert (tmp_path / "thing.log").read_text() == "before\nthe end"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"event": "loading"}',
        '{"event": "loading", "model": "a", "stage": "b", "done_bytes": 3, "total_bytes": 2}',
        '{"event": "loading", "model": "a", "stage": "b", "done_bytes": -1, "total_bytes": 2}',
        '{"event": "loading", "model": "a", "stage": "b", "done_bytes": "1", "total_bytes": 2}',
    ],
)
def test_another_line_is_no_report(line: str) -> None:
    assert start_report(line) is None
