"""Weights that modelopt, compressed-tensors and bitsandbytes made are the numbers they say.

`tools/campaigns/quantisation_fixtures.py` wrote the files, with the libraries themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.native import native_config
from tests.quantised_folders import compressed
from tests.tool_recipes import bitsandbytes, modelopt
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import load_format
from ferryman.model.weights.checkpoint import open_checkpoint
from ferryman.model.weights.matrix import Matrix
from ferryman.model.weights.named_weights import FLOATS, Weights
from ferryman.model.weights.quantisation.bitsandbytes import BitsAndBytes
from ferryman.model.weights.quantisation.modelopt import Modelopt

FIXTURES = Path(__file__).parent / "tool_fixtures"
_FLOATS_OF_FOUR = {"type": "float", "num_bits": 4}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "modelopt_nvfp4": modelopt("NVFP4"),
    "modelopt_mxfp4": modelopt("W4A8_MXFP4_FP8"),
    "modelopt_mxfp8": modelopt("MXFP8"),
    "modelopt_int4": modelopt("W4A16_AWQ"),
    "compressed_nvfp4": compressed(
        "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **_FLOATS_OF_FOUR
    ),
    "compressed_mxfp4": compressed(
        "mxfp4-pack-quantized", strategy="group", group_size=32, **_FLOATS_OF_FOUR
    ),
    "bitsandbytes_nf4": bitsandbytes(4),
    "bitsandbytes_nf4_nested": bitsandbytes(4, bnb_4bit_use_double_quant=True),
    "bitsandbytes_fp4": bitsandbytes(4, "fp4"),
    "bitsandbytes_int8": bitsandbytes(8),
}
# The library rounds to float16 before it multiplies by 1 / 127.
TOLERANCES = {"bitsandbytes_int8": 2.0**-10}


def read(folder: Path, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Matrix:
    """The weight of `tensors` by the format of the config `name`."""
    config = {**native_config(), "quantization_config": CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"model.proj.{part}": tensor for part, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    weights = Weights(open_checkpoint(folder), dtype, torch.device("cpu"))
    matrix = load_format(folder).in_codes(weights.under("model"), "proj.weight", 6, 128)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_of_a_tool_is_the_numbers_that_the_tool_says(name: str, tmp_path: Path) -> None:
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    meaning = tensors.pop("meaning").double()
    numbers = read(tmp_path, name, tensors, torch.float64).dequantised()
    assert len(set(meaning.flatten().tolist())) > 16, "the fixture says little"
    # The tool computes in float32: once or twice rounded.
    tolerance = TOLERANCES.get(name, 2.0**-22)
    assert torch.allclose(numbers, meaning, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_its_product_is_that_of_the_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    meaning = tensors.pop("meaning").double()
    linear = read(tmp_path, name, tensors, dtype).linear(None)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ meaning.T
    bound = 2.0**-7 if dtype is torch.bfloat16 else max(1e-5, TOLERANCES.get(name, 0))
    assert float((linear(x).double() - exact).abs().max() / exact.abs().max()) < bound


def _text(state: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


_STATE = "weight.quant_state.bitsandbytes__nf4"
SPOILT = {
    "scales that are no numbers": (
        "modelopt_nvfp4",
        {"weight_scale": torch.full((6, 8), float("nan")).to(torch.float8_e4m3fn)},
        ["proj.weight_scale", "not-a-number"],
    ),
    "groups of another length": (
        "modelopt_nvfp4",
        {"weight_scale": torch.ones(6, 2).to(torch.float8_e4m3fn)},
        ["proj.weight_scale", "[6, 2]", "[6, 8]"],
    ),
    "a factor of zero": (
        "compressed_nvfp4",
        {"weight_global_scale": torch.zeros(1)},
        ["proj.weight_global_scale", "above 0"],
    ),
    "a factor for each row": (
        "modelopt_nvfp4", {"weight_scale_2": torch.ones(6)}, ["proj.weight_scale_2", "[6]"]
    ),
    "powers that are no numbers": (
        "modelopt_mxfp8",
        {"weight_scale": torch.full((6, 4), 255, dtype=torch.uint8)},
        ["proj.weight_scale", "not-a-number"],
    ),
    "dtypes of no layout": (
        "modelopt_int4", {"weight": torch.ones(3, 128).short()}, ["proj.weight", "I16", "U8"]
    ),
    "another algorithm": (
        "modelopt_mxfp8",
        {"weight_scale": torch.tensor(0.5)},
        ["proj.weight", "stored as FP8", "MXFP8"],
    ),
    "inputs with too few factors": (
        "modelopt_nvfp4", {"pre_quant_scale": torch.ones(64)}, ["pre_quant_scale", "[64]", "[128]"]
    ),
    "a state of another shape": (
        "bitsandbytes_nf4", {_STATE: _text({"shape": [128, 6], "blocksize": 64})}, ["'shape'"]
    ),
    "a state without blocks": (
        "bitsandbytes_nf4", {_STATE: _text({"shape": [6, 128]})}, ["'blocksize'"]
    ),
    "a state that is no JSON": (
        "bitsandbytes_nf4", {_STATE: torch.ones(3, dtype=torch.uint8)}, [_STATE, "JSON"]
    ),
    "a table that is none": (
        "bitsandbytes_nf4",
        {"weight.quant_map": torch.full((16,), torch.inf)},
        ["quant_map", "no numbers"],
    ),
    "an offset that is none": (
        "bitsandbytes_nf4_nested",
        {_STATE: _text({"shape": [6, 128], "blocksize": 64, "nested_blocksize": 256})},
        ["'nested_offset'"],
    ),
    "a layout of single cards": (
        "bitsandbytes_int8",
        {"weight_format": torch.tensor(2, dtype=torch.uint8)},
        ["weight_format", "save the model again"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_tensors_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, spoilt, words = SPOILT[case]
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    del tensors["meaning"]
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, name, {**tensors, **spoilt}, torch.float32)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_blocks_that_go_on_from_row_to_row_have_their_scales(tmp_path: Path) -> None:
    """Rows of 24 numbers and blocks of 64: a group is what divides both, 8 numbers."""
    table, count = torch.linspace(-1, 1, 16), 10 * 24
    codes = torch.randint(0, 16, (count,), generator=torch.Generator().manual_seed(2))
    largest = torch.arange(1.0, 5.0)
    stored = {
        "model.proj.weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "model.proj.weight.absmax": largest,
        "model.proj.weight.quant_map": table,
        f"model.proj.{_STATE}": _text({"shape": [10, 24], "blocksize": 64}),
    }
    config = {**native_config(), "quantization_config": bitsandbytes(4)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    weights = Weights(open_checkpoint(tmp_path), torch.float64, torch.device("cpu"))
    matrix = load_format(tmp_path).in_codes(weights, "model.proj.weight", 10, 24)
    assert matrix is not None
    exact = [float(table[code]) * float(largest[n // 64]) for n, code in enumerate(codes)]
    assert matrix.dequantised().flatten().tolist() == exact


_LAYER = {"quant_algo": "NVFP4", "group_size": 16}
QUANT_FILES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "vipertsniper/DeepSeek-R1-Distill-Qwen-32B-NVFP4": (
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
         "exclude_modules": ["lm_head"]},
        ("NVFP4",),
    ),
    "FINAL-Bench/Darwin-9B-MFP4": (
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
         "exclude_modules": ["lm_head", "model.layers.0.linear_attn*"]},
        ("NVFP4",),
    ),
    "apandacoding/Step-3.5-Flash-NVFP4": (
        {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
         "quantized_layers": {
             "model.layers.0.mlp.up_proj": {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
             "model.layers.3.moe.up_proj": _LAYER, "model.layers.3.moe.down_proj": _LAYER,
         }},
        ("NVFP4", "W8A8_SQ_PER_CHANNEL"),
    ),
}  # fmt: skip
"""The `quantization` of hf_quant_config.json as these repositories have it, some layers of many."""


@pytest.mark.parametrize("model", QUANT_FILES)
def test_a_file_of_its_own_says_the_format(model: str, tmp_path: Path) -> None:
    """As older releases of modelopt wrote it, and config.json says nothing."""
    quantisation, algorithms = QUANT_FILES[model]
    said_apart = {"producer": {"name": "modelopt"}, "quantization": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(native_config()))
    assert load_format(tmp_path) == FLOATS
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said_apart))
    assert load_format(tmp_path) == Modelopt(algorithms)


def test_a_format_in_the_part_for_text_is_not_read_past(tmp_path: Path) -> None:
    """As models with a part for images have it."""
    nested = {"text_config": {"quantization_config": bitsandbytes(8)}}
    (tmp_path / "config.json").write_text(json.dumps({**native_config(), **nested}))
    assert load_format(tmp_path) == BitsAndBytes(8)


def test_the_first_checkpoints_of_bitsandbytes_name_no_method(tmp_path: Path) -> None:
    fields = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(
        json.dumps({**native_config(), "quantization_config": fields})
    )
    assert load_format(tmp_path) == BitsAndBytes(4)
