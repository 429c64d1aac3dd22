"""The product with a matrix of int8 codes and a scale for each output, on a CPU.

    y[t, o] = scales[o] · Σ_i codes[o, i] · x[t, i]                              [tokens, out_dim]

Activations are never rounded to so few bits. Codes lie as the processor reads them best.

In rows (`int8_product`), where there is no AVX-512. One token reads the codes once, in a loop that
waits for memory alone: codes become float32 in registers. Many tokens multiply by codes in the
dtype of x, which holds each code exactly, a tile of outputs at a time. Between them torch has a
kernel for bfloat16. A token's bits depend on the number of tokens.

The other two ways are for any number of tokens. Sums are float32, scaled and rounded once; a
token's bits do not depend on the other tokens, nor on their number, nor on threads.

In panels (`int8_panel_product`), where a processor has tiles of bfloat16 (AMX). A panel has 32
outputs, padded with zeros to whole panels and to a multiple of 32 inputs:

    panels[o // 32][i][o % 32]                                    [panels, inputs, 32], int8

They become pairs of bfloat16, which holds them exactly, 32 inputs at a time in the nearest cache,
and up to 32 tokens share each read. One token alone is multiplied by vectors, in the order of
tiles. The processor takes numbers below 1.2e-38 for zero.

In quads (`int8_quad_product`), for float32 and bfloat16 where a processor has AVX-512. A panel has
64 outputs, padded with zeros to whole panels, four inputs side by side:

    quads[o // 64][i // 4][o % 64][i % 4]                          [panels, inputs / 4, 64, 4], int8

The order of sums is that of `packed_product` by vectors. Up to four tokens widen codes in
registers, one of them to float32; for more, codes become a few KiB of pairs of bfloat16, or of
float32, in the nearest cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._code_pairs import WIDTH
from ferryman_kernels.cpu._code_quads import QUAD
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.cpu._lanes import LANES
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.cpu.huge_pages import weight_zeros
from ferryman_kernels.products._int8_panels_compiled import BLOCK, tile_product_compiled
from ferryman_kernels.products._int8_product_compiled import one_row_compiled, widen_compiled
from ferryman_kernels.products._int8_quads_compiled import quad_product_compiled
from ferryman_kernels.products.packed_product import reads_panels

__all__ = [
    "LANES",
    "WIDTH",
    "int8_panel_product",
    "int8_panel_product_reference",
    "int8_product",
    "int8_product_reference",
    "int8_quad_product",
    "int8_quad_product_reference",
    "panels_of_codes",
    "quads_of_codes",
]

# Widened codes that stay in the cache of a core until they are multiplied.
_TILE_BYTES = 1 << 20


def int8_product_reference(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    y = (x.double() @ codes.double().T) * scales.double()
    return y.to(x.dtype)


def int8_product(x: Tensor, codes: Tensor, scales: Tensor, *, widened_from: int) -> Tensor:
    """The product of x [tokens, in_dim] with `codes` [out_dim, in_dim] int8; `scales` [out_dim].

    x and `scales` are both bfloat16 or both float32. From `widened_from` tokens on the codes are
    widened; below that x must be bfloat16, unless it is one token. The caller fixes the number,
    because the bits of a token depend on it.
    """
    assert codes.dtype is torch.int8, codes.dtype
    # A loop reads both at an address: of two dtypes it would take the bits of one for the other.
    assert x.dtype is scales.dtype, (x.dtype, scales.dtype)
    assert x.dtype in (torch.bfloat16, torch.float32), x.dtype
    assert x.shape[1:] == codes.shape[1:], (x.shape, codes.shape)
    assert scales.shape == codes.shape[:1], (scales.shape, codes.shape)
    if len(x) == 1 and serves(x, scales):
        return one_row_compiled(x, codes, scales)
    if len(x) >= widened_from:
        return _widened_product(x, codes, scales)
    assert x.shape[1] % 16 == 0, "torch's kernel reads beyond a row of another length"
    y: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), codes, scales)
    return y


def _widened_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    out_dim, in_dim = codes.shape
    rows = min(out_dim, max(1, _TILE_BYTES // (in_dim * x.itemsize)))
    widened = torch.empty(rows, in_dim, dtype=x.dtype)
    y = torch.empty(len(x), out_dim, dtype=x.dtype)
    for start in range(0, out_dim, rows):
        part = codes[start : start + rows]
        tile = widened[: len(part)]
        _widen(part, tile)
        torch.mul(F.linear(x, tile), scales[start : start + rows], out=y[:, start : start + rows])
    return y


def _widen(codes: Tensor, widened: Tensor) -> None:
    if serves(widened):
        widen_compiled(codes, widened)
    else:
        widened.copy_(codes)


def panels_of_codes(codes: Tensor, device: torch.device) -> Tensor:
    """The panels of `codes` [out_dim, in_dim] int8, in memory of their own on `device`."""
    out_dim, in_dim = codes.shape
    size = -(-out_dim // WIDTH), -(-in_dim // BLOCK) * BLOCK, WIDTH
    panels = weight_zeros(size, codes.dtype, device)
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


def quads_of_codes(codes: Tensor, device: torch.device) -> Tensor:
    """The panels of `codes` [out_dim, in_dim] int8, in memory of their own on `device`; in_dim is a
    multiple of four."""
    out_dim, in_dim = codes.shape
    panels = -(-out_dim // LANES)
    quads = weight_zeros((panels, in_dim // QUAD, LANES, QUAD), codes.dtype, device)
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
    """The product of x [tokens, in_dim] with `quads_of_codes`; `scales` [out_dim]; x and `scales`
    are of one dtype that `reads_panels`."""
    assert reads_panels(x.dtype), "the processor has no such vectors"
    assert scales.dtype is x.dtype, (scales.dtype, x.dtype)
    assert quads.dtype is torch.int8, quads.dtype
    assert quads.is_contiguous(), "as made"
    assert scales.is_contiguous(), "as made"
    assert -(-len(scales) // LANES) == len(quads), (scales.shape, quads.shape)
    assert x.shape[1] == quads.shape[1] * QUAD, (x.shape, quads.shape)
    return quad_product_compiled(x.contiguous(), quads, scales)
