"""Pairs by expert, counted on a card: the integers of a stable sort written down in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman_kernels.products.pair_order import (
    KEYS,
    MOST_COUNTED,
    PAIRS,
    sort_pairs,
    sort_pairs_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_expert(chosen: list[int], num_experts: int) -> tuple[list[int], list[int]]:
    order = sorted(range(len(chosen)), key=lambda pair: (chosen[pair], pair))
    return order, [sum(other < e for other in chosen) for e in range(num_experts + 1)]


@given(
    st.integers(1, 70).flatmap(
        lambda experts: st.tuples(
            st.just(experts), st.lists(st.integers(0, experts - 1), min_size=1, max_size=150)
        )
    )
)
@settings(max_examples=40, deadline=None)
def test_pairs_keep_their_order_within_an_expert(drawn: tuple[int, list[int]]) -> None:
    num_experts, chosen = drawn
    experts = torch.tensor(chosen, device=DEVICE)[:, None]
    for sort in (sort_pairs, sort_pairs_triton):
        order, starts = sort(experts, num_experts)
        assert (order.tolist(), starts.tolist()) == by_expert(chosen, num_experts)
        assert order.dtype is starts.dtype is torch.int64


@pytest.mark.parametrize("pairs", [1, KEYS - 1, KEYS, PAIRS, PAIRS + 1, MOST_COUNTED])
def test_whole_and_ragged_programs_agree_with_a_sort(pairs: int) -> None:
    drawn = torch.Generator().manual_seed(pairs)
    chosen = torch.randint(0, 33, (pairs, 1), generator=drawn)
    right = by_expert(chosen.flatten().tolist(), 64)
    order, starts = sort_pairs_triton(chosen.to(DEVICE), 64)
    assert (order.tolist(), starts.tolist()) == right


def test_no_pair_leaves_all_experts_empty() -> None:
    order, starts = sort_pairs_triton(torch.empty(0, 3, dtype=torch.int64, device=DEVICE), 40)
    assert order.tolist() == []
    assert starts.tolist() == [0] * 41
