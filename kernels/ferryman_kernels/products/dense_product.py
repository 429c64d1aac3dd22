"""The product of any number of rows with one weight, in one order of sums on a card.

    y[t, o] = bias[o] + Σ_i weight[o, i] · x[t, i]                               [tokens, out_dim]

Sums are float32 (float64 for float64), rounded once, in an order that follows the weight's shape.
So a row's bits depend on its numbers and the weight alone, which no library of products promises.
On a CPU `packed_product` does the same over panels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.products._dense_product_triton import dense_product_triton, tiles_agree


def dense_product_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = wide_dtype(x.dtype)
    added = None if bias is None else bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), added).to(x.dtype)


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of x [tokens, in_dim] with `weight` [out_dim, in_dim]; `bias` [out_dim] or None;
    all of one dtype."""
    assert x.ndim == 2, x.shape
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
    assert x.dtype is weight.dtype, (x.dtype, weight.dtype)
    if x.is_cuda:
        return dense_product_triton(x, weight, bias)
    return dense_product_reference(x, weight, bias)


def ask_tiles(device: torch.device) -> None:
    """Asks a card once whether its tiles agree. A load does so: a recorded step must not wait."""
    if device.type == "cuda":
        tiles_agree(device)
