"""Products of tokens with the experts that each chose, whose weights are in codes, on a CPU.

    y[t, k] = bias[e] + Σ_i weight[e][:, i] · x[t, i]        e = chosen[t, k]     [pairs, out_dim]

Weights, their numbers and the order of sums are those of `block_product`: a pair has the bits that
it has with that expert alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.products.blocks._grouped_blocks_compiled import grouped_blocks_compiled
from ferryman_kernels.products.blocks.block_product import BlockPanels
from ferryman_kernels.products.packed_product import reads_panels


@dataclass(frozen=True, slots=True)
class BlockStack:
    """The weights of experts, all of one form, shape and dtype: `panels` keeps their memory, which
    begins at `addresses` ([experts] of panels, [experts] of factors); `biases` [experts, out_dim],
    or [1, 0] for none."""

    panels: tuple[BlockPanels, ...]
    addresses: tuple[Any, Any]
    biases: Tensor


def stack_blocks(panels: Sequence[BlockPanels], biases: Tensor) -> BlockStack:
    """`biases` as in `BlockStack`."""
    first = panels[0]
    alike = {(part.form, part.out_dim, part.in_dim, part.dtype) for part in panels}
    assert len(alike) == 1, alike
    assert biases.shape in ((len(panels), first.out_dim), (1, 0)), (biases.shape, first.out_dim)
    assert biases.dtype is first.dtype, (biases.dtype, first.dtype)
    contents = np.array([part.content.data_ptr() for part in panels], np.int64)
    factors = np.array([part.factors.data_ptr() for part in panels], np.int64)
    return BlockStack(tuple(panels), (contents, factors), biases)


def grouped_blocks_reference(x: Tensor, numbers: Tensor, biases: Tensor, chosen: Tensor) -> Tensor:
    """`numbers` [experts, out_dim, in_dim] are the weights', `biases` [experts, out_dim]."""
    products = torch.einsum("tkoi,ti->tko", numbers.double()[chosen], x.double())
    return (products + biases.double()[chosen]).flatten(0, 1).to(x.dtype)


def grouped_blocks(x: Tensor, stack: BlockStack, chosen: Tensor) -> Tensor:
    """The products [rows · per_row, out_dim] of x [rows, in_dim] with the experts `chosen` for each
    of its rows, int64 [rows, per_row]; expert after expert in the order of `chosen`."""
    first = stack.panels[0]
    assert reads_panels(x.dtype), "the processor has no such vectors"
    assert x.shape == (len(chosen), first.in_dim), (x.shape, chosen.shape, first.in_dim)
    assert chosen.dtype is torch.int64, chosen.dtype
    assert x.dtype is first.dtype, (x.dtype, first.dtype)
    assert stack.biases.is_contiguous(), "as stacked"
    return grouped_blocks_compiled(
        x, first.form.numbers, first.table, stack.addresses, first.content.stride(0), stack.biases,
        chosen, first.out_dim,
    )  # fmt: skip
