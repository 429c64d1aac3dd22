"""The loops of hyper-connections for the CPU; formulas and names are those of `hyper_connection`.

By strict rules a token's bits follow from its own streams and mixes alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ferryman_kernels.cpu._compiled import STRICT, Loop, exp, narrow, part, prange, wide
from ferryman_kernels.cpu._vectors import fused, row_at
from ferryman_kernels.elementwise._rms_norm_compiled import sum_of_squares


@part
def _divide_rows(matrix: Any, count: int, eps: Any) -> None:
    for row in range(count):
        total = eps
        for column in range(count):
            total += matrix[row * count + column]
        for column in range(count):
            matrix[row * count + column] /= total


@part
def _divide_columns(matrix: Any, count: int, eps: Any) -> None:
    for column in range(count):
        total = eps
        for row in range(count):
            total += matrix[row * count + column]
        for row in range(count):
            matrix[row * count + column] /= total


@part
def _balance(matrix: Any, count: int, rounds: int, eps: Any) -> None:
    """Makes logits [count · count] a doubly stochastic matrix, in place."""
    for row in range(count):
        greatest = matrix[row * count]
        for column in range(1, count):
            greatest = max(greatest, matrix[row * count + column])
        for column in range(count):
            matrix[row * count + column] = exp(matrix[row * count + column] - greatest)
    _divide_rows(matrix, count, eps - eps)
    for at in range(count * count):
        matrix[at] += eps
    for index in range(rounds):
        if index:
            _divide_rows(matrix, count, eps)
        _divide_columns(matrix, count, eps)


def _read(
    like: Any, floats: Any, streams: int, mixes: int, scales: int, base: int, factors: int,
    added: int, norm_eps: float, rounds: int, eps: float, gates: int, x: int, tokens: int,
    count: int, num_logits: int, num_gates: int, dim: int,
) -> None:  # fmt: skip
    number, size = floats.dtype.type, floats.itemsize
    scale, shift = row_at(scales, floats), row_at(base, floats)
    factor, more = row_at(factors, floats), row_at(added, floats)
    unit = number(1)
    for token in prange(tokens):
        rows = row_at(streams + token * count * dim * like.itemsize, like)[: count * dim]
        mean = sum_of_squares(rows, number) / number(count * dim)
        root = unit / np.sqrt(mean + number(norm_eps))
        mix = row_at(mixes + token * num_logits * size, floats)[:num_logits]
        gate = row_at(gates + token * num_logits * size, floats)[:num_logits]
        for k in range(num_gates):
            opened = unit / (unit + exp(-(mix[k] * root * scale[k] + shift[k])))
            gate[k] = opened * factor[k] + more[k]
        if rounds:
            for k in range(num_gates, num_logits):
                gate[k] = mix[k] * root * scale[k] + shift[k]
            _balance(gate[num_gates:], count, rounds, number(eps))
        out, total = (
            row_at(x + token * dim * like.itemsize, like)[:dim],
            np.zeros(dim, floats.dtype),
        )
        for stream in range(count):
            share, row = gate[stream], rows[stream * dim : (stream + 1) * dim]
            for c in range(dim):
                total[c] = fused(share, wide(row[c]), total[c])
        for c in range(dim):
            out[c] = narrow(total[c], out)


def _expand(
    like: Any, floats: Any, streams: int, y: int, stride_y: int, gates: int, stride_gates: int,
    expanded: int, rows: int, count: int, dim: int,
) -> None:  # fmt: skip
    size = like.itemsize
    for job in prange(rows):
        token, stream = job // count, job % count
        gate = row_at(gates + (token * stride_gates + stream) * floats.itemsize, floats)[0]
        row = row_at(streams + job * dim * size, like)[:dim]
        added = row_at(y + token * stride_y * size, like)[:dim]
        out = row_at(expanded + job * dim * size, like)[:dim]
        for c in range(dim):
            out[c] = narrow(fused(gate, wide(added[c]), wide(row[c])), out)


def _mix(
    like: Any, floats: Any, streams: int, y: int, stride_y: int, gates: int, stride_gates: int,
    mixed: int, rows: int, count: int, dim: int,
) -> None:  # fmt: skip
    size = like.itemsize
    for job in prange(rows):
        token, stream = job // count, job % count
        gate = row_at(gates + token * stride_gates * floats.itemsize, floats)
        total = np.zeros(dim, floats.dtype)
        for other in range(count):
            share = gate[count + other * count + stream]
            row = row_at(streams + (token * count + other) * dim * size, like)[:dim]
            for c in range(dim):
                total[c] = fused(share, wide(row[c]), total[c])
        written, added = gate[stream], row_at(y + token * stride_y * size, like)[:dim]
        out = row_at(mixed + job * dim * size, like)[:dim]
        for c in range(dim):
            out[c] = narrow(fused(written, wide(added[c]), total[c]), out)


read_loop, expand_loop = Loop(_read, STRICT), Loop(_expand, STRICT)
mix_loop = Loop(_mix, STRICT)
