"""A beat is silent while a step is stuck, and only then."""

from __future__ import annotations

import threading

from tests.worker.fake_engine import fake_engine, request

from ferryman.engine.assembly import Engine
from ferryman.schedule.sequence import Goal
from ferryman.worker.telemetry import STUCK_SECONDS, Progress


def begin_a_step(engine: Engine, request_id: str) -> None:
    engine.scheduler.submit(request(request_id, [1] * 6), Goal.DECODE)
    engine.pipeline.fill(0.0)


def test_the_first_step_after_a_long_rest_is_not_stuck() -> None:
    gate = threading.Event()
    with fake_engine(pace=lambda _plan: _wait_for(gate)) as engine:
        progress = Progress()
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
        progress = Progress()
        begin_a_step(engine, "r1")
        assert not progress.is_stuck(engine, 1.0)
        flight = engine.pipeline.oldest
        assert flight is not None
        gate.set()
        flight.outcome.result()
        assert not progress.is_stuck(engine, 2.0 + STUCK_SECONDS)


def _wait_for(gate: threading.Event) -> None:
    gate.wait(30)
