"""The outcome of a bench: ratios by round, a table that fits in 80 columns, and a plot."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tools.bench.__main__ import run
from tools.bench.contender import BenchCell
from tools.bench.contest import largest_difference
from tools.bench.contest_plot import ratio_figure
from tools.bench.contest_result import CellResult, CellTimes, ContestResult, show_comparison

from ferryman.errors import ConfigError
from ferryman_bench.engine_process import EngineProcess
from ferryman_bench.hardware import machine_now
from ferryman_simulator.report import save_figure

NAMES = ("ferryman", "transformers", "llama.cpp")


def test_a_ratio_is_the_median_over_rounds_of_theirs_by_ours() -> None:
    result = _result(BenchCell("decode", 8, 128), ours=(1.0, 2.0, 4.0), theirs=(3.0, 2.0, 8.0))
    # By round 3, 1 and 2; the medians of each side alone would give 3 / 2.
    assert result.ratio("llama.cpp") == 2.0
    assert result.rate("ferryman") == 8 / 2.0


class AnsweringContender:
    """A contender's process, as the check of logits sees it."""

    def __init__(self, name: str, logits: list[float]) -> None:
        self.name, self._logits = name, logits

    def ask(self, **order: object) -> dict[str, object]:
        assert order["do"] == "logits"
        return {"logits": self._logits}


def test_a_peer_that_runs_another_model_is_refused_before_anything_is_timed() -> None:
    ours, same, another, broken = (
        cast(EngineProcess, AnsweringContender(name, logits))
        for name, logits in {
            "ferryman": [3.0, 4.0],
            "same": [3.0, 4.001],
            "another": [4.0, -3.0],
            "broken": [math.nan, 4.0],
        }.items()
    )
    assert largest_difference([ours, same], "float32") == pytest.approx(0.0002)
    for peer, dtype in ((another, "float32"), (another, "int8"), (broken, "bfloat16")):
        with pytest.raises(ConfigError, match=f"{peer.name} runs another model"):
            largest_difference([ours, same, peer], dtype)


def test_the_table_keeps_its_words_whole_at_80_columns() -> None:
    out = io.StringIO()
    show_comparison(_wide_result(), ["pip install 'ferryman[peers]'"], Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[-1] == "pip install 'ferryman[peers]'"
    row = next(line for line in lines if "decode 32 at 32k" in line)
    # Both ratios stand in the row of their cell.
    assert row.count("2.00") == 2, "by the clock"
    assert row.count("1.50") == 2, "by processor time"
    assert max(map(len, lines)) <= 80


def test_the_json_has_every_round_and_the_machine() -> None:
    machine = machine_now()
    said = _wide_result().to_json(machine)
    assert said["machine"]["processor"] == machine.processor
    (row,) = said["rows"]
    assert row["ratios"] == {"transformers": 2.0, "llama.cpp": 2.0}
    assert row["cpu_ratios"] == {"transformers": 1.5, "llama.cpp": 1.5}
    assert len(row["rounds"]["ferryman"]) == 3


def test_the_plot_has_a_bar_for_every_ratio_as_long_as_it(tmp_path: Path) -> None:
    figure = ratio_figure(_wide_result(), machine_now())
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 2.0]
    assert axes.get_legend_handles_labels()[1] == ["transformers", "llama.cpp"]
    save_figure(tmp_path / "ratios.svg", figure, "svg")
    assert ElementTree.parse(tmp_path / "ratios.svg").getroot().tag.endswith("svg")


def test_a_plot_that_could_not_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "nowhere" / "ratios.svg"
    assert run(["model", "--plot", str(place)]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "vllm"], "--peers vllm: known are transformers, llama.cpp"),
        (["--batch", "8;32"], "--batch 8;32: give whole numbers above 0"),
        (["--context", "0"], "--context 0: give whole numbers above 0"),
    ],
)
def test_options_that_cannot_be_measured_are_one_line_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def _wide_result() -> ContestResult:
    cell = BenchCell("decode", 32, 32_768)
    result = _result(cell, ours=(0.001, 0.001, 0.001), theirs=(0.002, 0.002, 0.002))
    return ContestResult("a shape, float32", NAMES, 1e-6, (result,))


def _result(cell: BenchCell, *, ours: tuple[float, ...], theirs: tuple[float, ...]) -> CellResult:
    times = {name: CellTimes(theirs, 1.5) for name in NAMES[1:]}
    return CellResult(cell, {"ferryman": CellTimes(ours, 1.0), **times})
