"""The check of a card: parts end in their time, and their figures are read from their output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.processes import process_state
from tests.waiting import wait_until
from tools.card.check import run_part
from tools.card.parts import (
    DRY,
    ON_CARD,
    CheckPart,
    json_figures,
    parts_of,
    pytest_figures,
    request_figures,
    speed_figures,
)

SLEEPER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print('{"child": %d}' % child.pid, flush=True)
child.wait()
"""


def test_a_part_that_does_not_end_ends_with_all_that_it_started(tmp_path: Path) -> None:
    part = CheckPart("sleeper", 1.0, (sys.executable, "-c", SLEEPER), json_figures)
    result = run_part(part, 3.0, tmp_path)
    assert (result.status, result.ending) == (None, "no end in its time")
    child = int(result.figures["child"])
    wait_until(lambda: process_state(child) in "XZ", "the end of its child")


def test_a_part_that_fails_keeps_its_output_and_its_figures(tmp_path: Path) -> None:
    command = sys.executable, "-c", "import os; print('2 failed, 5 passed in 1 s'); raise OSError"
    part = CheckPart("failing", 1.0, command, pytest_figures, {"ANY": "value"})
    result = run_part(part, 60.0, tmp_path)
    assert (result.status, result.ending) == (1, "failed (1)")
    assert result.figures == {"failed": "2", "passed": "5"}
    assert "OSError" in (tmp_path / "failing.err").read_text()
    assert "ANY" not in os.environ


@pytest.mark.parametrize(
    ("figures", "output", "read"),
    [
        (request_figures, 'x\n{"rows": [{"name": "8", "median": 9.6}]}', {"8": "10 tok/s"}),
        (request_figures, "it died", {}),
        (json_figures, '{"cold_ms": 3.5}', {"cold_ms": "3.5"}),
        (json_figures, "{half", {}),
        (speed_figures, "replayed, batch 1: 310 tokens/s\n", {"replayed, batch 1": "310 tok/s"}),
        (pytest_figures, "no tests ran", {}),
    ],
)  # fmt: skip
def test_figures_are_read_from_any_output(figures: object, output: str, read: object) -> None:
    assert callable(figures)
    assert figures(output) == read


@pytest.mark.parametrize(("size", "device"), [(ON_CARD, "cuda"), (DRY, "cpu")], ids=["card", "dry"])
def test_the_parts_have_all_of_the_time_and_their_device(size: object, device: str) -> None:
    parts = parts_of(ON_CARD if size is ON_CARD else DRY, device, Path("model"))
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    named = [part for part in parts if "--device" in part.command]
    assert all(part.command[part.command.index("--device") + 1] == device for part in named)
    on_card = [part for part in parts if "FERRYMAN_TEST_DEVICE" in part.environment]
    assert len(on_card) == (1 if device == "cuda" else 0)
