"""The numbers of tensors in blocks, in float32, with numpy alone: bit for bit those of ggml."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ferryman.gguf.dequantisation import short_blocks, super_blocks
from ferryman.gguf.dequantisation.short_blocks import Blocks, Floats
from ferryman.gguf.tensor_types import TensorType

# Numbers that are made at once, so that the intermediate arrays stay small.
_NUMBERS_AT_ONCE = 1 << 20

DEQUANTISERS: Mapping[str, Callable[[Blocks], Floats]] = {
    "Q4_0": short_blocks.q4_0,
    "Q4_1": short_blocks.q4_1,
    "Q5_0": short_blocks.q5_0,
    "Q5_1": short_blocks.q5_1,
    "Q8_0": short_blocks.q8_0,
    "Q2_K": super_blocks.q2_k,
    "Q3_K": super_blocks.q3_k,
    "Q4_K": super_blocks.q4_k,
    "Q5_K": super_blocks.q5_k,
    "Q6_K": super_blocks.q6_k,
    "IQ4_NL": short_blocks.iq4_nl,
    "IQ4_XS": super_blocks.iq4_xs,
    "MXFP4": short_blocks.mxfp4,
}
"""Blocks [blocks, block_bytes] to numbers [blocks, block_len], by the name of their type."""


def dequantised(kind: TensorType, content: NDArray[np.uint8]) -> Floats:
    """The numbers [blocks · block_len] in float32 of whole blocks, given as their bytes [bytes]."""
    read = DEQUANTISERS[kind.name]
    blocks = content.reshape(-1, kind.block_bytes)
    numbers = np.empty((len(blocks), kind.block_len), dtype=np.float32)
    step = _NUMBERS_AT_ONCE // kind.block_len
    for start in range(0, len(blocks), step):
        numbers[start : start + step] = read(np.ascontiguousarray(blocks[start : start + step]))
    return numbers.reshape(-1)
