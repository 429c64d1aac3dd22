"""The product of any number of tokens with a weight in panels, in one order of sums.

    y[t, o] = bias[o] + Σ_i weight[o, i] · x[t, i]                               [tokens, out_dim]

A panel has 64 outputs, in bfloat16 with two inputs side by side, padded with zeros to whole panels
and, in bfloat16, to a multiple of 32 inputs:

    float32     panels[o // 64][i][o % 64]                  [panels, inputs, 64]
    bfloat16    panels[o // 64][i // 2][o % 64][i % 2]      [panels, inputs / 2, 64, 2]

Sums are float32, rounded once. Each has one order, so a token's bits depend on its numbers and the
weight alone: not on the other tokens, their number or its place among them, nor on threads. It is
the order of the inputs, in bfloat16 of a pair the second first; a processor with AVX512-BF16
multiplies pairs itself, with the same bits, but numbers below 1.2e-38 are zero. A processor with
tiles (AMX) has an order of its own in bfloat16, for any number of tokens: of 32 inputs it adds the
first of each pair, the second ones, and then both to what was there.

The grouped product has a weight for each expert, and multiplies each token by those of the experts
that were chosen for it, with the bits of the product with that expert alone; each chosen weight is
read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._lanes import LANES
from ferryman_kernels.cpu.arithmetic import has_one_order
from ferryman_kernels.cpu.huge_pages import weight_zeros
from ferryman_kernels.products._packed_product_compiled import (
    packed_grouped_product_compiled,
    packed_product_compiled,
    panel_rows_compiled,
)

_INPUTS_PADDED_TO = {torch.float32: 1, torch.bfloat16: 32}
_INPUTS_OF_STEP = {torch.float32: 1, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class Panels:
    """The panels of a weight [out_dim, in_dim], each `panel_bytes` from `address` on: the memory of
    `panels`."""

    panels: Tensor
    address: int
    panel_bytes: int
    out_dim: int
    in_dim: int
    dtype: torch.dtype


def packed_product_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double(), bias.double()).to(x.dtype)


def reads_panels(dtype: torch.dtype) -> bool:
    """Whether the loops multiply weights of this dtype on this processor. Where they do not, a
    product's bits may depend on the number of tokens."""
    return dtype in _INPUTS_PADDED_TO and has_one_order(dtype)


def shape_of_panels(out_dim: int, in_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The last number is the inputs side by side."""
    pair, multiple = _INPUTS_OF_STEP[dtype], _INPUTS_PADDED_TO[dtype]
    return -(-out_dim // LANES), -(-in_dim // multiple) * multiple // pair, LANES, pair


def pack_panels(weight: Tensor) -> Panels:
    """A copy of `weight` [out_dim, in_dim], whose dtype `reads_panels`, in panels."""
    out_dim, in_dim = weight.shape
    shape = shape_of_panels(out_dim, in_dim, weight.dtype)
    panels = weight_zeros(shape, weight.dtype, weight.device)
    # Pairs are copied as words, in half the time, so they have to lie as words.
    if in_dim % panels.shape[3]:
        weight = F.pad(weight, (0, 1))
    elif weight.storage_offset() % panels.shape[3]:
        weight = weight.clone()
    words, rows = panels.view(torch.int32).squeeze(3), weight.contiguous().view(torch.int32)
    whole, steps = out_dim // LANES, rows.shape[1]
    words[:whole, :steps] = rows[: whole * LANES].view(whole, LANES, steps).transpose(1, 2)
    if out_dim % LANES:
        words[whole, :steps, : out_dim % LANES] = rows[whole * LANES :].T
    return panels_in(panels, out_dim, in_dim)


def panels_in(panels: Tensor, out_dim: int, in_dim: int) -> Panels:
    """Panels that lie in their order, as `shape_of_panels` says; numbers behind the last output and
    the last input may be any but infinite ones and not-a-number."""
    assert panels.is_contiguous(), panels.stride()
    assert panels.shape == shape_of_panels(out_dim, in_dim, panels.dtype), panels.shape
    panel_bytes = panels.stride(0) * panels.itemsize
    return Panels(panels, panels.data_ptr(), panel_bytes, out_dim, in_dim, panels.dtype)


def packed_product(x: Tensor, panels: Panels, bias: Tensor) -> Tensor:
    """The product of x [tokens, in_dim]; `bias` is [out_dim], or [0] for none; all of one dtype."""
    assert x.shape[1] == panels.in_dim, (x.shape, panels.in_dim)
    assert bias.numel() in (0, panels.out_dim), (bias.shape, panels.out_dim)
    assert x.dtype is panels.dtype is bias.dtype, (x.dtype, panels.dtype, bias.dtype)
    assert bias.is_contiguous(), bias.stride()
    return packed_product_compiled(x, panels.address, panels.panel_bytes, bias, panels.out_dim)


def panel_rows(panels: Panels, rows: Tensor) -> Tensor:
    """The numbers of the outputs `rows` [n] int64: [n, in_dim]; not-a-number where there is no such
    output."""
    assert rows.dtype is torch.int64, rows.dtype
    inputs = _INPUTS_OF_STEP[panels.dtype]
    padded = -(-panels.in_dim // inputs) * inputs
    numbers = torch.empty(len(rows), padded, dtype=panels.dtype)
    panel_rows_compiled(panels.address, panels.panel_bytes, panels.out_dim, rows, numbers)
    return numbers[:, : panels.in_dim].contiguous()


@dataclass(frozen=True, slots=True)
class PanelStack:
    """The weights of experts, all of one shape and dtype: `panels` keeps their memory, which begins
    at `addresses` [experts]; `biases` [experts, out_dim], or [1, 0] for none."""

    panels: tuple[Panels, ...]
    addresses: Any
    biases: Tensor


def stack_panels(panels: Sequence[Panels], biases: Tensor) -> PanelStack:
    """`biases` as in `PanelStack`."""
    first = panels[0]
    alike = {(each.out_dim, each.in_dim, each.dtype) for each in panels}
    assert len(alike) == 1, alike
    assert biases.shape in ((len(panels), first.out_dim), (1, 0)), (biases.shape, first.out_dim)
    assert biases.dtype is first.dtype, (biases.dtype, first.dtype)
    addresses = np.array([each.address for each in panels], np.int64)
    return PanelStack(tuple(panels), addresses, biases)


def packed_grouped_product(x: Tensor, stack: PanelStack, chosen: Tensor) -> Tensor:
    """The products [rows · per_row, out_dim] of x [rows, in_dim] with the experts `chosen` for each
    of its rows, int64 [rows, per_row]; expert after expert in the order of `chosen`."""
    first = stack.panels[0]
    assert x.shape == (len(chosen), first.in_dim), (x.shape, chosen.shape, first.in_dim)
    assert chosen.dtype is torch.int64, chosen.dtype
    assert x.dtype is first.dtype, (x.dtype, first.dtype)
    assert stack.biases.is_contiguous(), "as stacked"
    return packed_grouped_product_compiled(
        x, stack.addresses, first.panel_bytes, stack.biases, chosen, first.out_dim
    )
