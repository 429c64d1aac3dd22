"""The inputs of the means of blocks, as the loop, the kernel and the reference take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ferryman_kernels.recurrence.cells.wkv_rows import NOTHING

__all__ = ["NOTHING", "BlockedRows"]


class BlockedRows(NamedTuple):
    """`values` and `scores` [tokens, series · dim], `positions` [tokens], int64; `bias`
    [block_len, series · dim] of the scores, in the dtype of the states."""

    values: Tensor
    scores: Tensor
    positions: Tensor
    bias: Tensor
