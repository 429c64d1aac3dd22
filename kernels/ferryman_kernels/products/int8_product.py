"""The product with a matrix of int8 codes and a scale for each output, on a CPU.

    y[t, o] = scales[o] · Σ_i codes[o, i] · x[t, i]                              [tokens, out_dim]

Activations are never rounded to so few bits. One token reads the codes once, in a loop that waits
for memory alone: codes become float32 in registers. Many tokens multiply by codes in the dtype of
x, which holds each code exactly, a tile of outputs at a time. Between them torch has a kernel for
bfloat16. Processors with instructions for bytes, or for tiles of bfloat16, have
ways of their own (`int8_quads`, `int8_panels`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.products._int8_product_compiled import one_row_compiled, widen_compiled

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
