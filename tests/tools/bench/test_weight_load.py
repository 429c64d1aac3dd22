"""The bench of loading loads every byte of its checkpoint, and reads every byte beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.bench.__main__ import run
from tools.bench.weight_load import LoadBenchOptions

from tools.bench import weight_load

SMALL = LoadBenchOptions(num_bytes=2_000_000, num_tensors=90, threads=2, repeats=2)


def test_a_load_has_the_tensors_that_the_library_reads(tmp_path: Path) -> None:
    weight_load.write_checkpoint(tmp_path, SMALL)
    expected = load_file(tmp_path / "model.safetensors")
    assert len(expected) == 90
    found = weight_load.load_all(tmp_path, SMALL)
    for names, tensors in zip(SMALL.names, found, strict=True):
        for name, tensor in zip(names, tensors, strict=True):
            assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16))


def test_a_read_beside_it_has_the_same_bytes(tmp_path: Path) -> None:
    weight_load.write_checkpoint(tmp_path, SMALL)
    file = tmp_path / "model.safetensors"
    parts = weight_load.read_all(file, SMALL, weight_load.into_own_memory)
    num_bytes = 90 * SMALL.tensor_bytes
    read = b"".join(tensor.numpy().tobytes() for part in parts for tensor in part)
    assert read == file.read_bytes()[-num_bytes:]
    ends = weight_load.read_all(file, SMALL, weight_load.into_one_buffer)
    assert ends[-1] == file.stat().st_size


@pytest.mark.usefixtures("threads_set_back")
@pytest.mark.parametrize("cold", [(), ("--cold",)])
def test_the_share_of_the_read_speed_is_printed(
    cold: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--size", "2", "--tensors", "80", "--repeats", "2")
    assert run(["loading", *sizes, *cold, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["against"]) for row in said["rows"]] == [
        ("open", ""),
        ("load", "read"),
        ("load", "reused"),
    ]
    assert all(row["ratio"] > 0 for row in said["rows"][1:])
