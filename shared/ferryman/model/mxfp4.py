"""MXFP4: blocks of 32 four-bit numbers that share a power of two (OCP Microscaling 1.0, 2023).

    value   = fp4(code) · 2^(scale - 127)
    fp4     = sign · {0, 0.5, 1, 1.5, 2, 3, 4, 6}      (1 bit of sign, 2 of exponent, 1 of mantissa)

A byte holds two codes, the lower four bits first. Every value but the most extreme is exact in
bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.weights import Weights, accumulation_dtype

BLOCK_LEN = 32
SCALE_BIAS = 127
NOT_A_NUMBER = 255

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(weights: Weights, name: str, *shape: int) -> Tensor:
    """The tensor [experts, rows, columns] stored as `<name>_blocks` and `<name>_scales`.

    Blocks lie along the columns. It comes in the model's dtype. Raises ConfigError for a tensor of
    another shape or dtype, and for a scale that stands for not-a-number.
    """
    *leading, columns = shape
    num_blocks = columns // BLOCK_LEN
    blocks = weights.quantised(f"{name}_blocks", *leading, num_blocks, BLOCK_LEN // 2)
    scales = weights.quantised(f"{name}_scales", *leading, num_blocks)
    if bool((scales == NOT_A_NUMBER).any()):
        raise ConfigError(
            f"{weights.checkpoint.folder}: tensor {weights.prefix}{name}_scales holds "
            f"{NOT_A_NUMBER}, which stands for not-a-number"
        )
    return dequantise(blocks, scales, weights.dtype)


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """From uint8 `blocks` [..., blocks, 16] and `scales` [..., blocks] to [..., 32 · blocks]."""
    signed = torch.tensor(
        [*_MAGNITUDES, *(-size for size in _MAGNITUDES)],
        dtype=accumulation_dtype(dtype),
        device=blocks.device,
    )
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    powers = scales.to(torch.int32) - SCALE_BIAS
    values = torch.ldexp(signed[codes.to(torch.int32)], powers[..., None])
    return values.flatten(-2).to(dtype)
