"""Weights as modelopt, llm-compressor and bitsandbytes store them, by the formats' descriptions.

Codes are drawn, and what they stand for is computed number by number with numpy in float64.
`tests/model/test_tool_fixtures.py` has weights that the tools made themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.quantised_folders import QuantisedWeight, Recipe, compressed
from torch import Tensor

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
BNB_FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""The library divides its eight sizes by the largest, 12."""

Numbers = NDArray[np.float64]


def drawn_codes(weight: Tensor, end: int) -> NDArray[np.uint8]:
    return torch.randint(0, end, tuple(weight.shape)).numpy().astype(np.uint8)


def drawn_scales(weight: Tensor, group: int) -> Tensor:
    """[rows, groups], about as large as makes numbers like the weight's."""
    shape = (weight.shape[0], weight.shape[1] // group)
    return (torch.rand(shape) + 0.5) * float(weight.std()) / 3


def meaning(codes: NDArray[np.uint8], table: tuple[float, ...], scales: Tensor) -> Tensor:
    """table[code] · scale of its group, one number after another."""
    numbers, (rows, columns) = np.empty(codes.shape), codes.shape
    of_groups, group = scales.double().numpy(), columns // scales.shape[1]
    for i in range(rows):
        for j in range(columns):
            numbers[i, j] = table[codes[i, j]] * of_groups[i, j // group]
    return torch.from_numpy(numbers)


def in_rows(codes: NDArray[np.uint8]) -> Tensor:
    """Two neighbours of a row in a byte, the even one lower."""
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)


def in_columns(codes: NDArray[np.uint8]) -> Tensor:
    """Two neighbours of a column in a byte, the even one lower."""
    return torch.from_numpy(codes[::2] | codes[1::2] << 4)


def powers(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales as bytes, and the powers of two that they stand for."""
    wanted = drawn_scales(weight, group).log2().round()
    return (wanted + 127).to(torch.uint8), wanted.double().exp2()


def nvfp4(weight: Tensor, group: int = 16) -> QuantisedWeight:
    codes, factor = drawn_codes(weight, 16), torch.tensor(0.0123)
    scales = (drawn_scales(weight, group) / factor / 6).to(torch.float8_e4m3fn)
    stored = {
        "weight": in_rows(codes),
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.7),
        "k_scale": torch.tensor(0.3),
    }
    return QuantisedWeight(stored, meaning(codes, E2M1, scales.double() * factor.double()))


def compressed_nvfp4(weight: Tensor) -> QuantisedWeight:
    codes, factor = drawn_codes(weight, 16), torch.tensor([81.25])
    scales = (drawn_scales(weight, 16) * factor / 6).to(torch.float8_e4m3fn)
    stored = {
        "weight_packed": in_rows(codes),
        "weight_scale": scales,
        "weight_global_scale": factor,
        "input_global_scale": torch.tensor([312.0]),
    }
    return QuantisedWeight(stored, meaning(codes, E2M1, scales.double() / factor.double()))


def mxfp4(weight: Tensor, name: str) -> QuantisedWeight:
    codes, (scales, of_groups) = drawn_codes(weight, 16), powers(weight, 32)
    stored = {name: in_rows(codes), "weight_scale": scales}
    return QuantisedWeight(stored, meaning(codes, E2M1, of_groups))


def mxfp8(weight: Tensor) -> QuantisedWeight:
    scales, of_groups = powers(weight, 32)
    codes = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    numbers = codes.double() * of_groups.repeat_interleave(32, 1)
    return QuantisedWeight({"weight": codes, "weight_scale": scales}, numbers)


def int4_awq(weight: Tensor, group: int = 16) -> QuantisedWeight:
    """Codes are signed, and in pairs of rows; inputs are smoothed."""
    codes, scales = drawn_codes(weight, 16), drawn_scales(weight, group) / 3
    signed = tuple(float(code - 16 if code > 7 else code) for code in range(16))
    stored = {
        "weight": in_columns(codes),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.02),
    }
    return smoothed(QuantisedWeight(stored, meaning(codes, signed, scales)))


def int8_rows(weight: Tensor) -> QuantisedWeight:
    codes = torch.randint(-127, 128, weight.shape).to(torch.int8)
    scales = drawn_scales(weight, weight.shape[1])[:, 0] / 40
    numbers = codes.double() * scales[:, None].double()
    return smoothed(QuantisedWeight({"weight": codes, "weight_scale": scales}, numbers))


def smoothed(weight: QuantisedWeight) -> QuantisedWeight:
    """The same weight, whose inputs are multiplied before the product."""
    factors = (torch.rand(weight.meaning.shape[1]) + 0.5).bfloat16()
    stored = {**weight.stored, "pre_quant_scale": factors}
    return QuantisedWeight(stored, weight.meaning * factors.double())


def fp8_rows(weight: Tensor) -> QuantisedWeight:
    codes, scales = torch.randn(weight.shape).to(torch.float8_e4m3fn), drawn_scales(weight, 1)[:, 0]
    numbers = codes.double() * scales[:, None].double()
    return QuantisedWeight({"weight": codes, "weight_scale": scales}, numbers)


def fp8_blocks(weight: Tensor) -> QuantisedWeight:
    """A scale for 128 × 128, in four axes as the tool has them."""
    codes = torch.randn(weight.shape).to(torch.float8_e4m3fn)
    counts = [-(-length // 128) for length in weight.shape]
    scales = torch.rand(counts[0], 1, counts[1], 1) + 0.1
    rows, columns = (torch.arange(length) // 128 for length in weight.shape)
    numbers = codes.double() * scales[:, 0, :, 0].double()[rows][:, columns]
    return QuantisedWeight({"weight": codes, "weight_scale": scales}, numbers)


def four_bits(
    weight: Tensor, kind: str, table: tuple[float, ...], *, is_nested: bool, block: int = 64
) -> QuantisedWeight:
    """bitsandbytes: blocks of the flattened weight, the even number in the upper bits."""
    codes, count = drawn_codes(weight, 16).flatten(), weight.numel()
    blocks, state = -(-count // block), {"quant_type": kind, "blocksize": block}
    state |= {"dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {"weight": torch.from_numpy(codes[::2] << 4 | codes[1::2])[:, None]}
    stored["weight.quant_map"] = torch.tensor(table, dtype=torch.float32)
    if is_nested:
        stored["weight.absmax"] = torch.randint(0, 256, (blocks,)).to(torch.uint8)
        outer = torch.rand(-(-blocks // 256)) + 0.1
        stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": torch.randn(256) / 9}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.625}
        largest = _nested(stored, 0.625)
    else:
        largest = torch.rand(blocks) * 2
        stored["weight.absmax"] = largest
    text = json.dumps(state).encode()
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text)).to(torch.uint8)
    numbers = np.array([table32(table)[code] for code in codes])
    for n in range(count):
        numbers[n] *= float(largest[n // block])
    return QuantisedWeight(stored, torch.from_numpy(numbers).view(weight.shape))


def table32(table: tuple[float, ...]) -> Numbers:
    return np.array(table, np.float32).astype(np.float64)


def _nested(stored: Mapping[str, Tensor], offset: float) -> Tensor:
    """The largest numbers that codes stand for, each rounded to float32 as the library does."""
    numbers, outer = (stored[f"weight.nested_{name}"].numpy() for name in ("quant_map", "absmax"))
    codes = stored["weight.absmax"].numpy()
    largest = [
        np.float32(np.float32(numbers[code] * outer[n // 256]) + np.float32(offset))
        for n, code in enumerate(codes)
    ]
    return torch.from_numpy(np.array(largest))


def eight_bits(weight: Tensor) -> QuantisedWeight:
    codes = torch.randint(-127, 128, weight.shape).to(torch.int8)
    largest = drawn_scales(weight, weight.shape[1])[:, 0] * 3
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return QuantisedWeight(stored, codes.double() * (largest.double()[:, None] / 127))


def modelopt(algorithm: str, **fields: Any) -> Mapping[str, Any]:
    """A `quantization_config` as modelopt writes it."""
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "model.layers.0.linear_attn*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.41.0"},
        **fields,
    }


def bitsandbytes(bits: int, kind: str = "nf4", **fields: Any) -> Mapping[str, Any]:
    """A `quantization_config` as transformers writes it."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "_load_in_4bit": bits == 4,
        "_load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        **fields,
    }


def alternating(
    *recipes: Callable[[Tensor], QuantisedWeight],
) -> Callable[[Tensor], QuantisedWeight]:
    """Weights by these in turn, as a tool mixes precisions by layer."""
    turn = iter(range(1 << 30))
    return lambda weight: recipes[next(turn) % len(recipes)](weight)


_MIXED = {
    "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.1.self_attn.o_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "model.layers.1.mlp.up_proj": {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
}

TOOL_RECIPES: Mapping[str, Recipe] = {
    "modelopt nvfp4": Recipe(modelopt("NVFP4"), nvfp4, columns=16),
    "modelopt nvfp4, smoothed": Recipe(
        modelopt("NVFP4_AWQ"), lambda weight: smoothed(nvfp4(weight)), columns=16
    ),
    "modelopt nvfp4 in groups of 32": Recipe(
        modelopt("W4A8_NVFP4_FP8"), lambda weight: nvfp4(weight, 32), columns=32
    ),
    "modelopt, mixed": Recipe(
        modelopt("MIXED_PRECISION", quantized_layers=_MIXED),
        alternating(nvfp4, fp8_rows, int8_rows),
        columns=16,
    ),
    "modelopt fp8 by block": Recipe(modelopt("fp8_pb_wo"), fp8_blocks),
    "modelopt mxfp4": Recipe(
        modelopt("W4A8_MXFP4_FP8"), lambda weight: mxfp4(weight, "weight"), columns=32
    ),
    "modelopt mxfp8": Recipe(modelopt("MXFP8"), mxfp8, columns=32),
    "modelopt int4, smoothed": Recipe(modelopt("W4A8_AWQ"), int4_awq, rows=2, columns=16),
    "compressed nvfp4": Recipe(
        compressed(
            "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
        ),
        compressed_nvfp4,
        columns=16,
    ),
    "compressed mxfp4": Recipe(
        compressed(
            "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
        ),
        lambda weight: mxfp4(weight, "weight_packed"),
        columns=32,
    ),
    "bitsandbytes nf4": Recipe(
        bitsandbytes(4), lambda weight: four_bits(weight, "nf4", NF4, is_nested=False), columns=2
    ),
    "bitsandbytes nf4, nested": Recipe(
        bitsandbytes(4, bnb_4bit_use_double_quant=True),
        lambda weight: four_bits(weight, "nf4", NF4, is_nested=True),
        columns=2,
    ),
    "bitsandbytes fp4": Recipe(
        bitsandbytes(4, "fp4"),
        lambda weight: four_bits(weight, "fp4", BNB_FP4, is_nested=False),
        columns=2,
    ),
    "bitsandbytes int8": Recipe(bitsandbytes(8), eight_bits),
}
"""Formats of tools, by a name for tests; one more mapping like `RECIPES`."""
