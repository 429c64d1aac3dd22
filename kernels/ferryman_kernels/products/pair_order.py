"""Pairs of a token and an expert in the order of their experts, for grouped products.

    place[p]  = #{q : expert[q] < expert[p]} + #{q < p : expert[q] = expert[p]}
    order[place[p]] = p;    starts[e] = #{q : expert[q] < e}                  [pairs], [experts + 1]

So pairs of one expert keep their order. On a card few pairs, as a decode step has, are placed by
counting, in one launch: a radix sort, the bounds and a search in them are some six, and each has
one block there. Both ways give the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, tl

MOST_COUNTED = 1024
"""The pairs up to which they are counted: 1,024 with 512 experts are 1.6 million comparisons."""

KEYS, PAIRS = 32, 64
"""The places that a program finds, and the pairs that it compares them with at once."""


def sort_pairs_reference(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    sorted_experts, order = chosen.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=sorted_experts.dtype, device=chosen.device)
    return order, torch.searchsorted(sorted_experts, bounds)


@Kernel.for_any("pairs")
def _order_pairs_kernel(
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    pairs: int,
    num_experts: int,
    KEYS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Places of some keys: those of the pairs, and then each expert's first one."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    is_pair = key < pairs
    chosen = tl.load(experts_ptr + key, mask=is_pair, other=0)
    expert = tl.where(is_pair, chosen, key - pairs)
    # An expert's first place lies before all of its pairs.
    earlier = tl.where(is_pair, key, 0)
    place = tl.zeros([KEYS], tl.int64)
    for start in range(0, pairs, PAIRS):
        other = start + tl.arange(0, PAIRS)
        others = tl.load(experts_ptr + other, mask=other < pairs, other=num_experts + 1)
        is_less = others[None, :] < expert[:, None]
        is_equal = (others[None, :] == expert[:, None]) & (other[None, :] < earlier[:, None])
        place += tl.sum((is_less | is_equal).to(tl.int64), axis=1)
    tl.store(order_ptr + place, key.to(tl.int64), mask=is_pair)
    is_bound = (key >= pairs) & (key <= pairs + num_experts)
    tl.store(starts_ptr + key - pairs, place, mask=is_bound)


def sort_pairs_triton(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    experts = chosen.flatten()
    order = torch.empty(len(experts), dtype=torch.int64, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int64, device=chosen.device)
    _order_pairs_kernel[cdiv(len(experts) + num_experts + 1, KEYS),](
        experts, order, starts, len(experts), num_experts, KEYS=KEYS, PAIRS=PAIRS, num_warps=4,
    )  # fmt: skip
    return order, starts


def sort_pairs(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs of `chosen` [tokens, experts_per_token] by expert, and [experts + 1] where each
    expert's begin among them; both int64, on the device, without a wait."""
    assert chosen.ndim == 2, chosen.shape
    is_counted = chosen.is_cuda and chosen.numel() <= MOST_COUNTED
    return (sort_pairs_triton if is_counted else sort_pairs_reference)(chosen, num_experts)
