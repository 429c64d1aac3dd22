"""GGUF files hold what was written, and every tensor of a model folder gets into one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tools.bench.gguf_reader import GgufReader
from tests.tools.bench.tiny_shapes import TINY, save_tiny
from tools.bench.gguf.container import (
    GgufModel,
    GgufTensor,
    GgufType,
    Setting,
    quantise_q8_0,
    write_gguf,
)
from tools.bench.gguf.conversion import convert_folder
from torch import Tensor

from ferryman.errors import ConfigError


def test_a_file_holds_settings_of_every_type_and_tensors_from_the_innermost_axis(
    tmp_path: Path,
) -> None:
    values = torch.arange(64.0).view(2, 32)
    norm = torch.tensor([0.1, 0.2, 0.3])
    settings: dict[str, Setting] = {
        "block_count": 3,
        "rope.freq_base": 0.5,
        "has_rope": True,
        "name": "ü",
        "attention.head_count_kv": [0, 4],
        "pattern": [True, False],
    }
    tensors = (GgufTensor("norm", norm, False), GgufTensor("weight", values, True))
    file = tmp_path / "gguf"
    write_gguf(file, GgufModel("tiny", settings, tensors), GgufType.BF16)
    read, found = GgufReader(file).read()
    assert read == {
        "general.architecture": "tiny",
        "tokenizer.ggml.model": "none",
        **{f"tiny.{name}": value for name, value in settings.items()},
    }
    assert (found["norm"].sizes, found["norm"].kind) == ((3,), 0)
    assert _numbers(found["norm"].content, torch.float32, 3).equal(norm)
    assert (found["weight"].sizes, found["weight"].kind) == ((32, 2), 30)
    assert _numbers(found["weight"].content, torch.bfloat16, 64).equal(values.flatten().bfloat16())


def test_q8_0_keeps_the_largest_number_of_each_block_and_rounds_halves_away_from_zero() -> None:
    block = torch.zeros(32)
    block[:4] = torch.tensor([-127.0, 2.5, -3.5, 60.0])
    ((first, second),) = quantise_q8_0(torch.cat([block, torch.zeros(32)])[None]).tolist()
    # The step is 1, in float16 0x3C00; -127, 3, -4, 60 as int8.
    assert first[:6] == [0x00, 0x3C, 256 - 127, 3, 256 - 4, 60]
    assert second == [0] * 34


def test_q8_0_is_as_near_as_half_a_step() -> None:
    rows = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    found = quantise_q8_0(rows)
    steps = found[..., :2].contiguous().view(torch.float16).float()
    read = (found[..., 2:].view(torch.int8) * steps).flatten(1)
    bound = rows.view(3, 3, 32).abs().amax(-1) / 127
    # Half a step, and the rounding of the step to float16 on up to 127 of them.
    assert ((read - rows).view(3, 3, 32).abs().amax(-1) <= bound * (0.5 + 127 / 2048)).all()


def test_rows_that_q8_0_cannot_cut_are_refused_by_name(tmp_path: Path) -> None:
    model = GgufModel("tiny", {}, (GgufTensor("odd", torch.zeros(2, 33), True),))
    with pytest.raises(ConfigError, match="odd: rows of 33 numbers"):
        write_gguf(tmp_path / "gguf", model, GgufType.Q8_0)


@pytest.mark.parametrize("name", TINY)
def test_every_number_of_a_model_gets_into_its_file(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    convert_folder(tmp_path, "float32")
    _, written = GgufReader(tmp_path / "gguf").read()
    stored = load_file(tmp_path / "model.safetensors")
    total = sum(_size(tensor.sizes) for tensor in written.values())
    assert total == sum(values.numel() for values in stored.values())


def test_a_tensor_that_the_conversion_does_not_know_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "granite-hybrid")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.mamba.extra": torch.zeros(3)}, file)
    with pytest.raises(ConfigError, match=r"knows no tensors model\.layers\.0\.mamba\.extra"):
        convert_folder(tmp_path, "float32")


def test_a_model_that_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "granite-hybrid")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.1, 1.0]}))
    with pytest.raises(ConfigError, match="time limits"):
        convert_folder(tmp_path, "float32")


def _numbers(content: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype, count=count)


def _size(sizes: tuple[int, ...]) -> int:
    return int(torch.tensor(sizes).prod())
