"""Means of blocks in pages, and the choice of blocks by one key of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.loop_versions import answers_of_one_thread_and_two
from tests.kernels.slabs import row_pages, rows_of, spoil_beyond, table_of
from torch import Tensor

from ferryman_kernels.attention._sparse_index_compiled import index_scores_compiled
from ferryman_kernels.attention._sparse_index_triton import index_scores_triton
from ferryman_kernels.attention.blocks import mean_index
from ferryman_kernels.attention.blocks.block_means import (
    _means_loop,
    block_means,
    block_means_compiled,
    block_means_reference,
    block_means_triton,
)
from ferryman_kernels.attention.blocks.mean_index import choose_mean_blocks
from ferryman_kernels.attention.sparse_index import index_scores_reference

DIM, SLOTS = 20, 60
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
POSITIONS = [0, 7, 8, 75, 63, 64]
CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


class TokensOfRequests:
    """A token at each of `positions`, each of a request of its own."""

    def __init__(self, positions: list[int], heads: int, dtype: torch.dtype) -> None:
        ends = [position + 1 for position in positions]
        self.q = torch.randn(len(positions), heads, DIM).to(dtype)
        self.weights = torch.full((heads,), DIM**-0.5, dtype=torch.float64)
        self.pages, self.table = row_pages(dtype, SLOTS, DIM), table_of(ends, SLOTS)
        spoil_beyond(self.pages, self.table, ends)
        self.rows, self.positions = torch.arange(len(positions)), torch.tensor(positions)

    @property
    def named(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.table, self.rows, self.positions

    def chosen(self, length: int, count: int) -> Tensor:
        return choose_mean_blocks(self.q, self.weights, self.pages, self.named, length, count)

    def naive_scores(self, token: int, length: int) -> Tensor:
        """The scores of the blocks that end up to the token, in float64: a block's key is in the
        row of its last position."""
        keys = rows_of(self.pages, self.table[token], int(self.positions[token]) + 1)
        products = (self.q[token].double() @ keys[length - 1 :: length].T).clamp_min(0)
        scores: Tensor = products.sum(0) * DIM**-0.5
        return scores


@every_dtype
@pytest.mark.parametrize("length", [1, 3, 8, 20])
@pytest.mark.parametrize(
    "run", [block_means, block_means_compiled, block_means_reference, block_means_triton]
)
def test_a_mean_is_that_of_the_block_s_rows(
    run: Callable[..., Tensor], length: int, dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is block_means_triton else CPU
    ends = [length - 1, 40, 79, -1, 63]
    pages, table = row_pages(dtype, SLOTS, DIM), table_of([max(end, 0) + 1 for end in ends], SLOTS)
    asked = pages.to(place), table.to(place), torch.arange(5), torch.tensor(ends)
    pages_at, table_at, rows, named = (tensor.to(place) for tensor in asked)
    means = run(pages_at, table_at, rows, named, length)
    assert means.dtype == dtype
    for row, end in enumerate(ends):
        expected = torch.zeros(DIM, dtype=torch.float64)
        if end >= 0:
            expected = rows_of(pages, table[row], end + 1)[-length:].mean(0)
        found = means[row].cpu().double()
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_mean_does_not_depend_on_threads_nor_on_what_is_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, table = row_pages(torch.float32, SLOTS, DIM), table_of([80, 30], SLOTS)
    rows, ends = torch.tensor([0, 1, 0, 0]), torch.tensor([79, 29, -1, 44])
    asked = pages, table, rows, ends, 15
    alone, shared = answers_of_one_thread_and_two(
        monkeypatch, _means_loop, lambda: block_means_compiled(*asked)
    )
    assert torch.equal(alone, shared)
    for at in range(len(rows)):
        one = block_means_compiled(pages, table, rows[at : at + 1], ends[at : at + 1], 15)
        assert torch.equal(one[0], alone[at])


@pytest.mark.parametrize(("heads", "length"), [(1, 8), (4, 3), (5, 20), (33, 4)])
@every_dtype
@pytest.mark.parametrize(
    "run", [index_scores_reference, index_scores_compiled, index_scores_triton]
)
def test_a_block_has_the_score_of_the_row_of_its_last_position(
    run: Callable[..., Tensor], dtype: torch.dtype, heads: int, length: int, device: torch.device
) -> None:
    place = device if run is index_scores_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    tokens = TokensOfRequests(POSITIONS, heads, dtype)
    whole = (tokens.positions + 1) // length
    weights = tokens.weights.expand(len(POSITIONS), heads).float()
    parts = tokens.q, weights, tokens.pages, *tokens.named[:2], whole - 1
    scores = run(*(part.to(place) for part in parts), length).cpu().double()
    for token in range(len(POSITIONS)):
        expected = tokens.naive_scores(token, length)
        assert len(expected) == whole[token]
        found = scores[token, : len(expected)]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert bool((scores[token, len(expected) :] == -torch.inf).all())


@pytest.mark.parametrize("count", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [3, 8, 16])
def test_the_best_whole_blocks_are_chosen_and_the_open_one_beside_them(
    length: int, count: int
) -> None:
    """A block that ends with the token is one of those among which it chooses."""
    tokens = TokensOfRequests(POSITIONS, 3, torch.float64)
    chosen = tokens.chosen(length, count)
    for token, position in enumerate(POSITIONS):
        scores = tokens.naive_scores(token, length)
        order = sorted(range(len(scores)), key=lambda block: (-float(scores[block]), block))
        expected = sorted(order[:count])
        expected += [(position + 1) // length] if (position + 1) % length else []
        found = chosen[token].tolist()
        assert found == expected + [-1] * (len(found) - len(expected))


def test_equal_blocks_are_chosen_from_the_lowest_on() -> None:
    tokens = TokensOfRequests([77], 2, torch.float32)
    tokens.pages[:] = tokens.pages[tokens.table[0, 0], 0].clone()
    assert tokens.chosen(8, 4).tolist() == [[0, 1, 2, 3, 9]]


def test_a_token_that_pads_a_batch_chooses_nothing() -> None:
    tokens = TokensOfRequests([30, 30], 2, torch.float32)
    tokens.positions[1], tokens.table[1] = -1, -1
    chosen = tokens.chosen(8, 2)
    assert bool((chosen[0] >= 0).all())
    assert bool((chosen[1] == -1).all())


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    last=st.integers(1, 119),
    heads=st.sampled_from([1, 4, 33]),
    length=st.sampled_from([3, 4, 8]),
    count=st.integers(1, 9),
)
def test_a_chunk_chooses_what_its_tokens_choose_alone(
    data: st.DataObject, dtype: torch.dtype, last: int, heads: int, length: int, count: int
) -> None:
    """A chunk's tokens name one row of the table, those of a decode step have rows of their own."""
    tokens = TokensOfRequests([last], heads, dtype)
    start = data.draw(st.integers(0, last))
    positions = torch.arange(start, last + 1)
    q, rows = torch.randn(len(positions), heads, DIM).to(dtype), torch.zeros_like(positions)
    asked = tokens.weights, tokens.pages
    chunk = choose_mean_blocks(q, *asked, (tokens.table, rows, positions), length, count)
    for at in range(len(positions)):
        one = slice(at, at + 1)
        named = tokens.table, rows[one], positions[one]
        alone = choose_mean_blocks(q[one], *asked, named, length, count)
        assert torch.equal(alone[0], chunk[at])


def test_tokens_in_pieces_choose_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TokensOfRequests(POSITIONS, 3, torch.float32)
    whole = tokens.chosen(8, 4)
    monkeypatch.setattr(mean_index, "SCORE_BLOCK", 4 * 3 * (80 // 8 + 1))
    assert torch.equal(tokens.chosen(8, 4), whole)
