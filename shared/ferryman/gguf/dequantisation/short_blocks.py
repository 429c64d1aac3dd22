"""Blocks of 32 numbers with one scale, and for some a least value.

    Q4_0, Q5_0, Q8_0      x = d · (q - half)        half = 8, 16, 0
    Q4_1, Q5_1            x = d · q + m
    IQ4_NL                x = d · table[q]
    MXFP4                 x = 2^(e - 128) · table[q]        the table is twice that of E2M1

The codes of 4 bits are in 16 bytes: byte i has number i in its lower half, number i + 16 in its
upper one. A fifth bit is bit i of a word. (Layouts and tables: ggml, ggml-common.h; MXFP4: OCP
Microscaling Formats 1.0.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]

Q4_0 = np.dtype([("d", "<f2"), ("codes", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("codes", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("fifth", "<u4"), ("codes", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("fifth", "<u4"), ("codes", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("codes", "i1", 32)])
IQ4_NL = np.dtype([("d", "<f2"), ("codes", "u1", 16)])
MXFP4 = np.dtype([("e", "u1"), ("codes", "u1", 16)])

UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
"""The table of IQ4_NL and IQ4_XS."""
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
# Half of 2^(e - 127); the least two are below the normal numbers.
_HALF_POWERS = np.ldexp(np.float32(1), np.arange(256, dtype=np.int32) - 128)


def halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of 4 bits [..., 2n] from bytes [..., n]: all lower halves, then all upper ones."""
    return np.concatenate([codes & 0xF, codes >> 4], axis=-1)


def wide(column: NDArray[np.float16]) -> Floats:
    """A scale of each block as a column [blocks, 1] in float32."""
    return column.astype(np.float32)[:, None]


def five_bits(blocks: NDArray[np.void]) -> NDArray[np.uint8]:
    """Codes of 5 bits [blocks, 32]."""
    upper = (blocks["fifth"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    codes: NDArray[np.uint8] = halves(blocks["codes"]) | (upper.astype(np.uint8) << np.uint8(4))
    return codes


def q4_0(content: Blocks) -> Floats:
    blocks = content.view(Q4_0)[:, 0]
    return wide(blocks["d"]) * (halves(blocks["codes"]).astype(np.float32) - 8)


def q4_1(content: Blocks) -> Floats:
    blocks = content.view(Q4_1)[:, 0]
    return wide(blocks["d"]) * halves(blocks["codes"]).astype(np.float32) + wide(blocks["m"])


def q5_0(content: Blocks) -> Floats:
    blocks = content.view(Q5_0)[:, 0]
    return wide(blocks["d"]) * (five_bits(blocks).astype(np.float32) - 16)


def q5_1(content: Blocks) -> Floats:
    blocks = content.view(Q5_1)[:, 0]
    return wide(blocks["d"]) * five_bits(blocks).astype(np.float32) + wide(blocks["m"])


def q8_0(content: Blocks) -> Floats:
    blocks = content.view(Q8_0)[:, 0]
    return wide(blocks["d"]) * blocks["codes"].astype(np.float32)


def iq4_nl(content: Blocks) -> Floats:
    blocks = content.view(IQ4_NL)[:, 0]
    return wide(blocks["d"]) * UNEVEN[halves(blocks["codes"])]


def mxfp4(content: Blocks) -> Floats:
    blocks = content.view(MXFP4)[:, 0]
    steps: Floats = _HALF_POWERS[blocks["e"]][:, None]
    return steps * TWICE_E2M1[halves(blocks["codes"])]
