"""The codes and the scales of blocks apart from each other, for products that keep them.

    number = code · (d · s) + m · t        a code of 4 bits stands for an entry of its type's table

d and m are 16 bits a block: float16, or for MXFP4 the upper half of a float32. s and t are bytes of
16 or 32 numbers of a super-block. Q5_0, Q5_1, Q5_K and Q6_K count their codes from 0; m of the K
types is -dmin, which has the same bits but the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ferryman.gguf.dequantisation import short_blocks as short
from ferryman.gguf.dequantisation import super_blocks as long
from ferryman.gguf.dequantisation.short_blocks import Blocks

Codes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
_SIGN = np.uint16(0x8000)


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """`codes` [blocks, block_len]; `scales` d [blocks], `leasts` m; `scale_codes` s [blocks,
    groups], those of Q6_K and IQ4_XS with a sign, `least_codes` t. None where a type has none."""

    codes: Codes
    scales: Halves
    leasts: Halves | None = None
    scale_codes: Codes | None = None
    least_codes: Codes | None = None


def _with_half(kind: np.dtype[np.void]) -> Callable[[Blocks], BlockCodes]:
    """The reader of blocks with nothing but d, maybe m, and codes of 4 bits."""

    def read(content: Blocks) -> BlockCodes:
        blocks = content.view(kind)[:, 0]
        leasts = _bits(blocks["m"]) if "m" in (kind.names or ()) else None
        return BlockCodes(short.halves(blocks["codes"]), _bits(blocks["d"]), leasts)

    return read


def _with_fifth(kind: np.dtype[np.void]) -> Callable[[Blocks], BlockCodes]:
    def read(content: Blocks) -> BlockCodes:
        blocks = content.view(kind)[:, 0]
        leasts = _bits(blocks["m"]) if "m" in (kind.names or ()) else None
        return BlockCodes(short.five_bits(blocks), _bits(blocks["d"]), leasts)

    return read


def _q8_0(content: Blocks) -> BlockCodes:
    blocks = content.view(short.Q8_0)[:, 0]
    return BlockCodes(blocks["codes"].view(np.uint8), _bits(blocks["d"]))


def _mxfp4(content: Blocks) -> BlockCodes:
    """2^(e - 128) is normal from e = 2 on; below it is a bit of the mantissa."""
    blocks = content.view(short.MXFP4)[:, 0]
    exponent = blocks["e"].astype(np.int16)
    bits = np.where(exponent > 1, (exponent - 1) << 7, 0x20 << exponent.clip(max=1))
    return BlockCodes(short.halves(blocks["codes"]), bits.astype(np.uint16))


def _q4_k(content: Blocks) -> BlockCodes:
    blocks = content.view(long.Q4_K)[:, 0]
    return _with_leasts(blocks, long.planes(blocks["codes"], 32, 4))


def _q5_k(content: Blocks) -> BlockCodes:
    blocks = content.view(long.Q5_K)[:, 0]
    lower, fifth = long.planes(blocks["codes"], 32, 4), long.planes(blocks["fifth"], 32, 1)
    return _with_leasts(blocks, long.joined((lower, 0), (fifth, 4)))


def _with_leasts(blocks: NDArray[np.void], codes: Codes) -> BlockCodes:
    scales, leasts = long.six_bits(blocks["scales"])
    return BlockCodes(codes, _bits(blocks["d"]), _bits(blocks["dmin"]) ^ _SIGN, scales, leasts)


def _q6_k(content: Blocks) -> BlockCodes:
    blocks = content.view(long.Q6_K)[:, 0]
    lower, upper = long.planes(blocks["codes"], 64, 4), long.planes(blocks["upper"], 32, 2)
    codes = long.joined((lower, 0), (upper, 4))
    return BlockCodes(codes, _bits(blocks["d"]), None, blocks["scales"].view(np.uint8))


def _iq4_xs(content: Blocks) -> BlockCodes:
    blocks = content.view(long.IQ4_XS)[:, 0]
    codes = short.halves(blocks["codes"]).reshape(len(blocks), -1)
    return BlockCodes(codes, _bits(blocks["d"]), None, long.xs_scales(blocks).view(np.uint8))


def _bits(halves: NDArray[np.float16]) -> Halves:
    return np.ascontiguousarray(halves).view(np.uint16)


BLOCK_READERS: Mapping[str, Callable[[Blocks], BlockCodes]] = {
    "Q4_0": _with_half(short.Q4_0),
    "Q4_1": _with_half(short.Q4_1),
    "Q5_0": _with_fifth(short.Q5_0),
    "Q5_1": _with_fifth(short.Q5_1),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _with_half(short.IQ4_NL),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Readers of contiguous blocks [blocks, block_bytes], by the name of their type."""
