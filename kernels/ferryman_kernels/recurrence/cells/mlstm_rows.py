"""The inputs of the mLSTM cell, as the loop, the card's kernels and the reference take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CellRows(NamedTuple):
    """`q` and `k` [tokens, heads, k_dim], `v` [tokens, heads, v_dim], of one dtype."""

    q: Tensor
    k: Tensor
    v: Tensor


class CellGates(NamedTuple):
    """`enter` (i) and `forget` (f) [tokens, heads] before their cap, which is `cap`; `eps` is added
    to the divisor."""

    enter: Tensor
    forget: Tensor
    cap: float
    eps: float
