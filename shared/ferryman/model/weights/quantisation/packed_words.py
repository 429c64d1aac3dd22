"""Integers of 4 or 8 bits in words of 32, the lowest bits first, as GPTQ and others store them."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.model.weights.quantisation.codes import INT4, ByteCodes, Codes, pack_nibbles

BITS = (4, 8)
_WORD_BITS = 32


def words(count: int, bits: int) -> int:
    """The number of words that hold `count` integers."""
    return -(-count * bits // _WORD_BITS)


def unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` integers along the last axis, from 0, as int16."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=packed.device)
    integers = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return integers.flatten(-2)[..., :count].to(torch.int16)


def middle(bits: int) -> int:
    """The integer that stands for zero if there are no zero points."""
    return 1 << (bits - 1)


def signed_codes(unsigned: Tensor, bits: int) -> Codes:
    """Codes [rows, columns] that stand for unsigned - middle(bits)."""
    if bits == 4:
        return pack_nibbles(unsigned, INT4)
    return ByteCodes((unsigned - middle(bits)).to(torch.int8))


def zeros_or_none(zeros: Tensor) -> Tensor | None:
    """Zero points, or None if all are 0, as when a tool quantised symmetrically."""
    return zeros if zeros.is_meta or bool(zeros.any()) else None
