"""Blocks become the numbers that ggml makes of them, bit for bit, whatever their bytes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ferryman.gguf.dequantisation import DEQUANTISERS, dequantised
from ferryman.gguf.tensor_types import TYPE_NAMES, TensorType

UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_PLACES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""The bytes at which a block has its numbers of 16 bits."""


def random_blocks(kind: TensorType, count: int) -> np.ndarray:
    """Blocks [count, block_bytes] with random codes and finite scales."""
    rng = np.random.default_rng(len(kind.name) + kind.block_bytes)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for place in SCALE_PLACES[kind.name]:
        scales = rng.standard_normal(count).astype("<f2")
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks


def half(block: Sequence[int], at: int) -> np.float32:
    return np.float32(np.frombuffer(bytes(block[at : at + 2]), "<f2")[0])


def nibble(block: Sequence[int], at: int, i: int) -> int:
    """Code i of the 32 in 16 bytes."""
    return block[at + i % 16] >> (4 * (i // 16)) & 15


def six_bits(block: Sequence[int], at: int, j: int) -> tuple[int, int]:
    """Scale j and least value j of the 8 in 12 bytes."""
    if j < 4:
        return block[at + j] & 63, block[at + j + 4] & 63
    low, upper = block[at + j + 4], (block[at + j - 4] >> 6, block[at + j] >> 6)
    return low & 15 | upper[0] << 4, low >> 4 | upper[1] << 4


def q3_scale(block: Sequence[int], at: int, j: int) -> int:
    low = block[at + j % 8] >> (4 * (j // 8)) & 15
    return (low | (block[at + 8 + j % 4] >> (2 * (j // 4)) & 3) << 4) - 32


def xs_scale(block: Sequence[int], j: int) -> int:
    upper = int.from_bytes(bytes(block[2:4]), "little") >> (2 * j) & 3
    return (block[4 + j // 2] >> (4 * (j % 2)) & 15 | upper << 4) - 32


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


f32 = np.float32


def least_k(b: Sequence[int], i: int, q: int) -> np.float32:
    scale, least = six_bits(b, 4, i // 32)
    return half(b, 0) * f32(scale) * f32(q) - half(b, 2) * f32(least)


def q2_number(b: Sequence[int], i: int) -> np.float32:
    q = b[16 + i // 128 * 32 + i % 32] >> (2 * (i % 128 // 32)) & 3
    scale, least = b[i // 16] & 15, b[i // 16] >> 4
    return half(b, 80) * f32(scale) * f32(q) - half(b, 82) * f32(least)


def q3_number(b: Sequence[int], i: int) -> np.float32:
    q = b[32 + i // 128 * 32 + i % 32] >> (2 * (i % 128 // 32)) & 3
    is_kept = b[i % 32] >> (i // 32) & 1
    return half(b, 108) * f32(q3_scale(b, 96, i // 16)) * f32(q - (0 if is_kept else 4))


def q4_k_number(b: Sequence[int], i: int) -> np.float32:
    return least_k(b, i, b[16 + i // 64 * 32 + i % 32] >> (4 * (i % 64 // 32)) & 15)


def q5_k_number(b: Sequence[int], i: int) -> np.float32:
    low = b[48 + i // 64 * 32 + i % 32] >> (4 * (i % 64 // 32)) & 15
    return least_k(b, i, low | (b[16 + i % 32] >> (i // 32) & 1) << 4)


def q6_number(b: Sequence[int], i: int) -> np.float32:
    low = b[i // 128 * 64 + i % 64] >> (4 * (i % 128 // 64)) & 15
    high = b[128 + i // 128 * 32 + i % 32] >> (2 * (i % 128 // 32)) & 3
    return half(b, 208) * f32(signed(b[192 + i // 16])) * f32((low | high << 4) - 32)


def fifth(b: Sequence[int], at: int, i: int) -> int:
    return (b[at + i // 8] >> (i % 8) & 1) << 4


def xs_number(b: Sequence[int], i: int) -> np.float32:
    return half(b, 0) * f32(xs_scale(b, i // 32)) * f32(UNEVEN[nibble(b, 8 + i // 32 * 16, i % 32)])


def mxfp4_number(b: Sequence[int], i: int) -> np.float32:
    q = nibble(b, 1, i)
    return f32(2.0 ** (b[0] - 127) * (E2M1[q & 7] * (-1.0 if q > 7 else 1.0)))


NAIVE: dict[str, Callable[[Sequence[int], int], np.float32]] = {
    "Q4_0": lambda b, i: half(b, 0) * f32(nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * f32(nibble(b, 4, i)) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * f32((nibble(b, 6, i) | fifth(b, 2, i)) - 16),
    "Q5_1": lambda b, i: half(b, 0) * f32(nibble(b, 8, i) | fifth(b, 4, i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * f32(signed(b[2 + i])),
    "Q2_K": q2_number,
    "Q3_K": q3_number,
    "Q4_K": q4_k_number,
    "Q5_K": q5_k_number,
    "Q6_K": q6_number,
    "IQ4_NL": lambda b, i: half(b, 0) * f32(UNEVEN[nibble(b, 2, i)]),
    "IQ4_XS": xs_number,
    "MXFP4": mxfp4_number,
}


@pytest.mark.parametrize("name", DEQUANTISERS)
def test_every_number_is_that_of_the_layout(name: str) -> None:
    kind = TYPE_NAMES[name]
    blocks = random_blocks(kind, 8)
    expected = [NAIVE[name](block, i) for block in blocks.tolist() for i in range(kind.block_len)]
    actual = dequantised(kind, blocks.reshape(-1))
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, np.array(expected, dtype=np.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the package's own, for MXFP4
@pytest.mark.parametrize("name", DEQUANTISERS)
def test_every_number_is_that_of_the_published_package(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf; it is llama.cpp's own")
    kind = TYPE_NAMES[name]
    # More than are made at once, so that the cuts are seen, too.
    blocks = random_blocks(kind, (1 << 20) // kind.block_len + 3)
    published = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1)
    np.testing.assert_array_equal(dequantised(kind, blocks.reshape(-1)), published)
