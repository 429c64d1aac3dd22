"""A worker that starts tells its parent process, in lines of JSON, how far it is."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from ferryman.model.weights.load_progress import LoadProgress, LoadStage
from ferryman.worker.worker_app import ANNOUNCE_SECONDS, CompileAnnouncer, LoadAnnouncer


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_load_is_told_a_few_times_a_second_and_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    announcer = LoadAnnouncer("decode", lambda: now)
    for done in (1, 2, 3, 8):
        announcer(LoadProgress("llama", LoadStage.WEIGHTS, done, 8))
        now += 0.6 * ANNOUNCE_SECONDS
    assert [line["done_bytes"] for line in said(capsys)] == [1, 3, 8]


def test_loops_are_told_while_an_engine_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("ferryman_kernels.compiling")
    with CompileAnnouncer("decode"):
        log.warning("scan")
    log.warning("attend")
    assert said(capsys) == [{"event": "compiling", "role": "decode", "loop": "scan"}]
