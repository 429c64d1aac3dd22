"""The check of a card: parts end in their time, and their figures are read from their output."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import process_state
from tests.waiting import wait_until
from tools.card.check import PartResult, run_part, show
from tools.card.figures import Figures, bits_figures, json_figures, pytest_figures
from tools.card.parts import (
    ALL_SECONDS,
    DRY,
    GPU_TESTS,
    MODEL_SECONDS,
    ON_CARD,
    TIME_LEFT,
    CheckPart,
    CheckSize,
    parts_of,
)

SLEEPER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print('{"child": %d}' % child.pid)
child.wait()
"""


def test_a_part_that_does_not_end_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what it printed stays all the same
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


FIGURES = [
    pytest.param(
        json_figures, '{"a": 3.5}\nx\n{"b": true}\n{"c', {"a": "3.5", "b": "True"}, id="lines"
    ),
    pytest.param(json_figures, "it died", {}, id="no line"),
    pytest.param(json_figures, "3\n[4]", {}, id="no object"),
    pytest.param(pytest_figures, "no tests ran", {}, id="no test"),
    pytest.param(
        pytest_figures,
        "..sF.   [ 50%]\n..",
        {"passed so far": "5", "failed so far": "1", "skipped so far": "1"},
        id="tests that were ended",
    ),
    pytest.param(
        pytest_figures,
        "...F [100%]\n1 failed, 3 passed in 2 s",
        {"failed": "1", "passed": "3"},
        id="tests",
    ),
    pytest.param(
        bits_figures,
        "Mamba-2: equal\nlatents: a batch in 3 of 4 rows\nllama again: equal\n"
        "equal tokens, equal bits / answers tried\n  again: 1, no reason\n"
        "not reached: table of bamba",
        {
            "rows of kernels and ways of models": "2 of 3 equal",
            "latents": "a batch in 3 of 4 rows",
            "not reached": "table of bamba",
        },
        id="bits",
    ),
    pytest.param(
        bits_figures,
        "Mamba-2: equal\n",
        {"rows of kernels and ways of models": "1 of 1 equal"},
        id="bits so far",
    ),
]


@pytest.mark.parametrize(("figures", "output", "read"), FIGURES)
def test_figures_are_read_from_any_output(
    figures: Callable[[str], Figures], output: str, read: Figures
) -> None:
    assert figures(output) == read


SIZES = pytest.mark.parametrize(
    ("size", "device"), [(ON_CARD, "cuda"), (DRY, "cpu")], ids=["card", "dry"]
)


@SIZES
def test_the_limits_of_all_parts_are_at_most_six_minutes(size: CheckSize, device: str) -> None:
    limits = [part.seconds for part in parts_of(size, device, Path("model"))]
    assert MODEL_SECONDS + sum(limits) <= ALL_SECONDS == 360


@SIZES
def test_the_parts_have_their_device(size: CheckSize, device: str) -> None:
    parts = parts_of(size, device, Path("model"))
    assert len({part.name for part in parts}) == len(parts)
    named = [part for part in parts if "--device" in part.command]
    assert all(part.command[part.command.index("--device") + 1] == device for part in named)
    on_card = [part.name for part in parts if "FERRYMAN_TEST_DEVICE" in part.environment]
    in_float64 = [part.name for part in parts if part.name.endswith("in float64")]
    assert on_card == (in_float64 if device == "cuda" else [])
    assert len(in_float64) == 2


def test_all_tests_that_need_a_card_are_in_the_part_of_kernels() -> None:
    root = Path(__file__).parents[3]
    marked = {
        str(path.relative_to(root))
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"^\s*(@|pytestmark.*)?pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    }
    assert marked == set(GPU_TESTS)


def test_a_part_that_looks_at_a_clock_is_told_less_than_its_limit() -> None:
    part = CheckPart("bits", 50, ("run", "--seconds", TIME_LEFT), json_figures)
    assert part.command_within(50.9) == ("run", "--seconds", "40")
    assert part.command_within(3.0) == ("run", "--seconds", "1")


def test_the_table_says_what_a_dry_run_compares(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {part.name: part for part in parts_of(DRY, "cpu", Path("model"))}
    launches = parts["launches"]
    show("title", [PartResult(launches.name, 0, 1.0, {"draw": "3 / 3 µs"}, launches.heading)])
    heading = capsys.readouterr().out.splitlines()[3]
    assert heading.startswith("launches: done, 1.0 s (before / now: both are torch's operations")
