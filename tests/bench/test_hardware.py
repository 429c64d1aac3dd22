"""The machine of a measurement is named, and figures of two processors are not compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ferryman.errors import ConfigError
from ferryman_bench.hardware import check_same_processor, machine_json, machine_now
from ferryman_cli.app import run

CPUINFO = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R)  Platinum 8481C
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8

processor\t: 1
model name\t: another
"""


def test_the_processor_is_named_with_the_instructions_that_matter(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO)
    governor = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("powersave\n")
    machine = machine_now(tmp_path)
    assert machine.processor == "Intel(R) Xeon(R) Platinum 8481C (family 6, model 143)"
    assert machine.instructions == (
        "AVX2",
        "AVX-512",
        "AVX-512 VNNI",
        "AVX-512 BF16",
        "AMX BF16",
        "AMX INT8",
    )
    assert machine.governor == "powersave"
    assert "governor powersave, load" in str(machine)


def test_a_machine_that_says_little_is_named_by_its_architecture(tmp_path: Path) -> None:
    machine = machine_now(tmp_path)
    assert machine.processor
    assert (machine.instructions, machine.governor) == ((), "")
    assert "no known vector instructions" in str(machine)


@pytest.mark.parametrize(
    ("name", "value"),
    [("processor", "another"), ("instructions", ["AVX2"]), ("cores", 4_000)],
)
def test_runs_of_two_processors_are_not_compared(name: str, value: object) -> None:
    here = machine_json(machine_now())
    check_same_processor(here, {**here, "load": 99.0})
    with pytest.raises(ConfigError, match=rf"different processors \({name}: .*measure both here"):
        check_same_processor(here, {**here, name: value})


def test_two_results_are_compared_row_by_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = _result(tmp_path, "old", 20.0), _result(tmp_path, "new", 30.0)
    assert run(["bench", "compare", str(old), str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["new_by_old"] == {"decode": 1.5}


def test_a_result_of_another_processor_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = _result(tmp_path, "old", 20.0, processor="another")
    assert run(["bench", "compare", str(old), str(_result(tmp_path, "new", 30.0))]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the runs are from different processors (processor: another")
    assert said.count("\n") == 1


def test_results_of_two_benches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of another model or number of threads have the same names."""
    old, new = _result(tmp_path, "old", 20.0), _result(tmp_path, "new", 30.0)
    old.write_text(old.read_text().replace("bench", "bench of two threads"))
    assert run(["bench", "compare", str(old), str(new)]) == 2
    said = capsys.readouterr().err
    assert said == "error: the runs are of two benches: 'bench of two threads', 'bench'\n"


@pytest.mark.parametrize("text", ["{}", "no json", "[]"])
def test_a_file_that_no_bench_wrote_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text(text)
    assert run(["bench", "compare", str(tmp_path / "file"), str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def _result(folder: Path, name: str, rate: float, **machine: str) -> Path:
    here = {**machine_json(machine_now()), **machine}
    row = {"name": "decode", "unit": "tok/s", "median": rate}
    file = folder / name
    file.write_text(json.dumps({"title": "bench", "machine": here, "rows": [row]}))
    return file
