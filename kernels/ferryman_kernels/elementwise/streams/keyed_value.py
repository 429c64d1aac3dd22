"""A row that each stream of a token takes as far as its key fits the stream (Qwen 4's n-grams).

    score[s] = norm(key[s]) · norm(stream[s]) / sqrt(dim)
    gate[s]  = sigmoid(sqrt(max(|score[s]|, 1e-6)) with the sign of the score)
    y[s]     = gate[s] · value                                             [tokens, streams, dim]
    z[s]     = norm(y[s])

The norms are root mean squares, each stream's with weights of its own. Computed in float32 (float64
for float64): y is rounded once, and z of the rounded y once. Sums are in the norm's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import (
    Kernel,
    laid_out,
    next_power_of_two,
    tl,
    warps_of_row,
    wide_type,
)
from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    exp,
    narrow,
    part,
    prange,
    row_like,
    serves,
    wide,
)
from ferryman_kernels.cpu._vectors import LANES, fused, load, row_at, spread, total
from ferryman_kernels.elementwise._rms_norm_compiled import norm_row, sum_of_squares

LEAST_SCORE = 1e-6
"""The least size of a score below the root."""


class StreamNorms(NamedTuple):
    """The weights of the norms of keys, of streams and of what is taken, [streams, dim] in the
    accumulation dtype, and their epsilon."""

    key: Tensor
    stream: Tensor
    taken: Tensor
    eps: float


def keyed_value_reference(
    keys: Tensor, streams: Tensor, values: Tensor, norms: StreamNorms
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(streams.dtype)

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        rows = rows.to(wide)
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norms.eps)
        return rows * scale * weight

    scores = (normed(keys, norms.key) * normed(streams, norms.stream)).sum(-1, keepdim=True)
    scores = scores * streams.shape[2] ** -0.5
    roots = scores.abs().clamp_min(LEAST_SCORE).sqrt() * scores.sign()
    taken = (torch.sigmoid(roots) * values[:, None].to(wide)).to(streams.dtype)
    return taken, normed(taken, norms.taken).to(streams.dtype)


@part
def _product_of(key: Any, stream: Any, key_factors: Any, factors: Any) -> Any:
    """Σ key · stream · both factors, in 16 running sums, then one by one."""
    number, dim = factors.dtype.type, key.shape[0]
    products, sums = np.empty(dim, factors.dtype), spread(number(0))
    for c in range(dim):
        products[c] = wide(key[c]) * key_factors[c] * (wide(stream[c]) * factors[c])
    unit, whole = spread(number(1)), dim // LANES * LANES
    for at in range(0, whole, LANES):
        sums = fused(load(products, at), unit, sums)
    score = total(sums)
    for c in range(whole, dim):
        score += products[c]
    return score


def _keyed(
    like: Any, floats: Any, keys: int, streams: int, values: int, key_weights: int,
    stream_weights: int, taken_weights: int, eps: float, taken: int, normed: int, tokens: int,
    count: int, dim: int,
) -> None:  # fmt: skip
    number, size = floats.dtype.type, like.itemsize
    unit, least, root_dim = number(1), number(LEAST_SCORE), np.sqrt(number(dim))
    for job in prange(tokens * count):
        token, first = job // count, job % count * dim
        key = row_at(keys + job * dim * size, like)[:dim]
        stream = row_at(streams + job * dim * size, like)[:dim]
        value = row_at(values + token * dim * size, like)[:dim]
        key_factors = row_at(key_weights, floats)[first : first + dim]
        factors = row_at(stream_weights, floats)[first : first + dim]
        score = _product_of(key, stream, key_factors, factors)
        score /= np.sqrt(sum_of_squares(key, number) / number(dim) + number(eps))
        score /= np.sqrt(sum_of_squares(stream, number) / number(dim) + number(eps))
        score /= root_dim
        sized = least if np.abs(score) < least else np.abs(score)
        root = np.sqrt(sized) if score != number(0) else number(0)
        gate = unit / (unit + exp(root if score < number(0) else -root))
        out = row_at(taken + job * dim * size, like)[:dim]
        for c in range(dim):
            out[c] = narrow(gate * wide(value[c]), out)
        norms = row_at(taken_weights, floats)[first : first + dim]
        norm_row(out, norms, number(eps), row_at(normed + job * dim * size, like)[:dim])


_keyed_loop = Loop(_keyed, STRICT)


def keyed_value_compiled(
    keys: Tensor, streams: Tensor, values: Tensor, norms: StreamNorms
) -> tuple[Tensor, Tensor]:
    keys, streams, values = keys.contiguous(), streams.contiguous(), values.contiguous()
    taken, normed = torch.empty_like(streams), torch.empty_like(streams)
    _keyed_loop(
        4 * streams.numel(),
        row_like(streams.dtype), row_like(wide_dtype(streams.dtype)), keys.data_ptr(),
        streams.data_ptr(), values.data_ptr(), *(weight.data_ptr() for weight in norms[:3]),
        norms.eps, taken.data_ptr(), normed.data_ptr(), *streams.shape,
    )  # fmt: skip
    return taken, normed


@Kernel
def _keyed_value_kernel(
    keys_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_weights_ptr: tl.tensor,
    stream_weights_ptr: tl.tensor,
    taken_weights_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    dim: int,
    EPS: tl.constexpr,
    ROOT: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One stream of one token."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_DIM)
    mask, at = offs < dim, (token * tl.num_programs(1) + stream) * dim + offs
    weights_at = stream * dim + offs
    key = tl.load(keys_ptr + at, mask=mask, other=0.0).to(WIDE)
    row = tl.load(streams_ptr + at, mask=mask, other=0.0).to(WIDE)
    key_factor = tl.load(key_weights_ptr + weights_at, mask=mask, other=0.0)
    factor = tl.load(stream_weights_ptr + weights_at, mask=mask, other=0.0)
    score = tl.sum(key * key_factor * (row * factor), axis=0)
    score = score / tl.sqrt(tl.sum(key * key, axis=0) / dim + EPS)
    score = score / tl.sqrt(tl.sum(row * row, axis=0) / dim + EPS)
    score = score / ROOT
    sized = tl.where(tl.abs(score) < LEAST, LEAST, tl.abs(score))
    root = tl.where(score < 0.0, -tl.sqrt(sized), tl.sqrt(sized))
    root = tl.where(score == 0.0, 0.0, root)
    value = tl.load(values_ptr + token * dim + offs, mask=mask, other=0.0).to(WIDE)
    taken = (value / (1.0 + tl.exp(-root))).to(taken_ptr.dtype.element_ty)
    tl.store(taken_ptr + at, taken, mask=mask)
    rounded = taken.to(WIDE)
    scale = 1.0 / tl.sqrt(tl.sum(rounded * rounded, axis=0) / dim + EPS)
    last = tl.load(taken_weights_ptr + weights_at, mask=mask, other=0.0)
    normed = rounded * scale * last
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def keyed_value_triton(
    keys: Tensor, streams: Tensor, values: Tensor, norms: StreamNorms
) -> tuple[Tensor, Tensor]:
    (tokens, count, dim), keys, streams = streams.shape, laid_out(keys), laid_out(streams)
    taken, normed = torch.empty_like(streams), torch.empty_like(streams)
    block = next_power_of_two(dim)
    _keyed_value_kernel[tokens, count](
        keys, streams, laid_out(values), *norms[:3], taken, normed, dim, EPS=float(norms.eps),
        ROOT=dim**0.5, LEAST=LEAST_SCORE, BLOCK_DIM=block, WIDE=wide_type(streams.dtype),
        num_warps=warps_of_row(block),
    )  # fmt: skip
    return taken, normed


def keyed_value(
    keys: Tensor, streams: Tensor, values: Tensor, norms: StreamNorms
) -> tuple[Tensor, Tensor]:
    """y and z of the dtype of `streams` [tokens, streams, dim], from `keys` of its shape and
    `values` [tokens, dim]."""
    assert keys.shape == streams.shape, (keys.shape, streams.shape)
    assert values.shape == (len(streams), streams.shape[2]), (values.shape, streams.shape)
    assert keys.dtype is streams.dtype is values.dtype, (keys.dtype, streams.dtype, values.dtype)
    for weight in norms[:3]:
        assert weight.shape == streams.shape[1:], (weight.shape, streams.shape)
        assert weight.dtype is wide_dtype(streams.dtype), (weight.dtype, streams.dtype)
    if streams.is_cuda:
        return keyed_value_triton(keys, streams, values, norms)
    run = keyed_value_compiled if serves(keys, streams, values) else keyed_value_reference
    return run(keys, streams, values, norms)
