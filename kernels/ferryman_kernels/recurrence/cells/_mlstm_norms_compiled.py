"""The first pass of the mLSTM cell for the CPU: what its gates make of each token; see `mlstm`.

A job has the norm and the running maximum of one head of one request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import STRICT, Loop, as_flat, exp, part, prange, row_like, wide
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._vectors import LANES, fused, load, row_at, spread, store, total
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates
from ferryman_kernels.recurrence.loops.runs import TokenRuns

TOKEN_ELEMENTS = 64
"""A token's gates take about the time of so many elements of other loops."""


@part
def capped(raw: Any, cap: Any) -> Any:
    return cap * np.tanh(raw / cap)


@part
def log_sigmoid(raw: Any) -> Any:
    least = raw if raw < 0 else raw - raw
    return least - np.log1p(np.exp(-abs(raw)))


@part
def norm_token(key: Any, query: Any, keep: Any, enter: Any, norm: Any) -> Any:
    """norm ← keep·norm + enter·key, in whole vectors; returns norm·query."""
    kept, entering, zero = spread(keep), spread(enter), spread(norm.dtype.type(0))
    sums = zero
    for n in range(0, len(norm), LANES):
        new = fused(entering, load(key, n), fused(kept, load(norm, n), zero))
        store(norm, n, new)
        sums = fused(new, load(query, n), sums)
    return total(sums)


@part
def factors_of_token(enter: Any, forget: Any, cap: Any, peak: Any) -> Any:
    """keep and enter of a token, of its gates before their cap, and the maximum after it."""
    entering = capped(enter, cap)
    moved = log_sigmoid(capped(forget, cap)) + peak
    later = entering if entering > moved else moved
    return exp(moved - later), exp(entering - later), later


@part
def pass_norms(
    job: Any, like: Any, floats: Any, q: Any, k: Any, gates: Any, constants: Any, norms: Any,
    runs: Any, factors: Any, k_dim: Any,
) -> None:  # fmt: skip
    """All runs of one head of one request, the `job`th of requests × heads: fills `factors`
    [tokens, heads, 3] with keep, enter and the divisor.

    `q` and `k` are addresses, each with its step from token to token in numbers of the dtype of
    `like`. `constants` are the cap, eps and the factor of q.
    """
    (states, slot_size), (enter, step_i, forget, step_f) = norms, gates
    sources, firsts, tokens, counts, kept = runs
    heads, width = factors.shape[1], padded(k_dim, LANES)
    request, head = job // heads, job % heads
    cap, eps, scale = constants[0], constants[1], constants[2]
    norm, peak = np.zeros(width, floats.dtype), floats.dtype.type(0)
    key, query = np.zeros(width, floats.dtype), np.zeros(width, floats.dtype)
    if sources[request] >= 0:
        stored = states[sources[request] * slot_size + head * (k_dim + 1) :]
        # Rows of a slot are no whole vectors: the norm is computed in a copy.
        peak = stored[k_dim]
        for n in range(k_dim):
            norm[n] = stored[n]
    for run in range(firsts[request], firsts[request + 1]):
        for token in range(tokens[run], tokens[run] + counts[run]):
            raw_key = row_at(k[0] + (token * k[1] + head * k_dim) * like.itemsize, like)
            raw_query = row_at(q[0] + (token * q[1] + head * k_dim) * like.itemsize, like)
            for n in range(k_dim):
                key[n] = wide(raw_key[n])
            for n in range(k_dim):
                query[n] = wide(raw_query[n]) * scale
            raw_enter, raw_forget = enter[token * step_i + head], forget[token * step_f + head]
            keep, entering, peak = factors_of_token(wide(raw_enter), wide(raw_forget), cap, peak)
            length = abs(norm_token(key, query, keep, entering, norm))
            least = exp(-peak)
            factors[token, head, 0], factors[token, head, 1] = keep, entering
            factors[token, head, 2] = (least if least > length else length) + eps
        if kept[run] >= 0:
            target = states[kept[run] * slot_size + head * (k_dim + 1) :]
            target[k_dim] = peak
            for n in range(k_dim):
                target[n] = norm[n]


def _norms(
    like: Any, floats: Any, q: Any, k: Any, gates: Any, constants: Any, norms: Any, runs: Any,
    factors: Any, k_dim: int,
) -> None:  # fmt: skip
    # A shared loop takes numbers and arrays, no tuples.
    (q_at, step_q), (k_at, step_k), (states, slot_size) = q, k, norms
    (enter, step_i, forget, step_f), (sources, firsts, tokens, counts, kept) = gates, runs
    for job in prange(len(sources) * factors.shape[1]):
        pass_norms(
            job, like, floats, (q_at, step_q), (k_at, step_k), (enter, step_i, forget, step_f),
            constants, (states, slot_size), (sources, firsts, tokens, counts, kept), factors,
            k_dim,
        )  # fmt: skip


_norms_loop = Loop(_norms, STRICT)


def token_factors(q: Tensor, k: Tensor, gates: CellGates, norm: Tensor, runs: TokenRuns) -> Any:
    """keep, enter and the divisor of each token [tokens, heads, 3]; `norm` advances from slot to
    slot. A token's heads of q and of k lie in one piece."""
    tokens, heads, k_dim = q.shape
    assert norm.stride()[1:] == (k_dim + 1, 1), norm.stride()
    assert gates.enter.stride(1) == gates.forget.stride(1) == 1, gates.enter.stride()
    numbers = gates.cap, gates.eps, k_dim**-0.5
    constants = torch.tensor(numbers, dtype=norm.dtype, device="cpu").numpy()
    places = [(tensor.data_ptr(), tensor.stride(0)) for tensor in (q, k)]
    factors = torch.empty(tokens, heads, 3, dtype=norm.dtype).numpy()
    entering = as_flat(gates.enter), gates.enter.stride(0)
    opened = *entering, as_flat(gates.forget), gates.forget.stride(0)
    _norms_loop(
        tokens * heads * (k_dim + TOKEN_ELEMENTS),
        row_like(q.dtype), row_like(norm.dtype), *places, opened, constants,
        (as_flat(norm), norm.stride(0)), tuple(runs), factors, k_dim,
    )  # fmt: skip
    return factors
