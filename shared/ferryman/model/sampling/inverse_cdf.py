"""Drawing by inverse CDF over a row's filtered, descending-sorted distribution.

    weights = exp((logit − max) / temperature), sorted descending, lowest id first in a tie
    kept    = the shortest prefix that top_k, top_p (of the mass top_k left) and min_p each allow
    token   = the first whose cumulative weight exceeds uniform · weight(kept)

On the host a sort of the whole vocabulary dominates the time of a step, and nearly every draw falls
among the likeliest few. So those are ranked first, and a row is sorted whole only if they cannot
decide it. Both ways compute the same numbers in the same order, so they choose the same token.
(100,352 tokens, 32 rows, one thread: a whole sort takes 450 ms, the likeliest 256 take 30.) A card
draws by two kernels and a sort (`row_draw.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels.elementwise.row_draw import DrawnRows

NUM_LIKELIEST = 256


@dataclass(frozen=True, slots=True)
class Filters(DrawnRows):
    """Parameters of the rows that are drawn. Greedy rows are not among them."""

    def of(self, rows: Tensor) -> Filters:
        """The parameters of the given rows."""
        return Filters(
            self.indices[rows],
            self.uniforms[rows],
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """The likeliest tokens of each row in order [drawn, ranked]; the first `lens` are in place."""

    logits: Tensor
    token_ids: Tensor
    lens: Tensor


def draw(logits: Tensor, filters: Filters) -> Tensor:
    """One token for each row of logits [drawn, vocab]. Reads back which rows it has to sort."""
    total = _total(logits, filters)
    if logits.shape[-1] <= NUM_LIKELIEST:
        return _choose(_ranked(logits), total, filters, logits.shape[-1])[0]
    tokens, is_decided = _choose(_likeliest(logits), total, filters, logits.shape[-1])
    rest = (~is_decided).nonzero()[:, 0]
    if len(rest):
        ranking, of_rest = _ranked(logits[rest]), filters.of(rest)
        tokens[rest] = _choose(ranking, total[rest], of_rest, logits.shape[-1])[0]
    return tokens


def _total(logits: Tensor, filters: Filters) -> Tensor:
    """The weight of the whole vocabulary [drawn]: a running sum, in one order at any batch size."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), filters)
    return weights.cumsum_(dim=-1)[:, -1]


def _weights(logits: Tensor, top: Tensor, filters: Filters) -> Tensor:
    return (logits - top).double().div_(filters.temperatures[:, None]).exp_()


def _ranked(logits: Tensor) -> Ranking:
    # Sorted before the division by temperature, which could turn different logits into ties.
    ranked, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    return Ranking(ranked, token_ids, torch.full_like(token_ids[:, 0], logits.shape[-1]))


def _likeliest(logits: Tensor) -> Ranking:
    values, token_ids = logits.topk(NUM_LIKELIEST, dim=-1)
    # topk chooses arbitrarily among tokens that tie with its last one, so none of those counts.
    lens = (values > values[:, -1:]).sum(dim=-1)
    token_ids, by_id = token_ids.sort(dim=-1)
    ranked, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return Ranking(ranked, token_ids.gather(1, by_value), lens)


def _choose(ranking: Ranking, total: Tensor, filters: Filters, vocab: int) -> tuple[Tensor, Tensor]:
    """A token for each row, and whether the ranked tokens suffice to choose it, both [drawn]."""
    weights = _weights(ranking.logits, ranking.logits[:, :1], filters)
    is_ranked = torch.arange(weights.shape[-1], device=weights.device) < ranking.lens[:, None]
    cumulative = weights.cumsum(dim=-1)
    by_k = torch.where(filters.top_k > 0, filters.top_k.clamp_max(vocab), vocab)
    mass = torch.where(by_k == vocab, total, _at(cumulative, by_k - 1))
    is_needed = is_ranked & (cumulative < (filters.top_p * mass)[:, None])
    by_p = torch.where(filters.top_p < 1, is_needed.sum(dim=-1) + 1, vocab)
    is_likely = is_ranked & (weights >= filters.min_p[:, None])
    by_min = _or_beyond(is_likely.sum(dim=-1), ranking.lens, vocab)
    kept = torch.minimum(torch.minimum(by_k, by_p), by_min)
    target = filters.uniforms * torch.where(kept >= vocab, total, _at(cumulative, kept - 1))
    index = (is_ranked & (cumulative <= target[:, None])).sum(dim=-1)
    # Rounding may put the target on the very end of the kept weight, after which there are only
    # tokens that must not be drawn.
    num_possible = (ranking.logits > -torch.inf).sum(dim=-1)
    last = torch.minimum(kept, num_possible) - 1
    tokens = _at(ranking.token_ids, torch.minimum(index, last))
    is_mass_known = (by_k <= ranking.lens) | (by_k == vocab)
    is_open = (by_k == vocab) & (filters.top_p >= 1) & (filters.min_p <= 0)
    is_ended = (kept <= ranking.lens) | (is_open & (index < ranking.lens))
    return tokens, is_mass_known & is_ended


def _or_beyond(count: Tensor, lens: Tensor, vocab: int) -> Tensor:
    """The count, or `vocab` if all ranked tokens pass: unranked tokens may pass too."""
    return torch.where(count >= lens, vocab, count)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[i, index[i]]; an index beyond the last column takes the last one.

    An index before the first takes the first one: no token is kept of a row with NaN.
    """
    return values.gather(1, index.clamp(0, values.shape[-1] - 1)[:, None])[:, 0]
