"""Super-blocks of 256 numbers: scales of 16 or 32 numbers are codes themselves.

    Q2_K, Q4_K, Q5_K      x = (d · scale) · q - (dmin · least)
    Q3_K, Q6_K            x = (d · scale) · (q - half)        half = 4, 32
    IQ4_XS                x = (d · scale) · table[q]

Q2_K, Q3_K, Q6_K have 16 scales of 16 numbers each; Q4_K, Q5_K, IQ4_XS have 8 of 32, in 6 bits.
(Layouts: ggml, ggml-common.h.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ferryman.gguf.dequantisation.short_blocks import UNEVEN, Blocks, Floats, halves, wide

_Q2_K = np.dtype([("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
_Q3_K = np.dtype([("third", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)])
Q5_K = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", 12),
        ("fifth", "u1", 32),
        ("codes", "u1", 128),
    ]
)
IQ4_XS = np.dtype([("d", "<f2"), ("upper", "<u2"), ("lower", "u1", 4), ("codes", "u1", (8, 16))])
Q6_K = np.dtype([("codes", "u1", 128), ("upper", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def planes(content: NDArray[np.uint8], run: int, bits: int) -> NDArray[np.uint8]:
    """Codes [blocks, 256 or less] of `bits` bits: each run of bytes has its lowest codes first,
    then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    runs = content.reshape(len(content), -1, 1, run) >> shifts[:, None]
    codes: NDArray[np.uint8] = runs & np.uint8((1 << bits) - 1)
    return codes.reshape(len(content), -1)


def _by_scale(codes: NDArray[np.uint8], num_scales: int) -> Floats:
    return codes.reshape(len(codes), num_scales, -1).astype(np.float32)


def six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The 8 scales and 8 least values, each in 6 bits, of 12 bytes [blocks, 12].

    The first 4 are the lower bits of bytes 0 to 3 and 4 to 7; the last 4 have their lower bits in
    bytes 8 to 11, and their upper ones above the first.
    """
    low, least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 0x3F, (rest & 0xF) | (low >> 6 << 4)], axis=1)
    leasts = np.concatenate([least & 0x3F, (rest >> 4) | (least >> 6 << 4)], axis=1)
    return scales, leasts


def _stepped(steps: Floats, codes: Floats) -> Floats:
    numbers: Floats = steps[:, :, None] * codes
    return numbers.reshape(len(numbers), -1)


def joined(*of_bits: tuple[NDArray[np.uint8], int]) -> NDArray[np.uint8]:
    """Codes of planes of bits, each with the number of bits below it."""
    codes = [plane << np.uint8(below) for plane, below in of_bits]
    whole: NDArray[np.uint8] = np.bitwise_or.reduce(codes)
    return whole


def _with_least(
    blocks: NDArray[np.void],
    scales: NDArray[np.uint8],
    leasts: NDArray[np.uint8],
    codes: NDArray[np.uint8],
) -> Floats:
    by_scale = _by_scale(codes, scales.shape[1])
    steps = (wide(blocks["d"]) * scales.astype(np.float32))[:, :, None]
    least = wide(blocks["dmin"]) * leasts.astype(np.float32)
    return (steps * by_scale - least[:, :, None]).reshape(len(blocks), -1)


def q2_k(content: Blocks) -> Floats:
    blocks = content.view(_Q2_K)[:, 0]
    scales: NDArray[np.uint8] = blocks["scales"] & np.uint8(0xF)
    leasts: NDArray[np.uint8] = blocks["scales"] >> np.uint8(4)
    return _with_least(blocks, scales, leasts, planes(blocks["codes"], 32, 2))


def q3_k(content: Blocks) -> Floats:
    """The third bit of a code is set where nothing is to be taken away."""
    blocks = content.view(_Q3_K)[:, 0]
    packed = blocks["scales"]
    low = np.concatenate([packed[:, :8] & 0xF, packed[:, :8] >> 4], axis=1)
    high = planes(packed[:, 8:], 4, 2)
    scales = (low | (high << 4)).astype(np.float32) - 32
    codes = joined((planes(blocks["codes"], 32, 2), 0), (planes(blocks["third"], 32, 1), 2))
    return _stepped(wide(blocks["d"]) * scales, _by_scale(codes, 16) - np.float32(4))


def q4_k(content: Blocks) -> Floats:
    blocks = content.view(Q4_K)[:, 0]
    return _with_least(blocks, *six_bits(blocks["scales"]), planes(blocks["codes"], 32, 4))


def q5_k(content: Blocks) -> Floats:
    blocks = content.view(Q5_K)[:, 0]
    codes = joined((planes(blocks["codes"], 32, 4), 0), (planes(blocks["fifth"], 32, 1), 4))
    return _with_least(blocks, *six_bits(blocks["scales"]), codes)


def q6_k(content: Blocks) -> Floats:
    blocks = content.view(Q6_K)[:, 0]
    codes = joined((planes(blocks["codes"], 64, 4), 0), (planes(blocks["upper"], 32, 2), 4))
    steps = wide(blocks["d"]) * blocks["scales"].astype(np.float32)
    return _stepped(steps, _by_scale(codes, 16) - np.float32(32))


def iq4_xs(content: Blocks) -> Floats:
    blocks = content.view(IQ4_XS)[:, 0]
    scales = xs_scales(blocks).astype(np.float32)
    steps: Floats = (wide(blocks["d"]) * scales)[:, :, None]
    numbers: Floats = steps * UNEVEN[halves(blocks["codes"])]
    return numbers.reshape(len(blocks), -1)


def xs_scales(blocks: NDArray[np.void]) -> NDArray[np.int8]:
    """The 8 scales of each block of IQ4_XS, -32 to 31."""
    lower = np.stack([blocks["lower"] & 0xF, blocks["lower"] >> 4], axis=-1).reshape(-1, 8)
    upper = (blocks["upper"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales: NDArray[np.int8] = (lower | (upper << 4)).astype(np.int8) - np.int8(32)
    return scales
