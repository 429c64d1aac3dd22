"""Products with packed integers on a CPU.

They read a half and a quarter of the bytes of a bfloat16 weight. In ms, a weight of 2048 × 2048 on
one thread, bfloat16, torch's own kernels (torch 2.13, Intel Xeon, AVX-512 without bf16
instructions, November 2026):

    batch               1        4       16       64      512
    bfloat16         0.36     1.61     6.75    34.89   268.38      PackedLinear
    int8             0.27     0.50     2.01    16.05   130.73      Int8Linear
    int4             0.34     0.60     2.32    13.27   106.39      Int4Linear

int8 has loops of its own (`int8_product`): where the processor has AVX-512, one for any number of
tokens, by tiles if it multiplies those; elsewhere one for one token (docs/kernels.md has the
times). The way follows from the processor and the dtype, and without AVX-512 from the number of
tokens; never from a measurement, so workers on like machines have like bits. For int4 torch has no
float32 kernel: there the same call takes 8 to 140 times as long as a float32 product, and panels
of codes are used. Scales are rounded to the model's dtype. In torch's int4 kernel a row's result
does not depend on the other rows of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.weights.quantisation.codes import copied
from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.cpu.processor import multiplies_bfloat16
from ferryman_kernels.products.int8_product import (
    int8_panel_product,
    int8_product,
    int8_quad_product,
    panels_of_codes,
    quads_of_codes,
)
from ferryman_kernels.products.packed_product import reads_panels

INT8_COLUMNS = 16
"""The columns must be a multiple of this: torch 2.13 reads beyond a bfloat16 row's end else."""

INT8_DTYPES = (torch.bfloat16, torch.float32)

WIDENED_FROM = 32
"""The tokens from which bfloat16 instructions multiply widened codes faster (Zen 5)."""
_NEVER = sys.maxsize

INT4_GROUPS = (32, 64, 128, 256)
INT4_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """`codes` [out_dim, in_dim] int8 and `scales` [out_dim], one for each output; `widened_from` as
    in `int8_product`."""

    codes: Tensor
    scales: Tensor
    widened_from: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = int8_product(x, self.codes, self.scales, widened_from=self.widened_from)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Int8PackedLinear:
    """`packed` codes as `product` reads them, `scales` [out_dim] bfloat16."""

    packed: Tensor
    scales: Tensor
    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x, self.packed, self.scales)
        return y if self.bias is None else y.add_(self.bias)


def int8_linear(
    codes: Tensor, scales: Tensor, bias: Tensor | None, device: torch.device
) -> Int8Linear | Int8PackedLinear:
    """The product of this processor, with a copy of `codes` [out_dim, in_dim] on `device`; `scales`
    are in the model's dtype."""
    scales = scales.contiguous()
    if scales.dtype is torch.bfloat16 and has_tiles():
        return Int8PackedLinear(panels_of_codes(codes, device), scales, int8_panel_product, bias)
    if reads_panels(scales.dtype):
        return Int8PackedLinear(quads_of_codes(codes, device), scales, int8_quad_product, bias)
    return Int8Linear(copied(codes, device), scales, _widened_from(scales.dtype), bias)


def _widened_from(dtype: torch.dtype) -> int:
    if dtype is torch.float32:
        return 0
    return WIDENED_FROM if multiplies_bfloat16() else _NEVER


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """`packed` is torch's own layout; `scales_and_zeros` [groups, out_dim, 2] bfloat16."""

    packed: Tensor
    scales_and_zeros: Tensor
    group_len: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_len, self.scales_and_zeros
        )
        return y if self.bias is None else y.add_(self.bias)


def int4_linear(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_len: int, bias: Tensor | None
) -> Int4Linear:
    """A linear of `codes` [out_dim, in_dim], 0 to 15, that mean (code - 8 - zero) · scale; scales
    and zeros are [out_dim, groups]."""
    wide = scales.float()
    offsets = torch.zeros_like(wide) if zeros is None else zeros.float() * -wide
    pairs = torch.stack((wide, offsets), dim=-1).to(torch.bfloat16)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return Int4Linear(packed, pairs.transpose(0, 1).contiguous(), group_len, bias)
