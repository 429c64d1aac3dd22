"""Decode attention on the CPU in splits of a request's keys, joined to one softmax.

The bits of an answer depend on its own request alone. The oracle is the formula in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from torch import Tensor

from ferryman_kernels.attention._paged_attention_compiled import _attend_loop
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_reference,
)
from ferryman_kernels.attention.splits._attention_split_compiled import SPLIT

pytest.importorskip("numba")

SCALE, PAGE_SIZE = 0.2, 32
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
MIXED = (2 * SPLIT + 7, SPLIT - 1, SPLIT, 0, 700, 3 * SPLIT - 1)
"""Positions in the first and the last key of a split, and within."""


class DecodeCase:
    """Queries at `positions`, each with pages of its own; memory that none sees is NaN."""

    def __init__(
        self, positions: Sequence[int], dtype: torch.dtype, heads: tuple[int, int], head_dim: int
    ) -> None:
        (q_heads, kv_heads), used = heads, [p // PAGE_SIZE + 1 for p in positions]
        self.positions = torch.tensor(positions)
        self.q = torch.randn(len(positions), q_heads, head_dim).to(dtype)
        order = iter(torch.randperm(sum(used)).tolist())
        width = max(used)
        self.table = torch.tensor(
            [[next(order) for _ in range(n)] + [-1] * (width - n) for n in used]
        )
        slab = torch.randn(sum(used), 2, kv_heads, PAGE_SIZE, head_dim).to(dtype)
        self.keys, self.values = slab.unbind(1)
        for token, position in enumerate(positions):
            slab[self.table[token, used[token] - 1], :, :, position % PAGE_SIZE + 1 :] = torch.nan

    def answer(self, tokens: Sequence[int], window: int = 0, **more: Any) -> Tensor:
        rows = torch.tensor(tokens)
        given = (self.q[rows], self.keys, self.values, self.table[rows], self.positions[rows])
        return paged_attention_decode(*given, SCALE, window, **more)

    def expected(self, window: int = 0) -> Tensor:
        spans = [(p, p + 1) for p in self.positions.tolist()]
        q, keys, values = (t.double() for t in (self.q, self.keys, self.values))
        return paged_attention_reference(q, keys, values, self.table, spans, SCALE, window)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 3), (3, 1), (10, 2), (16, 1)], ids=str)
def test_every_size_of_heads_and_groups_gives_the_formula(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int]
) -> None:
    case = DecodeCase((SPLIT + 40, 3, 150), dtype, heads, head_dim)
    for window in (0, 200):
        y = case.answer(range(3), window)
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(y.double(), case.expected(window), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [0, 600])
def test_the_bits_of_an_answer_do_not_depend_on_its_neighbours(
    dtype: torch.dtype, window: int
) -> None:
    case = DecodeCase(MIXED, dtype, (6, 2), 80)
    together = case.answer(range(len(MIXED)), window)
    for token in range(len(MIXED)):
        assert case.answer([token], window).equal(together[token : token + 1])
    assert case.answer([4, 0, 5], window).equal(together[[4, 0, 5]])


def test_two_threads_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = DecodeCase(MIXED, torch.float32, (6, 2), 80)
    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, _attend_loop, lambda: case.answer(range(len(MIXED)))
    )
    assert alone.equal(shared)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_split_whose_scores_are_all_minus_infinity_adds_nothing(dtype: torch.dtype) -> None:
    case = DecodeCase((2 * SPLIT + 5,), dtype, (4, 2), 64)
    case.q = case.q.abs()
    hidden = case.table[0, : SPLIT // PAGE_SIZE]
    case.keys[hidden] = -torch.inf
    y, expected = case.answer([0]), case.expected()
    assert expected.isfinite().all()
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    case.keys[case.table[0]] = -torch.inf
    assert case.answer([0]).isnan().all()  # as softmax has it


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("position", [0, 3, SPLIT - 1, SPLIT, 2 * SPLIT + 5])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_nan_in_one_key_or_value_is_nan_in_the_answer(
    dtype: torch.dtype, position: int, name: str
) -> None:
    case = DecodeCase((2 * SPLIT + 5,), dtype, (3, 1), 64)
    page = case.table[0, position // PAGE_SIZE]
    getattr(case, name)[page, 0, position % PAGE_SIZE, 5] = torch.nan
    y = case.answer([0])
    assert y.isnan()[..., 5].all()
    assert y.isnan().all() == (name == "keys")


def test_far_lower_scores_of_a_split_fade_beside_the_highest() -> None:
    """exp(peak - top) of the first split is below float32's numbers."""
    case = DecodeCase((SPLIT + 5,), torch.float32, (2, 1), 64)
    case.q = case.q.abs()
    case.keys[case.table[0, : SPLIT // PAGE_SIZE]] = -30.0
    for cap in (0.0, 50.0):
        assert case.answer([0], score_cap=cap).isfinite().all()
    torch.testing.assert_close(case.answer([0]).double(), case.expected(), rtol=1e-5, atol=1e-5)
