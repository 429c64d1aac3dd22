"""The int8 product where the processor multiplies bytes (AVX512-VNNI) and no tiles: for any batch.

    y[t, o] = scales[o] · Σ_i codes[o, i] · x[t, i]                              [tokens, out_dim]

Codes lie in panels of 64 outputs, padded with zeros to whole panels, four inputs side by side:

    quads[o // 64][i // 4][o % 64][i % 4]                          [panels, inputs / 4, 64, 4], int8

Activations are never quantised. Up to four tokens become integers with one power of two,

    v[i] = round(unit · x[i]),    2²¹ <= unit · max |x| < 2²²

in three digits of base 256, which the processor multiplies by codes without a sign:

    Σ code · v = Σ_k 256ᵏ · Σ (code + 128) · digit_k(v) - 128 · Σ v

bfloat16 has 8 bits, so inputs down to 1/16,384 of the greatest are exact, and smaller ones are
within 1/4,000,000 of it: less than float32 loses in a sum beside it. These sums are exact.

For more tokens codes become pairs of bfloat16, which holds them exactly, a part of a panel at a
time in the nearest cache. Their sums are float32, scaled and rounded once; a token's bits do not
depend on the other tokens, nor, from five on, on their number. The processor's own product of
pairs takes numbers below 1.2e-38 for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels.cpu._code_quads import HAS_BYTE_DOTS, QUAD
from ferryman_kernels.cpu._lanes import LANES
from ferryman_kernels.products._int8_quads_compiled import (
    digit_product_compiled,
    pair_product_compiled,
)

__all__ = [
    "HAS_BYTE_DOTS",
    "LANES",
    "MOST_INPUTS",
    "int8_quad_product",
    "int8_quad_product_reference",
    "quads_of_codes",
]

MOST_INPUTS = (1 << 31) // (255 * 128)
"""The inputs of which a sum of digits never leaves its 32 bits."""
# The most tokens that are faster as integers: each takes three products where pairs take two.
_MOST_DIGITS = 4


def quads_of_codes(codes: Tensor, device: torch.device) -> Tensor:
    """The panels of `codes` [out_dim, in_dim] int8, in memory of their own on `device`; in_dim is a
    multiple of four."""
    out_dim, in_dim = codes.shape
    panels = -(-out_dim // LANES)
    quads = torch.zeros((panels, in_dim // QUAD, LANES, QUAD), dtype=codes.dtype, device=device)
    whole, rest = divmod(out_dim, LANES)
    parts = codes.reshape(out_dim, -1, QUAD)
    if whole:
        quads[:whole] = parts[: whole * LANES].view(whole, LANES, -1, QUAD).transpose(1, 2)
    if rest:
        quads[whole, :, :rest] = parts[whole * LANES :].transpose(0, 1)
    return quads


def int8_quad_product_reference(x: Tensor, quads: Tensor, scales: Tensor) -> Tensor:
    codes = quads.transpose(1, 2).flatten(2).flatten(0, 1)[: len(scales)]
    return ((x.double() @ codes.double().T) * scales.double()).to(x.dtype)


def int8_quad_product(x: Tensor, quads: Tensor, scales: Tensor) -> Tensor:
    """The product of x [tokens, in_dim] with `quads_of_codes`, of at most MOST_INPUTS inputs, and
    `scales` [out_dim]; both bfloat16, where the processor `HAS_BYTE_DOTS`."""
    assert HAS_BYTE_DOTS, "there is no such instruction"
    assert x.dtype is scales.dtype is torch.bfloat16, (x.dtype, scales.dtype)
    assert quads.dtype is torch.int8, quads.dtype
    assert quads.is_contiguous(), "as made"
    assert scales.is_contiguous(), "as made"
    assert -(-len(scales) // LANES) == len(quads), (scales.shape, quads.shape)
    assert x.shape[1] == quads.shape[1] * QUAD <= MOST_INPUTS, (x.shape, quads.shape)
    if not len(x):
        return x.new_empty((0, len(scales)))
    product = digit_product_compiled if len(x) <= _MOST_DIGITS else pair_product_compiled
    return product(x.contiguous(), quads, scales)
