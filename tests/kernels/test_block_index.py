"""Every implementation of the block index chooses by its formula; ties go to lower blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from tests.kernels.slabs import row_pages, rows_of, spoil_beyond, table_of
from torch import Tensor

from ferryman_kernels.attention.blocks import _block_index_compiled, block_index
from ferryman_kernels.attention.blocks._block_index_compiled import (
    _score_loop,
    block_scores_compiled,
)
from ferryman_kernels.attention.blocks._block_index_triton import block_scores_triton
from ferryman_kernels.attention.blocks.block_index import (
    BlockRule,
    block_scores_reference,
    choose_blocks,
)

DIM, SLOTS = 20, 60
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-3}
POSITIONS = [0, 7, 8, 75, 63, 64]
CPU = torch.device("cpu")
Asking = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, pages, a table, rows of it and positions."""


class IndexedTokens:
    """A token at each of `positions`, each of a request of its own."""

    def __init__(self, positions: list[int], heads: int, dtype: torch.dtype) -> None:
        ends = [position + 1 for position in positions]
        self.q = torch.randn(len(positions), heads, DIM).to(dtype)
        self.pages, self.table = row_pages(dtype, SLOTS, DIM), table_of(ends, SLOTS)
        spoil_beyond(self.pages, self.table, ends)
        self.rows, self.positions = torch.arange(len(positions)), torch.tensor(positions)

    def asking(self, device: torch.device = CPU) -> Asking:
        return (
            self.q.to(device),
            self.pages.to(device),
            self.table.to(device),
            self.rows.to(device),
            self.positions.to(device),
        )

    def naive(self, token: int, length: int) -> Tensor:
        """The best score of each block that the token sees [heads, blocks], in float64."""
        keys = rows_of(self.pages, self.table[token], int(self.positions[token]) + 1)
        scores = self.q[token].double() @ keys.T
        return torch.stack([part.amax(1) for part in torch.split(scores, length, dim=1)], dim=1)


def naive_choice(scores: Tensor, rule: BlockRule) -> list[int]:
    """Of one head's `scores` [blocks], the last of which is the token's own."""
    last = len(scores) - 1
    order = sorted(
        range(len(scores)), key=lambda b: (last - b >= rule.num_local, -float(scores[b]), b)
    )
    return sorted(order[: rule.count])


@pytest.mark.parametrize(("heads", "length"), [(1, 8), (4, 3), (5, 100)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [block_scores_reference, block_scores_compiled, block_scores_triton]
)
def test_a_block_has_the_best_score_of_what_is_seen_of_it(
    run: Callable[..., Tensor], dtype: torch.dtype, heads: int, length: int, device: torch.device
) -> None:
    place = device if run is block_scores_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    tokens = IndexedTokens(POSITIONS, heads, dtype)
    scores = run(*tokens.asking(place), length).cpu().double()
    tolerance = max(TOLERANCE[dtype], 1e-4 if run is block_scores_triton else 0)
    for token in range(len(POSITIONS)):
        expected = tokens.naive(token, length)
        found = scores[token, :, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert bool((scores[token, :, expected.shape[1] :] == -torch.inf).all())


@pytest.mark.parametrize("num_local", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 3, 8, 40])
@pytest.mark.parametrize("length", [3, 8, 16])
def test_the_best_blocks_and_the_last_ones_are_chosen(
    length: int, count: int, num_local: int
) -> None:
    tokens, rule = IndexedTokens(POSITIONS, 3, torch.float64), BlockRule(length, count, num_local)
    chosen = choose_blocks(*tokens.asking(), rule)
    for token in range(len(POSITIONS)):
        for head, scores in enumerate(tokens.naive(token, length)):
            expected = naive_choice(scores, rule)
            found = chosen[token, head].tolist()
            assert found == expected + [-1] * (len(found) - len(expected))


def test_tokens_in_pieces_choose_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, rule = IndexedTokens(POSITIONS, 3, torch.float32).asking(), BlockRule(8, 4, 1)
    whole, sizes = choose_blocks(*asking, rule), []

    def counted(q: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(q))
        return block_scores_compiled(q, *rest)

    blocks = -(-asking[2].shape[1] * asking[1].shape[1] // rule.length)
    monkeypatch.setattr(block_index, "block_scores_compiled", counted)
    monkeypatch.setattr(block_index, "SCORE_BLOCK", 4 * 3 * blocks)
    assert torch.equal(choose_blocks(*asking, rule), whole)
    assert sizes == [4, 2]


def test_equal_blocks_are_chosen_from_the_lowest_on() -> None:
    tokens = IndexedTokens([79], 2, torch.float32)
    tokens.pages[:] = tokens.pages[tokens.table[0, 0], 0].clone()
    chosen = choose_blocks(*tokens.asking(), BlockRule(8, 4, 1))
    assert chosen.tolist() == [[[0, 1, 2, 9]] * 2]


def test_a_token_that_pads_a_batch_chooses_nothing() -> None:
    tokens = IndexedTokens([30, 30], 2, torch.float32)
    tokens.positions[1] = -1
    tokens.table[1] = -1
    chosen = choose_blocks(*tokens.asking(), BlockRule(8, 3, 2))
    assert bool((chosen[0] >= 0).all())
    assert bool((chosen[1] == -1).all())


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    last=st.integers(1, 119),
    heads=st.sampled_from([1, 3, 4]),
    length=st.sampled_from([3, 8, 16]),
)
def test_scores_do_not_depend_on_the_tokens_beside(
    data: st.DataObject, dtype: torch.dtype, last: int, heads: int, length: int
) -> None:
    """A chunk's tokens name one row of the table, those of a decode step have rows of their own."""
    tokens = IndexedTokens([last], heads, dtype)
    start = data.draw(st.integers(0, last))
    positions = torch.arange(start, last + 1)
    q, rows = torch.randn(len(positions), heads, DIM).to(dtype), torch.zeros_like(positions)
    chunk = block_scores_compiled(q, tokens.pages, tokens.table, rows, positions, length)
    for at in range(len(positions)):
        part = slice(at, at + 1)
        alone = block_scores_compiled(
            q[part], tokens.pages, tokens.table, rows[part], positions[part], length
        )
        assert torch.equal(alone[0], chunk[at])


def test_neither_threads_nor_pieces_change_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = IndexedTokens([70, 75, 79], 3, torch.float32).asking()
    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, _score_loop, lambda: block_scores_compiled(*asking, 3)
    )
    assert torch.equal(alone, shared)
    monkeypatch.setattr(_block_index_compiled, "PIECE", 10)
    assert torch.equal(block_scores_compiled(*asking, 3), alone)
