"""`ferryman fit`: a table of what fits, and nothing is started or loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import save_tiny_model

from ferryman_cli.app import run
from ferryman_launcher.options import demo_model


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run(["fit", *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_names_weights_state_and_requests_by_role(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["fit", "--memory", "2G", "--decode", "2"]) == 0
    said = capsys.readouterr().out
    for words in ("prefill", "2 × decode", "weights", "a page of 16 tokens", "a recurrent slot"):
        assert words in said
    assert "requests of 4,096 tokens" in said
    assert "requests of 131,072 tokens" in said


def test_the_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, str(demo_model()), "--memory", "2G", "--decode", "2")
    for worker in found["workers"]:
        state = sum(worker["slots"][kind] * worker["slot_bytes"][kind] for kind in worker["slots"])
        assert worker["state_bytes"] == state
        parts = worker["weight_bytes"] + worker["state_bytes"] + worker["step_bytes"]
        assert worker["num_bytes"] == parts
    together = sum(worker["count"] * worker["num_bytes"] for worker in found["workers"])
    assert found["num_bytes"] == together <= 2 << 30


def test_prefill_needs_one_recurrent_slot_a_request_and_decode_three(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill, decode = told(capsys, "--memory", "2G")["workers"]
    assert (prefill["slots_per_request"], decode["slots_per_request"]) == (1, 3)


def test_a_longer_request_than_the_model_takes_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for worker in told(capsys, "--memory", "4G")["workers"]:
        assert worker["max_len"] == 8192
        assert worker["requests"] == {"4096": 32, "32768": 0, "131072": 0}


def test_weights_that_become_int8_are_smaller_and_are_called_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, quantised = (
        told(capsys, "--memory", "2G", "--quantize", name)["workers"] for name in ("none", "int8")
    )
    for one, other in zip(plain, quantised, strict=True):
        assert (one["quantize"], other["quantize"]) == ("none", "int8")
        assert other["weight_bytes"] < one["weight_bytes"]
    assert run(["fit", "--memory", "2G", "--quantize", "int8"]) == 0
    assert "int8 weights" in capsys.readouterr().out


def test_the_settings_of_a_role_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FERRYMAN_DECODE_MEMORY_BYTES", "32M")
    monkeypatch.setenv("FERRYMAN_DECODE_MAX_RUNNING", "4")
    monkeypatch.setenv("FERRYMAN_DECODE_MAX_RESERVED", "3")
    prefill, decode = told(capsys, "--memory", "2G")["workers"]
    assert decode["state_bytes"] <= 32 << 20 < prefill["state_bytes"]
    assert decode["requests"]["4096"] == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "300M"], "and --memory leaves 300M"),
        (["--memory", "2G", "--max-running", "100000"], "--max-running 32 would fit"),
        (["--device", "cuda:7"], "device cuda:7: there is no such card"),
        (["--device", "tpu"], "--device tpu"),
        (["--quantize", "int3"], "--quantize int3: it should be one of none, int8"),
        (["/nope"], "there is no such folder"),
    ],
)
def test_a_refusal_is_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", *flags]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert words in said.err


def test_a_folder_without_safetensors_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path, "granite_nope")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert run(["fit", str(folder)]) == 2
    assert "pytorch_model.bin is a pickle checkpoint" in capsys.readouterr().err
