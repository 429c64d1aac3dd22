"""The product of a few tokens with a weight that oneDNN has packed, read once in its own layout.

    y[t, o] = bias[o] + Σ_i weight[o, i] · x[t, i]                               [tokens, out_dim]

Where the processor has AVX-512, oneDNN packs a weight in panels of 64 outputs:

    float32     panel[i][o]                     [inputs, 64]
    bfloat16    panel[i // 2][o][i % 2]         [inputs / 2, 64, 2]

each padded with zeros to a multiple of 16 inputs, or of 32. oneDNN documents no layout, so
`panels_of` compares the size and two corners with the weight, and where they differ there are no
panels: then oneDNN's product is the only one. Sums are float32, in the order of the inputs (of a
pair the second first), rounded once; a token's bits do not depend on the other tokens. A processor
with AVX512-BF16 multiplies pairs itself: with the same bits, but numbers below 1.2e-38 are zero.

The grouped product has a weight for each expert, and multiplies each token by those of the experts
that were chosen for it; each chosen weight is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_char
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.cpu._lanes import LANES, STEP_BYTES
from ferryman_kernels.products._packed_product_compiled import (
    packed_grouped_product_compiled,
    packed_product_compiled,
)

_INPUTS_PADDED_TO = {torch.float32: 16, torch.bfloat16: 32}
_CORNER = 64


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [out_dim, in_dim] of `dtype`, a panel each `panel_bytes` from `address` on; the
    memory is that of `packed`."""

    packed: Tensor
    address: int
    panel_bytes: int
    out_dim: int
    in_dim: int
    dtype: torch.dtype


def packed_product_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double(), bias.double()).to(x.dtype)


def panels_of(packed: Tensor, weight: Tensor) -> Panels | None:
    """The panels of `weight` [out_dim, in_dim] in `packed`, or None where the layout is another, or
    one that no loop reads."""
    (out_dim, in_dim), dtype = weight.shape, weight.dtype
    # Steps of bfloat16 take two inputs: an odd last one would read beyond a row of x.
    if not serves(weight) or dtype not in _INPUTS_PADDED_TO or in_dim % 2:
        return None
    padded = _up_to(in_dim, _INPUTS_PADDED_TO[dtype])
    panel_bytes = padded * LANES * weight.itemsize
    num_panels = _up_to(out_dim, LANES) // LANES
    if torch.ops.mkldnn._nbytes(packed) != num_panels * panel_bytes:
        return None
    panels = Panels(packed, torch.ops.mkldnn.data_ptr(packed), panel_bytes, out_dim, in_dim, dtype)
    last = num_panels - 1, max(0, padded - _CORNER)
    corners_agree = all(_agree(panels, weight, *corner) for corner in {(0, 0), last})
    return panels if corners_agree else None


def _agree(panels: Panels, weight: Tensor, panel: int, first_input: int) -> bool:
    """Whether up to 64 outputs by 64 inputs of the panel, from `first_input` on, are the weight's.

    The size of the memory and two corners settle the layout; to compare all would double the time
    of a load.
    """
    expected = weight[panel * LANES :, first_input:][:LANES, :_CORNER]
    inputs_of_step = STEP_BYTES // LANES // weight.itemsize
    start = panel * panels.panel_bytes + first_input * LANES * weight.itemsize
    size = min(_CORNER * LANES * weight.itemsize, (panel + 1) * panels.panel_bytes - start)
    memory = (c_char * size).from_address(panels.address + start)
    steps = torch.frombuffer(memory, dtype=weight.dtype).view(-1, LANES, inputs_of_step)
    rows = steps.transpose(0, 1).reshape(LANES, -1)
    return _same_bits(rows[: len(expected), : expected.shape[1]], expected)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Not-a-numbers are equal too."""
    words = torch.int16 if left.itemsize == 2 else torch.int32
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))


def _up_to(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def packed_product(x: Tensor, panels: Panels, bias: Tensor) -> Tensor:
    """The product of x [tokens, in_dim]; `bias` is [out_dim], or [0] for none; all of one dtype."""
    assert x.shape[1] == panels.in_dim, (x.shape, panels.in_dim)
    assert bias.numel() in (0, panels.out_dim), (bias.shape, panels.out_dim)
    assert x.dtype is panels.dtype is bias.dtype, (x.dtype, panels.dtype, bias.dtype)
    assert bias.is_contiguous(), bias.stride()
    return packed_product_compiled(x, panels.address, panels.panel_bytes, bias, panels.out_dim)


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
    alike = {(each.out_dim, each.in_dim, each.dtype, each.panel_bytes) for each in panels}
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
