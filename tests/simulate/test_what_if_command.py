"""`ferryman what-if` as it is typed, on the log of a real cluster.

`recorded/conversations.jsonl` is what `what-if --save` wrote of 60 requests to the demo model with
6 MiB of state for each worker and 1 MiB of host memory (Intel Xeon family 6 model 167, 2 cores),
without events that no simulation reads. Started with 16 MiB, the same cluster reused 88.5 %.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferryman_cli.app import run
from ferryman_launcher.options import demo_model

LOG = Path(__file__).parent / "recorded" / "conversations.jsonl"
MODEL = ("--model", str(demo_model()))
REUSED_LATER = 0.885
POINTS = 0.05


def reported(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run(["what-if", *flags, "--json"]) == 0, "it is to be trusted"
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_log_of_a_cluster_is_met_and_the_setting_gives_what_it_gave(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = reported(capsys, str(LOG), *MODEL, "--with", "host_memory=16M")
    assert report["is_trusted"]
    assert abs(report["simulated"]["reused"] - report["measured"]["reused"]) <= POINTS
    assert 0.5 < report["measured"]["reused"] < REUSED_LATER - 0.1, "host memory was too small"
    (gain,) = report["gains"]
    assert abs(gain["reused"] - REUSED_LATER) <= POINTS
    (change,) = gain["changes"]
    assert change["flag"] == "--host-memory 16M"
    assert change["variable"] == "FERRYMAN_HOST_MEMORY=16M"
    assert change["chart"] == ["hostCache.hostMemory: 16M"]


def test_the_report_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    tried = ("--with", "host_memory=16M", "--with", "prefill_memory_bytes=12M", "--seconds", "60")
    assert run(["what-if", str(LOG), *MODEL, *tried]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("measured", "simulated", "agree", "up --host-memory 16M", "not simulated: draft"):
        assert words in text


def test_a_log_that_was_saved_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, none = str(tmp_path / "saved.jsonl"), ("--seconds", "0")
    first = reported(capsys, str(LOG), *MODEL, *none, "--save", saved)
    assert reported(capsys, saved, *MODEL, *none) == first
    assert first["untried"], "no time was given"


def test_the_latest_requests_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run(["what-if", str(LOG), *MODEL, "--requests", "30", "--seconds", "0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["judged"]) == (30, 15)
    assert not report["is_trusted"], "of 15 requests nobody can tell"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("nowhere.jsonl", "nowhere.jsonl:0: No such file", id="no file"),
        pytest.param("{log}", "say it with --model", id="no model"),
        pytest.param("{log} --model {model} --with draft=ngram", "one token", id="drafts"),
        pytest.param("{log} --model {model} --save /nowhere/x", "/nowhere/x", id="no folder"),
        pytest.param("--state-dir /nowhere", "no cluster runs", id="no cluster"),
        pytest.param("{bad} --model {model}", "bad.jsonl:1: no cluster", id="a spoilt first line"),
        pytest.param("{both} --model {model}", "--worker both", id="workers that do both"),
    ],
)
def test_a_mistake_is_one_line(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, both = tmp_path / "bad.jsonl", tmp_path / "both.jsonl"
    bad.write_text('{"cluster": {"model": ""}}\n')
    text = LOG.read_text()
    lines = LOG.read_text().split("\n")[1:-1]
    ids = {event["role"]: event["worker_id"] for event in map(json.loads, lines)}
    both.write_text(text.replace(ids["decode"], ids["prefill"]))
    typed = line.format(log=LOG, model=demo_model(), bad=bad, both=both)
    assert run(["what-if", *typed.split()]) == 2
    assert words in capsys.readouterr().err
