"""Processes that really start, are told to stop, drain, fail, or lose their parent.

No test sleeps: it continues when the process has written a line or has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside, exit_on_config_errors, run_unless_stopped
from ferryman_launcher.options import demo_model

HEAD = """
import asyncio, logging, sys
from ferryman.errors import ConfigError
from ferryman.runtime.life import alongside, announce_ready, run_service
def say(line):
    print(line, flush=True)
"""

DRAINING = """
async def serve(stopping):
    announce_ready("decode", "decode-00000001", "127.0.0.1:1", 7)
    await stopping.wait()
    say("draining")
    sys.stdin.readline()
run_service(serve)
"""

STUCK = """
async def serve(stopping):
    say("up")
    await stopping.wait()
    await asyncio.Event().wait()
run_service(serve, drain_seconds=0.01)
"""

ECHOING = """
async def serve(stopping):
    say("up")
    await stopping.wait()
    say("stopping")
    loop = asyncio.get_running_loop()
    say(await loop.run_in_executor(None, sys.stdin.readline))
    await asyncio.Event().wait()
run_service(serve, drain_seconds=1000)
"""

TOLD_TWICE = """
import signal
async def serve(stopping):
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    await stopping.wait()
    await asyncio.sleep(0.05)
    say("drained")
run_service(serve)
"""

FAILING_JOB = """
async def job():
    raise ZeroDivisionError("the job failed")
async def serve(stopping):
    async with alongside(job()):
        try:
            await asyncio.Event().wait()
        finally:
            say("body cancelled")
run_service(serve)
"""

LOADING = """
import threading
from ferryman.runtime.life import run_unless_stopped
def load():
    say("loading")
    threading.Event().wait()
async def serve(stopping):
    await run_unless_stopped(load, stopping)
    say("loaded")
run_service(serve)
"""

# The real worker, with a load that never ends.
LOADING_WORKER = """
import threading
from contextlib import contextmanager
from ferryman.runtime.life import run_main
from ferryman.settings.workers import DecodeSettings
from ferryman.worker import worker_app
from ferryman_decode.service import ROLE, serve
@contextmanager
def never_built(*_):
    say("loading")
    threading.Event().wait()
    yield
worker_app.build_engine = never_built
run_main(DecodeSettings, ROLE, serve)
"""

LAST_WORDS = """
class SlowToFree:
    def __del__(self):
        say("taken apart")
kept = SlowToFree()
async def serve(stopping):
    say("up")
    await stopping.wait()
    logging.basicConfig(level="INFO", format="%(message)s")
    logging.info("logged last")
    sys.stdout.write("written last")
run_service(serve)
"""

MISCONFIGURED = """
async def serve(stopping):
    async with alongside():
        raise ConfigError("no model at /nowhere")
run_service(serve)
"""

ORPHAN = """
import os, subprocess
child = '''
import os, sys
sys.path[:0] = {path!r}
from ferryman.runtime.parent import end_with_parent
from ferryman.runtime.life import run_service
end_with_parent(int(sys.argv[1]))
async def serve(stopping):
    print("child up", os.getpid(), flush=True)
    await stopping.wait()
    print("child drained", flush=True)
run_service(serve)
'''.format(path=sys.path)
subprocess.Popen([sys.executable, "-c", child, str(os.getpid())])
sys.stdin.readline()
"""


@contextmanager
def process(body: str) -> Iterator[subprocess.Popen[str]]:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    started = subprocess.Popen(
        [sys.executable, "-c", path + HEAD + body],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_status_is_0(number: signal.Signals) -> None:
    with process(DRAINING) as service:
        assert json.loads(line(service)) == {
            "event": "ready",
            "role": "decode",
            "worker_id": "decode-00000001",
            "address": "127.0.0.1:1",
            "epoch": 7,
        }
        service.send_signal(number)
        assert line(service) == "draining"
        service.communicate("done\n")
        assert service.returncode == 0


def test_the_end_writes_the_last_words_and_takes_nothing_apart() -> None:
    with process(LAST_WORDS) as service:
        assert line(service) == "up"
        service.terminate()
        output, errors = service.communicate()
        assert (output, errors) == ("written last", "logged last\n")
        assert service.returncode == 0


def test_a_service_whose_reader_has_gone_ends_with_its_status() -> None:
    with process(LAST_WORDS) as service:
        assert line(service) == "up"
        assert service.stdout is not None
        service.stdout.close()
        service.terminate()
        assert service.wait() == 0


def test_one_death_that_signals_twice_is_one_wish() -> None:
    with process(TOLD_TWICE) as service:
        assert line(service) == "drained"
        assert service.wait() == 0


def test_a_later_signal_of_the_same_kind_ends_it_at_once() -> None:
    with process(ECHOING) as service:
        assert line(service) == "up"
        service.send_signal(signal.SIGTERM)
        assert line(service) == "stopping"
        service.send_signal(signal.SIGINT)
        assert service.stdin is not None
        service.stdin.write("still there\n")
        service.stdin.flush()
        assert line(service) == "still there"
        while service.poll() is None:
            service.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                service.wait(timeout=0.05)
        assert service.returncode == 1


def test_a_drain_that_takes_too_long_is_cut_and_says_so() -> None:
    with process(STUCK) as service:
        assert line(service) == "up"
        service.send_signal(signal.SIGTERM)
        _, stderr = service.communicate()
        assert service.returncode == 1
        assert "drain took too long" in stderr
        assert re.search(r" > serve:\d+ > Event\.wait:\d+", stderr), "it names the line that hangs"


def test_a_failing_job_cancels_the_body_and_the_status_is_1() -> None:
    with process(FAILING_JOB) as service:
        stdout, stderr = service.communicate()
        assert (stdout, service.returncode) == ("body cancelled\n", 1)
        assert "ZeroDivisionError: the job failed" in stderr


def test_a_wrong_setup_is_one_line_and_status_2() -> None:
    with process(MISCONFIGURED) as service:
        stdout, stderr = service.communicate()
        assert (stdout, stderr) == ("", "error: no model at /nowhere\n")
        assert service.returncode == 2


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_child_drains_when_its_parent_is_killed() -> None:
    with process(ORPHAN) as parent:
        assert line(parent).startswith("child up")
        parent.kill()
        assert line(parent) == "child drained"
        assert line(parent) == "", "the child has closed its end of the pipe: it is gone"


async def test_the_end_of_the_body_cancels_the_jobs() -> None:
    ended = asyncio.Event()

    async def job() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with alongside(job()):
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_a_job_may_end_early() -> None:
    async def job() -> None:
        return

    async with alongside(job()):
        await asyncio.sleep(0)


async def test_a_failed_job_is_what_the_caller_sees() -> None:
    async def job() -> None:
        raise ValueError("the cause")

    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(job()):
            await asyncio.Event().wait()
    assert [str(error) for error in caught.value.exceptions] == ["the cause"]


def test_every_mistake_of_a_group_gets_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    inner = ExceptionGroup("inner", [ConfigError("second")])
    with pytest.raises(SystemExit) as caught, exit_on_config_errors():
        raise ExceptionGroup("outer", [ConfigError("first"), inner])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: first\nerror: second\n"


def test_a_bug_beside_a_mistake_is_not_hidden() -> None:
    with pytest.raises(ExceptionGroup), exit_on_config_errors():
        raise ExceptionGroup("both", [ConfigError("a mistake"), ValueError("a bug")])


@pytest.mark.parametrize(
    ("body", "number"),
    [
        pytest.param(LOADING, signal.SIGTERM, id="told to end"),
        pytest.param(LOADING, signal.SIGINT, id="interrupted"),
        pytest.param(LOADING_WORKER, signal.SIGTERM, id="a decode worker"),
    ],
)
def test_a_process_that_loads_ends_at_the_first_signal(
    body: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_MODEL", str(demo_model()))
    with process(body) as started:
        assert line(started) == "loading"
        started.send_signal(number)
        said, logged = started.communicate(timeout=120)
    assert started.returncode == 0
    assert said == ""
    assert "Traceback" not in logged


async def test_a_start_that_fails_raises_its_error() -> None:
    with pytest.raises(ConfigError, match="no model"):
        await run_unless_stopped(_no_model, asyncio.Event())
    assert await run_unless_stopped(lambda: 7, asyncio.Event()) == 7


def _no_model() -> None:
    raise ConfigError("no model at /nowhere")
