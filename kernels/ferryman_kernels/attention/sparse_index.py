"""The lightning indexer of sparse attention (DeepSeek-V3.2): it chooses the positions to attend to.

    score[position] = Σ_heads weight · relu(q·key[position])         for positions 0 … own
    chosen          = the `count` best of them, or all if there are no more

An exact tie goes to the lower position in every implementation. Ties are common, because relu gives
the same zero to every position that no head wants. Scores are computed in float32 (float64 for
float64), and the chosen positions are in rising order. On a CPU a chunk's scores are those of its
tokens alone, to the bit: one loop computes both.

A row may be the key of several positions (`blocks/mean_index.py`): with a `step` key k is in the
row of position (k + 1)·step - 1, and a token's position is that of its last key, -1 for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.attention._sparse_index_compiled import index_scores_compiled
from ferryman_kernels.attention._sparse_index_triton import index_scores_triton
from ferryman_kernels.attention.latent_pages import all_positions, places_of
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.cpu.launches import for_many_tokens
from ferryman_kernels.ragged import Span, first_tokens

SCORE_BLOCK = 1 << 22
"""The number of products of heads and keys in memory at once."""


def index_scores_reference(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    step: int = 1,
) -> Tensor:
    """Scores [tokens, every key of the table], -inf for those that a token does not see."""
    page_size, wide = index_pages.shape[1], wide_dtype(q.dtype)
    keys = torch.arange(page_table.shape[1] * page_size // step, device=q.device)
    seen = keys <= positions[:, None]
    rows_at = torch.where(seen, (keys + 1) * step - 1, -1)
    places = places_of(rows_at, page_table, rows, page_size).clamp_min(0)
    found = index_pages[places // page_size, places % page_size].to(wide)
    wanted = torch.einsum("thd,tkd->thk", q.to(wide), found).relu()
    scores = torch.einsum("th,thk->tk", weights.to(wide), wanted)
    return scores.masked_fill(~seen, -torch.inf)


def has_to_choose(reach: int, count: int) -> bool:
    """Whether the `count` best of `reach` keys are found by scores, which the best of fewer are not
    but where short steps stand for long ones: a score's loop is compiled when it first runs."""
    return reach > count or (reach > 0 and for_many_tokens.get())


def best_positions(scores: Tensor, count: int) -> Tensor:
    """The `count` best columns of each row of `scores` [tokens, keys], rising, then -1.

    Columns of -inf are not seen and never chosen. Returns [tokens, min(count, keys)].
    """
    keys = torch.arange(scores.shape[1], device=scores.device)
    width = min(count, len(keys))
    chosen = scores > -torch.inf
    if width < len(keys):
        least = scores.topk(count, dim=1).values[:, -1:]
        above, tied = scores > least, chosen & (scores == least)
        room = count - above.sum(1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(1) <= room))
    # Each chosen column is scattered to its rank; all others go to one extra column, which is cut
    # off.
    order = torch.where(chosen, chosen.cumsum(1) - 1, width)
    best = torch.full((len(scores), width + 1), -1, device=scores.device)
    return best.scatter_(1, order, keys.expand_as(order))[:, :width]


Scorer = Callable[[slice, int, int], Tensor]
"""The scores [tokens, positions] of some tokens of a request, by their positions, first and end."""


def choose_prefill(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    count: int,
) -> Tensor:
    """The places that each token of several chunks attends to. It computes no scores where all
    positions are chosen.

    `q` [tokens, index_heads, index_dim] and `weights` [tokens, index_heads] are at the absolute
    positions of `spans`; index keys up to each end are already written to `index_pages` [slots,
    page_size, index_dim]. Returns places [tokens, min(count, longest end)], rising by position,
    then -1. On a card scores are torch's products.
    """
    score = _score_by_loop if serves(q) else _score_by_products
    return _choose(score, (q, weights, index_pages), page_table, spans, count)


def choose_prefill_by_token(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    spans: Sequence[Span],
    count: int,
) -> Tensor:
    """`choose_prefill`, on a card by the kernel that scores single tokens: a token chooses by
    the scores that it has in decode."""
    if not q.is_cuda or q.dtype == torch.float64:
        return choose_prefill(q, weights, index_pages, page_table, spans, count)
    return _choose(_score_by_kernel, (q, weights, index_pages), page_table, spans, count)


def _choose(
    score: Callable[[Tensor, Tensor, Tensor, Tensor, int], Scorer],
    asking: tuple[Tensor, Tensor, Tensor],
    page_table: Tensor,
    spans: Sequence[Span],
    count: int,
) -> Tensor:
    """`choose_prefill` by the scores that `score` gives for a request's table [1, pages]."""
    q, weights, index_pages = asking
    _check(q, weights, index_pages, page_table)
    assert page_table.shape[0] == len(spans), (page_table.shape, spans)
    assert sum(end - start for start, end in spans) == len(q), (spans, q.shape)
    places = torch.full((len(q), min(count, max(end for _, end in spans))), -1, device=q.device)
    for row, ((start, end), first) in enumerate(zip(spans, first_tokens(spans), strict=False)):
        table = page_table[row : row + 1, : -(-end // index_pages.shape[1])]
        scores_of = score(q, weights, index_pages, table, end)
        block = max(1, SCORE_BLOCK // (q.shape[1] * end))
        for low in range(start, end, block):
            high = min(low + block, end)
            tokens = slice(first + low - start, first + high - start)
            best = all_positions(torch.arange(low, high, device=q.device), high)
            if has_to_choose(high, count):
                best = best_positions(scores_of(tokens, low, high), count)
            rows = torch.zeros(high - low, dtype=torch.int64, device=q.device)
            places[tokens, : best.shape[1]] = places_of(best, table, rows, index_pages.shape[1])
    return places


def _score_by_loop(
    q: Tensor, weights: Tensor, index_pages: Tensor, table: Tensor, end: int
) -> Scorer:
    return _score_single_tokens(index_scores_compiled, q, weights, index_pages, table)


def _score_by_kernel(
    q: Tensor, weights: Tensor, index_pages: Tensor, table: Tensor, end: int
) -> Scorer:
    return _score_single_tokens(index_scores_triton, q, weights, index_pages, table)


def _score_single_tokens(
    run: Callable[..., Tensor], q: Tensor, weights: Tensor, index_pages: Tensor, table: Tensor
) -> Scorer:
    def scores_of(tokens: slice, low: int, high: int) -> Tensor:
        rows = torch.zeros(high - low, dtype=torch.int64, device=q.device)
        positions = torch.arange(low, high, device=q.device)
        return run(q[tokens], weights[tokens], index_pages, table, rows, positions)

    return scores_of


def _score_by_products(
    q: Tensor, weights: Tensor, index_pages: Tensor, table: Tensor, end: int
) -> Scorer:
    keys = index_pages[table[0]].flatten(0, 1).to(wide_dtype(q.dtype))
    return lambda tokens, low, high: _scores(q[tokens], weights[tokens], keys[:high], low)


def _scores(q: Tensor, weights: Tensor, keys: Tensor, first: int) -> Tensor:
    """Scores [tokens, keys] of the tokens from position `first` on; -inf for keys after a token."""
    tokens, heads, _ = q.shape
    wanted = (q.to(keys.dtype).flatten(0, 1) @ keys.T).relu_().view(tokens, heads, -1)
    scores = torch.bmm(weights.to(keys.dtype)[:, None], wanted)[:, 0]
    positions = torch.arange(first, first + tokens, device=q.device)
    ahead = torch.arange(len(keys), device=q.device) > positions[:, None]
    return scores.masked_fill_(ahead, -torch.inf)


def choose_decode(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    count: int,
) -> Tensor:
    """The places that each single token attends to; each token has its own row of `page_table`.

    As `choose_prefill`; several tokens may belong to one request. Returns places [tokens, at most
    `count`].
    """
    _check(q, weights, index_pages, page_table)
    assert len(page_table) == len(positions) == len(q), (page_table.shape, positions.shape, q.shape)
    rows, page_size = torch.arange(len(q), device=q.device), index_pages.shape[1]
    reach = page_table.shape[1] * page_size
    if not has_to_choose(reach, count):
        return places_of(all_positions(positions, reach), page_table, rows, page_size)
    scores = index_scores(q, weights, index_pages, page_table, rows, positions)
    return places_of(best_positions(scores, count), page_table, rows, page_size)


def index_scores(
    q: Tensor,
    weights: Tensor,
    index_pages: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    step: int = 1,
) -> Tensor:
    """Scores [tokens, keys] of single tokens, -inf for those that a token does not see; as many
    keys as the table has, or as the furthest token sees.

    `rows` [tokens] is each token's row of the table.
    """
    run = index_scores_reference
    if q.is_cuda and q.dtype != torch.float64:
        run = index_scores_triton
    elif serves(q):
        run = index_scores_compiled
    return run(q, weights, index_pages, page_table, rows, positions, step)


def _check(q: Tensor, weights: Tensor, index_pages: Tensor, page_table: Tensor) -> None:
    assert q.ndim == index_pages.ndim == 3, (q.shape, index_pages.shape)
    assert q.shape[2] == index_pages.shape[2], (q.shape, index_pages.shape)
    assert weights.shape == q.shape[:2], (weights.shape, q.shape)
    assert q.dtype == index_pages.dtype, (q.dtype, index_pages.dtype)
    assert page_table.ndim == 2, page_table.shape
