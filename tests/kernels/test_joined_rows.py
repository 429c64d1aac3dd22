"""Attention over rows of two pools in one softmax, and the rows of closed blocks."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.kernels.oracles import assert_close
from torch import Tensor

from ferryman_kernels.attention.blocks.block_rows import (
    ClosedBlocks,
    choose_block_rows,
    closed_blocks,
    rows_of_page,
)
from ferryman_kernels.attention.blocks.joined_rows import PlacedRows, joined_rows
from ferryman_kernels.attention.latent_attention import (
    latent_attention,
    latent_attention_by_splits,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
HEADS, SCALE = 3, 0.3

every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _pool(dtype: torch.dtype, slots: int, size: int, dim: int, offset: int) -> Tensor:
    """Pages in a slab that is NaN elsewhere; slots are no multiple of a row apart."""
    slab = torch.full((slots, size * dim + 2 * offset), torch.nan, dtype=dtype)
    slab[:, offset : offset + size * dim] = torch.randn(slots, size * dim)
    return slab[:, offset : offset + size * dim].view(slots, size, dim)


def _lists(counts: list[int], width: int, pages: Tensor) -> Tensor:
    """Different places for each token, then -1."""
    places = torch.full((len(counts), width), -1)
    for row, count in zip(places, counts, strict=True):
        row[:count] = torch.randperm(pages.shape[0] * pages.shape[1])[:count]
    return places


def _given(dtype: torch.dtype, dim: int) -> tuple[Tensor, PlacedRows, PlacedRows, Tensor]:
    """Both pools, with tokens that see few or many of either; the third one pads a batch."""
    near, far = _pool(dtype, 5, 8, dim, 3), _pool(dtype, 90, 8, dim, 16)
    near_places = _lists([11, 1, 0, 7, 11, 11], 11, near)
    far_places = _lists([0, 0, 0, 3, 40, 640], 640, far)
    q = torch.randn(6, HEADS, dim).to(dtype)
    return q, PlacedRows(near, near_places), PlacedRows(far, far_places), torch.randn(HEADS)


def _expected(q: Tensor, near: PlacedRows, far: PlacedRows, sinks: Tensor) -> Tensor:
    answers = torch.zeros(q.shape, dtype=torch.float64)
    for token, query in enumerate(q.double()):
        parts = [
            pages.flatten(0, 1)[places[token][places[token] >= 0]]
            for pages, places in ((p.pages.reshape(p.pages.shape), p.places) for p in (near, far))
        ]
        rows = torch.cat(parts).double()
        if len(rows):
            scores = torch.cat((query @ rows.T * SCALE, sinks.double()[:, None]), dim=1)
            answers[token] = scores.softmax(1)[:, :-1] @ rows
    return answers


@every_dtype
@pytest.mark.parametrize("dim", [16, 21])
@pytest.mark.parametrize("far_is_near", [False, True])
def test_both_pools_have_one_softmax(dtype: torch.dtype, dim: int, far_is_near: bool) -> None:
    """Wherever the pools lie in memory: the second is above the first, or below it."""
    q, near, far, sinks = _given(dtype, dim)
    if far_is_near:
        near, far = far, near
    sinks = sinks.to(torch.float64 if dtype is torch.float64 else torch.float32)
    expected = _expected(q, near, far, sinks)
    made = latent_attention(q, *joined_rows(near, far), dim, SCALE, sinks)
    assert_close(made, expected, TOLERANCE[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_card_reads_both_pools(dtype: torch.dtype) -> None:
    q, near, far, sinks = _given(dtype, 16)
    expected = _expected(q, near, far, sinks)
    with on_a_card():
        joined = joined_rows(near, far)
        made = latent_attention_by_splits(q, *joined, 16, SCALE, sinks)
        usual = latent_attention(q, *joined, 16, SCALE, sinks)
        widths = [max(1, int((places >= 0).sum())) for places in joined.places]
        alone = [
            latent_attention_by_splits(
                q[i : i + 1], joined.pages, joined.places[i : i + 1, :width], 16, SCALE, sinks
            )
            for i, width in enumerate(widths)
        ]
    assert_close(made, expected, TOLERANCE[dtype])
    assert_close(usual, expected, TOLERANCE[dtype])
    assert len(set(widths)) == 5, "a list's width does not show"
    assert torch.equal(torch.cat(alone), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_s_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Nor on the width of the lists, nor on the pools' places in memory."""
    q, near, far, sinks = _given(dtype, 16)
    made = latent_attention(q, *joined_rows(near, far), 16, SCALE, sinks)
    moved = [PlacedRows(pool.pages.clone(), pool.places) for pool in (far, near)][::-1]
    assert torch.equal(latent_attention(q, *joined_rows(*moved), 16, SCALE, sinks), made)
    for token in range(len(q)):
        some = slice(token, token + 1)
        widths = (int((pool.places[token] >= 0).sum()) or 1 for pool in (near, far))
        lists = [
            PlacedRows(pool.pages, pool.places[some, :width])
            for pool, width in zip((near, far), widths, strict=True)
        ]
        alone = latent_attention(q[some], *joined_rows(*lists), 16, SCALE, sinks)
        assert torch.equal(alone[0], made[token])


@pytest.mark.parametrize(("page_size", "block_len"), [(8, 4), (4, 4), (4, 16), (16, 1)])
def test_a_row_lies_where_its_block_s_last_token_does(page_size: int, block_len: int) -> None:
    """Every block's row has a place of its own, in the page of its last token."""
    table, tokens = torch.randperm(64)[:40].view(2, 20), 50
    rows, positions = torch.arange(2).repeat_interleave(tokens), torch.arange(tokens).repeat(2)
    rows, positions = torch.cat((rows, rows[:1])), torch.cat((positions, torch.tensor([-1])))
    closed = closed_blocks(table, rows, positions, page_size, block_len)
    pages = torch.full((64, rows_of_page(page_size, block_len), 1), -1.0)
    closed.write(pages, torch.arange(len(rows), dtype=torch.float32)[:, None])
    assert int((pages >= 0).sum()) == 2 * (tokens // block_len)
    for request in range(2):
        blocks = torch.arange(tokens // block_len)[None]
        asked = slice(request * tokens, request * tokens + 1)
        places = closed.places(blocks, asked, pages.shape[1])[0]
        ends = (blocks[0] + 1) * block_len - 1
        assert torch.equal(pages.flatten()[places], (request * tokens + ends).float())
        assert torch.equal(places // pages.shape[1], table[request][ends // page_size])
    assert torch.equal(closed.last[:tokens], (torch.arange(tokens) + 1) // block_len - 1)
    assert (int(closed.last[-1]), int(closed.closing[-1])) == (-1, -1)


@pytest.mark.parametrize("columns", [0, 3, 4, 7, 8, 20])
def test_a_table_of_block_ends_lies_as_kernels_read_it(columns: int) -> None:
    table, tokens = torch.arange(2 * columns).view(2, columns), torch.zeros(3, dtype=torch.int64)
    closed = closed_blocks(table, tokens, tokens, page_size=4, block_len=16)
    assert closed.table.tolist() == [row[3::4] for row in table.tolist()]
    assert closed.table.stride(1) == 1


def _chosen(q: Tensor, weights: Tensor, index: Tensor, closed: ClosedBlocks, count: int) -> Tensor:
    return choose_block_rows(q, weights, index, closed, slice(None), count)


@every_dtype
def test_the_best_closed_blocks_are_chosen(dtype: torch.dtype) -> None:
    page_size, block_len, count, tokens = 8, 4, 5, 60
    table, positions = torch.randperm(16)[:8][None], torch.arange(tokens)
    rows = torch.zeros_like(positions)
    closed = closed_blocks(table, rows, positions, page_size, block_len)
    index = torch.randn(16, 2, 6).to(dtype)
    q, weights = torch.randn(tokens, 3, 6).to(dtype), torch.rand(tokens, 3).to(torch.float32)
    weights = weights.double() if dtype is torch.float64 else weights
    chosen = _chosen(q, weights, index, closed, count)
    keys = index[table[0]].flatten(0, 1).double()
    for token in range(tokens):
        num_closed = (token + 1) // block_len
        wanted = (q[token].double() @ keys[:num_closed].T).relu()
        scores = (weights[token].double()[:, None] * wanted).sum(0)
        order = sorted(range(num_closed), key=lambda block: (-float(scores[block]), block))
        right = sorted(order[:count])
        assert chosen[token].tolist() == right + [-1] * (count - len(right))
    alone = [
        choose_block_rows(q, weights, index, closed, slice(t, t + 1), count) for t in range(tokens)
    ]
    assert torch.equal(torch.cat(alone), chosen)
