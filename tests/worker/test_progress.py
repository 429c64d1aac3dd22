"""A beat is silent while a step is stuck, and only then."""

from __future__ import annotations

import threading

from tests.harness.pair import fake_engine, request

from ferryman.engine.engine import Engine
from ferryman.schedule.sequence import Goal
from ferryman.worker.telemetry import STUCK_SECONDS, StepProgress


def begin_a_step(engine: Engine, request_id: str) -> None:
    engine.scheduler.submit(request(request_id, [1] * 6), Goal.DECODE)
    engine.pipeline.fill(0.0)


def test_the_first_step_after_a_long_rest_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = StepProgress()
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
        progress = StepProgress()
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        flight = engine.pipeline.flights[0]
        gate.set()
        flight.outcome.result()
        assert not progress.is_stuck(engine, 2.0 + STUCK_SECONDS)


def test_a_long_step_whose_layers_go_on_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = StepProgress()
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        engine.layers_run.num_done += 1
        assert not progress.is_stuck(engine, 2.0 + STUCK_SECONDS)
        assert progress.is_stuck(engine, 3.0 + 2 * STUCK_SECONDS), "it stands still since"
        gate.set()


def _wait_for(gate: threading.Event) -> None:
    gate.wait(30)
