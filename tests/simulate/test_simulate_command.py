"""`ferryman simulate` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ferryman_cli.app import run

SHAPE = "--page-bytes 4096 --snapshot-bytes 8192 --memory-bytes 2M --max-running 4"


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "t.jsonl"
    made = f"simulate --generate {path} --block-tokens 16 --num-requests 40 --prefix-tokens 64"
    assert run(f"{made} --user-tokens 20 --output-tokens 10".split()) == 0
    assert "40 requests" in capsys.readouterr().out
    return path


def test_a_trace_that_was_made_is_simulated(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"simulate --trace {trace} --block-tokens 16 {SHAPE}".split()) == 0
    said = capsys.readouterr().out
    for words in ("hit rate", "device", "never_seen", "TTFT p50", "snapshots kept", "evicted"):
        assert words in said


def test_a_sweep_is_every_combination_as_json_and_as_a_picture(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.png"
    line = f"simulate --trace {trace} --block-tokens 16 {SHAPE} --json --plot {picture}"
    assert run(f"{line} --sweep slots=40,80 --sweep host-memory=0,1M,2M".split()) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    varied = [tuple(one["varied"].values()) for one in runs]
    assert varied == [(s, h << 20) for s in (40, 80) for h in (0, 1, 2)]
    for one in runs:
        assert sum(one["tokens"].values()) == one["prompt_tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_extra_is_named(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(f"simulate --trace {trace} --block-tokens 16 --plot x.png".split()) == 2
    assert "pip install 'ferryman[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param("", "either --trace FILE or --generate FILE", id="nothing to do"),
        pytest.param("--trace x --generate y", "either", id="both"),
        pytest.param("--trace nowhere", "nowhere:0: No such file", id="no file"),
        pytest.param("--trace {} ", "--block-tokens right?", id="blocks of another size"),
        pytest.param("--trace {} --sweep pages=1", "--sweep pages=1", id="what is not varied"),
        pytest.param("--trace {} --sweep slots=x", "no whole number", id="a sweep of words"),
        pytest.param("--trace {} --sweep junctions=1", "neither on nor off", id="half a switch"),
        pytest.param("--trace {} --sweep slots=1 --sweep slots=2", "twice", id="an axis twice"),
        pytest.param("--trace {} --cost speed=1", "prefill_seconds_per_token", id="no such cost"),
        pytest.param("--trace {} --cost call_seconds=-1", "call_seconds", id="time backwards"),
        pytest.param("--trace {} --memory-bytes much", "size such as", id="no size"),
        pytest.param("--trace {} --prefill-slots full", "KIND=COUNT", id="no pools"),
        pytest.param("--trace {} --write-policy now", "write_back", id="no such policy"),
        pytest.param("--trace {} --max-running 0", "--max-running 0: should be", id="no rows"),
        pytest.param("--trace {} --page-size 24", "power of two", id="an odd page"),
        pytest.param(
            "--trace {} --block-tokens 16 --snapshot-grid 24",
            "multiple of the page size",
            id="a grid off pages",
        ),
        pytest.param("--trace {} --plot /nowhere/x.png", "no such folder", id="no folder"),
        pytest.param("--trace {} --snapshot-share 5", "between 0 and 1", id="more than all"),
        pytest.param("--trace {} --snapshot-share nan", "between 0 and 1", id="no share at all"),
        pytest.param("--generate x --turns inf", "--turns inf: should be", id="talk without end"),
        pytest.param("--generate /nowhere/x", "No such file", id="nowhere to write"),
    ],
)
def test_a_mistake_is_one_line(
    trace: Path, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *flags.format(trace).split()]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert words in said.err


def test_the_help_names_each_choice_and_each_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "--format auto|mooncake|lifecycle",
        "--max-running INTEGER Requests that a worker runs at once. [default: (32)]",
        "--no-junctions A snapshot where paths part. [default: (True)]",
        "`--generate` makes a trace",
    ):
        assert words in said
    assert "{}" not in said


def test_a_sweep_too_large_is_refused_before_it_starts(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = ",".join(str(64 + i) for i in range(300))
    assert run(f"simulate --trace {trace} --block-tokens 16 --sweep slots={many}".split()) == 2
    assert "256 are the most" in capsys.readouterr().err
