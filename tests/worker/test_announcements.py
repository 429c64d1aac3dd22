"""A worker that starts tells its parent process in lines of JSON, and routers in beats, how far it
is."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tests.doubles.memory_bus import MemoryBroker, MemoryBus

from ferryman.model.weights.load_progress import LoadProgress, LoadStage
from ferryman.runtime.membership import Membership
from ferryman.wire.nats.heartbeat import StartPhase
from ferryman.wire.nats.subjects import Subjects
from ferryman.worker.telemetry import WorkerStart, process_seconds
from ferryman.worker.worker_app import ANNOUNCE_SECONDS, CompileAnnouncer, LoadAnnouncer


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def start() -> WorkerStart:
    member = Membership("decode", "decode-1", 7, MemoryBus(MemoryBroker()), Subjects())
    return WorkerStart(member, lambda: 0.0)


def test_a_load_is_told_a_few_times_a_second_and_at_its_end(
    capsys: pytest.CaptureFixture[str], start: WorkerStart
) -> None:
    now = 0.0
    announcer = LoadAnnouncer("decode", lambda: now, start)
    for done in (1, 2, 3, 8):
        announcer(LoadProgress("llama", LoadStage.WEIGHTS, done, 8))
        now += 0.6 * ANNOUNCE_SECONDS
        assert start.beat().progress == (StartPhase.LOADING, done, 8), "routers hear of each"
    assert [line["done_bytes"] for line in said(capsys)] == [1, 3, 8]


def test_loops_are_told_while_an_engine_is_built(
    capsys: pytest.CaptureFixture[str], start: WorkerStart
) -> None:
    log = logging.getLogger("ferryman_kernels.compiling")
    with CompileAnnouncer("decode", start):
        log.warning("scan")
    log.warning("attend")
    assert said(capsys) == [{"event": "compiling", "role": "decode", "loop": "scan"}]
    assert start.beat().progress == (StartPhase.COMPILING, 1, 0)
    assert start.beat().doing == "compiling loops, 1 so far"


def test_a_start_counts_from_the_beginning_of_the_process(start: WorkerStart) -> None:
    """The clock of this one stands still, so what it counts was before."""
    before = start.beat().seconds
    assert 0 < before <= process_seconds()
    assert start.beat().seconds == before
