"""The int8 product by tiles of bfloat16 (AMX), where a processor has them: for any batch.

    y[t, o] = scales[o] · Σ_i codes[o, i] · x[t, i]                              [tokens, out_dim]

Codes lie in panels of 32 outputs, padded with zeros to whole panels and to a multiple of 32 inputs:

    panels[o // 32][i][o % 32]                                    [panels, inputs, 32], int8

They become pairs of bfloat16, which holds them exactly, 32 inputs at a time in the nearest cache,
and up to 32 tokens share each read. One token alone is multiplied by vectors, in the order of
tiles. Activations are never quantised. Sums are float32, scaled and rounded once; a token's bits do
not depend on the other tokens, nor on their number, nor on threads. The processor takes numbers
below 1.2e-38 for zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._code_pairs import WIDTH
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.products._int8_panels_compiled import BLOCK, tile_product_compiled

__all__ = [
    "WIDTH",
    "int8_panel_product",
    "int8_panel_product_reference",
    "panels_of_codes",
]


def panels_of_codes(codes: Tensor, device: torch.device) -> Tensor:
    """The panels of `codes` [out_dim, in_dim] int8, in memory of their own on `device`."""
    out_dim, in_dim = codes.shape
    size = -(-out_dim // WIDTH), -(-in_dim // BLOCK) * BLOCK, WIDTH
    panels = torch.zeros(size, dtype=codes.dtype, device=device)
    whole, rest = divmod(out_dim, WIDTH)
    if whole:
        full = codes[: whole * WIDTH].reshape(whole, WIDTH, in_dim)
        panels[:whole, :in_dim] = full.transpose(1, 2)
    if rest:
        panels[whole, :in_dim, :rest] = codes[whole * WIDTH :].T
    return panels


def int8_panel_product_reference(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    codes = panels.transpose(1, 2).flatten(0, 1)[: len(scales), : x.shape[1]]
    return ((x.double() @ codes.double().T) * scales.double()).to(x.dtype)


def int8_panel_product(x: Tensor, panels: Tensor, scales: Tensor) -> Tensor:
    """The product of x [tokens, in_dim] with `panels_of_codes`; `scales` [out_dim]; both bfloat16,
    on a processor that `has_tiles`."""
    padded = panels.shape[1]
    assert has_tiles(), "without the system's permission a tile ends the process"
    assert x.dtype is scales.dtype is torch.bfloat16, (x.dtype, scales.dtype)
    assert panels.dtype is torch.int8, panels.dtype
    assert panels.is_contiguous(), "as made"
    assert scales.is_contiguous(), "as made"
    assert -(-len(scales) // WIDTH) == len(panels), (scales.shape, panels.shape)
    assert -(-x.shape[1] // BLOCK) * BLOCK == padded, (x.shape, panels.shape)
    if x.shape[1] < padded:
        # Infinity beyond a row's end would not be zero with a code of zero.
        x = F.pad(x, (0, padded - x.shape[1]))
    return tile_product_compiled(x.contiguous(), panels, scales)
