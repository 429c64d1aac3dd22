"""An engine's process: replies, refusals and an end are heard by its parent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ferryman.errors import ConfigError, Unavailable
from ferryman_bench.engine_process import EngineProcess

ECHO = "import sys; [print(line, end='', flush=True) for line in sys.stdin]"


def test_an_order_is_answered_by_a_line_of_json() -> None:
    with _running(ECHO) as engine:
        assert engine.ask(do="run", runs=2) == {"do": "run", "runs": 2}


def test_a_refusal_of_the_engine_is_one_of_the_bench() -> None:
    with _running(ECHO) as engine, pytest.raises(ConfigError, match="peer: no room"):
        engine.ask(error="no room")


def test_an_engine_that_ended_is_named() -> None:
    with _running("") as engine, pytest.raises(Unavailable, match="peer has ended"):
        engine.hear()


@contextmanager
def _running(script: str) -> Iterator[EngineProcess]:
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        yield EngineProcess("peer", process)
