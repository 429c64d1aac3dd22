"""A beat is silent while a step is stuck, and only then."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.pair import fake_engine, request

from ferryman.engine.engine import Engine
from ferryman.schedule.sequence import Goal
from ferryman.worker.telemetry import (
    COMPILE_SECONDS,
    COMPILING,
    STUCK_SECONDS,
    LoopCounter,
    StepProgress,
)


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def own_log(lines: io.StringIO) -> Iterator[logging.Logger]:
    """The log of the whole process, written to `lines`, as a worker sets it up."""
    root, handler = logging.getLogger(), logging.StreamHandler(lines)
    before = root.level
    root.addHandler(handler)
    yield root
    root.removeHandler(handler)
    root.setLevel(before)


def begin_a_step(engine: Engine, request_id: str) -> None:
    engine.scheduler.submit(request(request_id, [1] * 6), Goal.DECODE)
    engine.pipeline.fill(0.0)


def test_the_first_step_after_a_long_rest_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = StepProgress(LoopCounter())
        assert not progress.is_stuck(engine, 1.0)
        rested = 1.0 + 10 * STUCK_SECONDS
        assert not progress.is_stuck(engine, rested - 1)
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, rested)
        assert not progress.is_stuck(engine, rested - 1 + STUCK_SECONDS)
        assert progress.is_stuck(engine, rested + STUCK_SECONDS)
        gate.set()


def test_a_step_that_ends_starts_the_time_anew() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = StepProgress(LoopCounter())
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        flight = engine.pipeline.flights[0]
        gate.set()
        flight.outcome.result()
        assert not progress.is_stuck(engine, 2.0 + STUCK_SECONDS)


def test_a_long_step_whose_layers_go_on_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = StepProgress(LoopCounter())
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        engine.layers_run.num_done += 1
        assert not progress.is_stuck(engine, 2.0 + STUCK_SECONDS)
        assert progress.is_stuck(engine, 3.0 + 2 * STUCK_SECONDS), "it stands still since"
        gate.set()


def test_a_step_in_which_a_loop_is_compiled_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine, LoopCounter() as loops:
        progress = StepProgress(loops)
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        logging.getLogger(COMPILING).info("paged_attention.alone")
        assert not progress.is_stuck(engine, 2.0)
        assert not progress.is_stuck(engine, 2.0 + COMPILE_SECONDS)
        assert progress.is_stuck(engine, 3.0 + COMPILE_SECONDS), "no loop takes that long"
        engine.layers_run.num_done += 1
        assert not progress.is_stuck(engine, 4.0 + COMPILE_SECONDS)
        assert progress.is_stuck(engine, 5.0 + COMPILE_SECONDS + STUCK_SECONDS)
        gate.set()


def test_a_compiled_loop_is_in_the_workers_own_log_by_its_level(
    own_log: logging.Logger, lines: io.StringIO
) -> None:
    with LoopCounter() as loops:
        for level, num_lines in ((logging.WARNING, 0), (logging.INFO, 1)):
            own_log.setLevel(level)
            logging.getLogger(COMPILING).info("loop %s", "paged_attention.alone")
            assert lines.getvalue() == "loop paged_attention.alone\n" * num_lines
        assert loops.num_begun == 2


def test_a_loop_that_is_compiled_in_a_running_worker_is_counted(tmp_path: Path) -> None:
    """A real one: its own process has compiled nothing yet."""
    pytest.importorskip("numba")
    code = (
        "from ferryman.worker.telemetry import LoopCounter\n"
        "from ferryman_kernels.cpu._loop_cache import cached\n"
        "def double_alone_0(x): return x * 2\n"
        "with LoopCounter() as loops:\n"
        "    double = cached(double_alone_0, {})\n"
        "    print(double(1), double(2), loops.num_begun, double(1.5), loops.num_begun)\n"
    )
    script = tmp_path / "loops.py"
    script.write_text(code)
    ran = subprocess.run(
        (sys.executable, script),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "NUMBA_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ran.stdout.split() == ["2", "4", "1", "3.0", "2"], ran.stderr


def _wait_for(gate: threading.Event) -> None:
    gate.wait(30)
