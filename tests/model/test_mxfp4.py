"""Experts in MXFP4 are what the standard and transformers say, and their folders load alike."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.paged_run import PagedRun, Part
from tests.tiny_models import save_random
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ferryman.errors import ConfigError
from ferryman.model.mxfp4 import dequantise
from ferryman.model.registry import load_model

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _fp4(code: int) -> float:
    """One bit of sign, two of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def _random_blocks(rows: int, blocks: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (3, rows, blocks, 16), dtype=torch.uint8)
    return codes, torch.randint(low, high, (3, rows, blocks), dtype=torch.uint8)


def test_every_code_at_every_scale_is_what_the_standard_says() -> None:
    """All 256 bytes in 16 blocks, under each of the 255 scales that are numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)
    expected = [
        _fp4(code) * math.ldexp(1.0, scale - 127)
        for scale in range(255)
        for byte in range(256)
        for code in (byte & 15, byte >> 4)
    ]
    found = dequantise(blocks, scales, torch.float64)
    assert found.shape == (255, 512)
    assert torch.equal(found.flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_blocks_are_what_transformers_makes_of_them(dtype: torch.dtype) -> None:
    """Theirs come transposed: [experts, columns, rows]."""
    torch.manual_seed(4)
    blocks, scales = _random_blocks(10, 3, 30, 220)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = dequantise(blocks, scales, dtype)
    assert found.dtype is dtype
    assert torch.equal(found.transpose(1, 2), theirs)


CONFIG = GptOssConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=9,
    eos_token_id=2,
)


def _both_folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same model, its experts in MXFP4 as published, and dequantised by transformers."""
    plain = save_random(tmp_path / "plain", CONFIG, 0)
    tensors, packed = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, columns, rows = tensors[name].shape
        blocks, scales = _random_blocks(rows, columns // 32, 121, 125)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    others = {name: t for name, t in tensors.items() if f"{name}_blocks" not in packed}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    save_file({**others, **packed}, quantised / "model.safetensors", {"format": "pt"})
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantised / "config.json").write_text(json.dumps(raw))
    return plain, quantised


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_folder_in_mxfp4_has_the_logits_of_the_dequantised_one(
    dtype: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    rng, logits = random.Random(5), []
    prompt = [rng.randrange(61) for _ in range(50)]
    for folder in _both_folders(tmp_path):
        run = PagedRun(load_model(folder, dtype, page_size=8))
        logits.append(run.prefill([Part(run.start(), prompt)])[0])
    assert torch.equal(*logits)
    assert float(logits[0].std()) > 0.01


def _set_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 0] = 255


def _as_floats(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name].float()


def _cut(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    tensors[name] = tensors[name][:, :-1].clone()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(_set_scale, ["layers.1.mlp.experts.down_proj_scales", "255"], id="scale"),
        pytest.param(_as_floats, ["gate_up_proj_blocks", "F32", "U8"], id="dtype"),
        pytest.param(_cut, ["gate_up_proj_scales", "[3, 63, 2]", "[3, 64, 2]"], id="shape"),
        pytest.param(
            lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_blocks"),
            ["down_proj_blocks", "missing"],
            id="missing",
        ),
    ],
)
def test_spoilt_experts_are_refused_by_tensor(
    spoil: Callable[[dict[str, Tensor]], object], named: list[str], tmp_path: Path
) -> None:
    _, folder = _both_folders(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, "float32")
    assert all(word in str(refusal.value) for word in named), refusal.value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ["quantization_config", "gptq", "mxfp4"],
            id="another method",
        ),
        pytest.param({"quantization_config": {}}, ["quantization_config", "mxfp4"], id="no method"),
        pytest.param({"intermediate_size": 48}, ["intermediate_size", "48", "32"], id="ragged"),
        pytest.param({"rope_parameters": None}, ["rope_scaling"], id="no positions"),
        pytest.param({"num_experts_per_tok": 4}, ["num_experts_per_tok"], id="experts"),
        pytest.param({"sliding_window": None}, ["sliding_window"], id="no window"),
        pytest.param({"hidden_act": "gelu"}, ["hidden_act", "gelu"], id="activation"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    change: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    _, folder = _both_folders(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, "float32")
    assert all(word in str(refusal.value) for word in named), refusal.value
