"""`ferryman bench`: figures come out whole, and what cannot be measured is said in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from tests.doubles.stamps import fake_manifest

from ferryman.cache.manifest import Kind
from ferryman_bench.report import ReportRow, comparison_row, show, target_row
from ferryman_bench.shape import SHAPES
from ferryman_bench.timer import Timing, time_in_turn
from ferryman_bench.transport.loads import load_bandwidth
from ferryman_cli.app import run


def test_jobs_are_timed_in_turn_after_one_run_each_to_warm_up() -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    found = time_in_turn({"a": noting("a"), "b": noting("b")}, repeats=3)
    assert calls == ["a", "b"] * 4
    assert all(0 <= timing.least <= timing.median for timing in found.values())


def test_a_ratio_above_one_is_in_our_favour() -> None:
    found = {"ours": Timing(2.0, 1.0, 1.0), "peer": Timing(4.0, 3.0, 5.0)}
    row = comparison_row("decode", "tok/s", 12.0, "peer", found)
    assert (row.median, row.best, row.against_median, row.against_best) == (6.0, 12.0, 3.0, 4.0)
    assert (row.ratio, row.cpu_ratio) == (3.0, 5.0)
    assert target_row("plan", "µs", (4.0, 3.0), 5.0).ratio == 1.25


def test_rows_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ReportRow("plan", "µs", 4.0, 3.0, "aim", 5.0, 5.0, 1.25),
        target_row("keys", "µs", (9.0, 8.0), None),
    ]
    show("bench", rows, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in said["rows"]] == ["plan", "keys"]
    assert said["rows"][1]["ratio"] is None
    assert said["machine"]["cores"] >= 1


def test_a_table_breaks_no_word_and_no_figure_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "planning a match of 65,536 tokens, keys given, trie of 10,000 nodes: half cached"
    row = ReportRow(name, "tok/s", 1234.0, 2345.0, "prefill alone", 4321.0, 5432.0, 1.75, 0.25)
    show("bench", [row], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    said = " ".join(word for line in lines for word in line.replace("│", " ").split())
    assert all(word in said.split() for word in name.split())
    assert any("1,234 (2,345) tok/s" in line and "4,321 (5,432)" in line for line in lines)


def test_without_a_command_there_is_a_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("requests", "tiers", "handoff", "colocated", "compare"))


@pytest.mark.usefixtures("threads_set_back")
def test_a_shape_that_is_not_known_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "handoff", "--model-shape", "granite-9t"]) == 2
    assert capsys.readouterr().err == (
        f"error: --model-shape granite-9t: known are {', '.join(SHAPES)}\n"
    )


@pytest.mark.usefixtures("threads_set_back")
def test_without_transformers_the_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(["bench", "handoff"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: benches make random weights with transformers, which is not installed"
    )
    assert said.count("\n") == 1


def test_loads_of_a_resume_set_are_timed_beside_a_memcpy_of_the_same_bytes() -> None:
    manifest = fake_manifest(16, kinds=list(Kind), window_len=20)
    found = load_bandwidth(manifest, 64, repeats=2)
    # Four full pages, the two that the window of 20 meets, and a snapshot.
    units = {Kind.FULL: 4, Kind.WINDOW: 2, Kind.RECURRENT: 1}
    assert found.num_units == sum(units.values())
    assert found.num_bytes == sum(n * manifest.layout(k).slot_bytes for k, n in units.items())
    assert found.share > 0
