"""Every implementation of the indexer chooses by its formula; ties go to lower positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from tests.kernels.slabs import PAGE_SIZE, row_pages, rows_of, spoil_beyond, table_of
from torch import Tensor

from ferryman_kernels.attention._sparse_index_compiled import index_scores_compiled
from ferryman_kernels.attention._sparse_index_triton import index_scores_triton
from ferryman_kernels.attention.latent_pages import places_of
from ferryman_kernels.attention.sparse_index import (
    best_positions,
    choose_decode,
    choose_prefill,
    index_scores_reference,
)
from ferryman_kernels.cpu.launches import loops_for_many_tokens

DIM = 24
SPANS = ((0, 70), (24, 31), (5, 6), (13, 100))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-3}
CPU = torch.device("cpu")
scores_of_few_too = pytest.mark.parametrize(
    "loops", [nullcontext, loops_for_many_tokens], ids=["", "those of many"]
)
"""Also where all are chosen."""


def _queries(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, heads, DIM).to(dtype), torch.randn(tokens, heads).to(dtype)


def _naive_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """One token's scores [keys], a loop over its heads."""
    scores = torch.zeros(len(keys), dtype=torch.float64)
    for query, weight in zip(q.double(), weights.double(), strict=True):
        scores += weight * (keys @ query).clamp_min(0)
    return scores


def _naive_best(scores: Tensor, count: int) -> list[int]:
    """The best `count`, the lower position first where two are equal; in rising order."""
    order = sorted(range(len(scores)), key=lambda position: (-float(scores[position]), position))
    return sorted(order[:count])


@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [index_scores_reference, index_scores_compiled, index_scores_triton]
)
def test_scores_are_those_of_the_formula(
    run: Callable[..., Tensor], dtype: torch.dtype, heads: int, device: torch.device
) -> None:
    place = device if run is index_scores_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    positions = [0, 7, 8, 75, 63, 64]
    table, pages = table_of([p + 1 for p in positions], 60), row_pages(dtype, 60, DIM)
    spoil_beyond(pages, table, [p + 1 for p in positions])
    q, weights = _queries(len(positions), heads, dtype)
    rows = torch.arange(len(positions))
    moved = [t.to(place) for t in (q, weights, pages, table, rows, torch.tensor(positions))]
    scores = run(*moved).cpu().double()
    tolerance = max(TOLERANCE[dtype], 1e-4 if run is index_scores_triton else 0)
    for i, position in enumerate(positions):
        keys = rows_of(pages, table[i], position + 1)
        expected = _naive_scores(q[i], weights[i], keys)
        found = scores[i, : position + 1]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert bool((scores[i, position + 1 :] == -torch.inf).all())


@pytest.mark.parametrize("count", [1, 7, 16, 40, 99, 100, 500])
@scores_of_few_too
def test_a_chunk_chooses_the_best_of_what_each_token_sees(
    loops: Callable[[], AbstractContextManager[None]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman_kernels.attention.sparse_index.SCORE_BLOCK", 3 * 100 * 9)
    table, pages = table_of([end for _, end in SPANS], 40), row_pages(torch.float64, 40, DIM)
    spoil_beyond(pages, table, [end for _, end in SPANS])
    seen = [(i, p) for i, (start, end) in enumerate(SPANS) for p in range(start, end)]
    q, weights = _queries(len(seen), 3, torch.float64)
    with loops():
        places = choose_prefill(q, weights, pages, table, SPANS, count)
    assert places.shape == (len(seen), min(count, 100))
    for token, (row, position) in enumerate(seen):
        keys = rows_of(pages, table[row], position + 1)
        best = _naive_best(_naive_scores(q[token], weights[token], keys), count)
        expected = [int(table[row, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in best]
        assert places[token].tolist() == expected + [-1] * (places.shape[1] - len(expected))


@pytest.mark.parametrize("count", [1, 16, 63, 64, 500])
@scores_of_few_too
def test_single_tokens_choose_what_their_chunk_chose(
    loops: Callable[[], AbstractContextManager[None]], count: int
) -> None:
    """Several tokens of one request are in one batch, as in the verification of drafts."""
    start, end, heads = 50, 90, 3
    table, pages = table_of([end], 20), row_pages(torch.float64, 20, DIM)
    q, weights = _queries(end - start, heads, torch.float64)
    chunk = choose_prefill(q, weights, pages, table, ((start, end),), count)
    positions = torch.arange(start, end)
    tables = table.expand(end - start, -1).contiguous()
    with loops():
        alone = choose_decode(q, weights, pages, tables, positions, count)
    assert torch.equal(alone[:, : chunk.shape[1]], chunk[:, : alone.shape[1]])


def test_equal_scores_are_chosen_from_the_lowest_position_on() -> None:
    scores = torch.tensor(
        [
            [0.0, 1.0, 0.0, -0.0, 1.0, 0.0, -1.0],
            [2.0, 2.0, 2.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf],
            [0.0, 0.0, 0.0, 0.0, 3.0, -torch.inf, -torch.inf],
        ]
    )
    assert best_positions(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, -1], [0, 1, 2, 4]]
    assert best_positions(scores, 1).tolist() == [[1], [0], [4]]
    assert best_positions(scores[:, :3], 5).tolist() == [[0, 1, 2]] * 3


def test_keys_that_no_head_wants_tie_at_zero_in_every_way_to_compute_them() -> None:
    pages, table = row_pages(torch.float64, 20, DIM), table_of([80], 20)
    q, weights = _queries(1, 1, torch.float64)
    position = torch.tensor([79])
    scores = index_scores_reference(q, weights, pages, table, torch.tensor([0]), position)
    assert int((scores == 0).sum()) > 20, "the case is not there"
    count = int((scores > 0).sum()) + 5 if weights[0, 0] > 0 else 5
    places = choose_decode(q, weights, pages, table, position, count)
    expected = _naive_best(scores[0, :80], count)
    assert torch.equal(places, places_of(torch.tensor([expected]), table, torch.tensor([0]), 8))
    assert torch.equal(places, choose_prefill(q, weights, pages, table, ((79, 80),), count))
