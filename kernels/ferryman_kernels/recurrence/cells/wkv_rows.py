"""The inputs of RWKV-4's weighted mean, as the loop, the kernel and the reference take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NOTHING = -1e38
"""The maximum before the first token: whatever it is compared with is greater."""


class WeightedRows(NamedTuple):
    """`k` and `v` [tokens, dim], `positions` [tokens], int64; `decay` (above 0) and `first` [dim]
    in the dtype of the states."""

    k: Tensor
    v: Tensor
    positions: Tensor
    decay: Tensor
    first: Tensor
