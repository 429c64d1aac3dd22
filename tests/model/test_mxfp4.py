"""Experts in MXFP4 equal the standard and transformers, and both kinds of folders load alike."""

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
from tests.model.differences import difference
from tests.model.paged_run import PagedRun, Part
from tests.mxfp4_folders import random_blocks, save_mxfp4
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.quantisation.codes import FP4, NibbleCodes
from ferryman.model.weights.quantisation.mxfp4 import BLOCK_LEN
from ferryman.model.weights.quantisation.quantised_matrix import QuantisedMatrix, even_groups

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _fp4(code: int) -> float:
    """One bit of sign, two of exponent with bias 1, one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """From `blocks` [..., blocks, 16] and `scales` [..., blocks] to [..., 32 · blocks]."""
    rows, columns = scales.shape[:-1], BLOCK_LEN * scales.shape[-1]
    codes = NibbleCodes(blocks.reshape(-1, columns // 2), columns, FP4)
    powers = scales.reshape(len(codes.packed), -1).view(torch.float8_e8m0fnu)
    groups = even_groups(columns, BLOCK_LEN)
    matrix = QuantisedMatrix(codes, powers, groups, None, dtype, torch.device("cpu"))
    return matrix.dequantised().view(*rows, columns)


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
    """transformers returns them transposed: [experts, columns, rows]."""
    torch.manual_seed(4)
    blocks, scales = random_blocks(10, 3, 30, 220)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = dequantise(blocks, scales, dtype)
    assert found.dtype is dtype
    assert torch.equal(found.transpose(1, 2), theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_a_folder_in_mxfp4_has_the_logits_of_the_dequantised_one(
    dtype: str, tolerance: float, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    rng, logits = random.Random(5), []
    prompt = [rng.randrange(61) for _ in range(50)]
    for folder in save_mxfp4(tmp_path):
        run = PagedRun(load_model(folder, LoadOptions(dtype, page_size=8)))
        logits.append(run.prefill([Part(run.start(), prompt)])[0])
    assert difference(*logits) < tolerance
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
    _, folder = save_mxfp4(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, LoadOptions("float32"))
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
    _, folder = save_mxfp4(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError) as refusal:
        load_model(folder, LoadOptions("float32"))
    assert all(word in str(refusal.value) for word in named), refusal.value
