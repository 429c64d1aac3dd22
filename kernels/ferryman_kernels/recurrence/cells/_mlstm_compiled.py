"""The mLSTM cell for the CPU, for prefill and decode alike: its second pass, behind the first.

Formulas and names are those of `mlstm`. A job has some rows of the matrix of one head of one
request. They stay in a near cache for all of its tokens, four at a time in the nearest one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    narrow,
    part,
    prange,
    row_like,
    wide,
)
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._vectors import LANES, row_at
from ferryman_kernels.recurrence.cells._mlstm_norms_compiled import token_factors
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows
from ferryman_kernels.recurrence.loops._ssd_compiled import ROWS, advance_tokens
from ferryman_kernels.recurrence.loops._states import (
    in_rows,
    keep_state,
    open_state,
    place_after,
    stored_at,
)
from ferryman_kernels.recurrence.loops.runs import TokenRuns

JOB_ROWS = 64
"""Rows of a matrix that one job computes."""
BLOCK = 16
"""Tokens whose k and q stay in the nearest cache while all rows of a job pass over them."""


@part
def take_tokens(
    q: Any, k: Any, v: Any, factors: Any, scale: Any, count: Any, size: Any, whole: Any,
    taken: Any,
) -> None:  # fmt: skip
    """Widens what some rows of a matrix need of `count` tokens: keep, enter·v, k and q."""
    (raw_keys, step_k), (raw_queries, step_q), (raw_values, step_v) = k, q, v
    (num_rows, k_dim), (rows, width), (keeps, fed, keys, queries) = size, whole, taken
    for token in range(count):
        # Rows that begin at 0: an index that might be negative keeps a loop from being a vector's.
        raw_key, raw_query = raw_keys[token * step_k :], raw_queries[token * step_q :]
        raw_value, fed_row = raw_values[token * step_v :], fed[token * rows :]
        key, query = keys[token * width :], queries[token * width :]
        keep, enter = factors[token, 0], factors[token, 1]
        keeps[token] = keep
        for p in range(num_rows):
            fed_row[p] = enter * wide(raw_value[p])
        for n in range(k_dim):
            key[n] = wide(raw_key[n])
        for n in range(k_dim):
            query[n] = wide(raw_query[n]) * scale


@part
def scan_tokens(
    floats: Any, q: Any, k: Any, v: Any, factors: Any, scale: Any, count: Any, size: Any,
    whole: Any, places: Any, y: Any,
) -> None:  # fmt: skip
    """`count` tokens of some rows of a matrix, from the state at one address to another.

    q, k and v are rows at the first token, each with the step to the next one, as is y; `size` is
    that of the rows as stored, `whole` in whole vectors. `places` are the addresses of the state
    before, of the state after, and of room for those between.
    """
    (source, target, held), (out, step_y), (rows, width) = places, y, whole
    block = min(count, BLOCK)
    keeps, fed = np.empty(block, floats.dtype), np.zeros(block * rows, floats.dtype)
    keys = np.zeros(block * width, floats.dtype)
    queries, sums = np.zeros_like(keys), np.empty(block * rows, floats.dtype)
    for first in range(0, count, BLOCK):
        tokens = min(count - first, BLOCK)
        take_tokens(
            (q[0][first * q[1] :], q[1]), (k[0][first * k[1] :], k[1]),
            (v[0][first * v[1] :], v[1]), factors[first:], scale, tokens, size, whole,
            (keeps, fed, keys, queries),
        )  # fmt: skip
        after = target if first + tokens == count else held
        advance_tokens(
            floats, whole, (source, after, held), tokens, keeps, fed, keys, queries, sums
        )
        source = after
        for token in range(tokens):
            row, total_row = out[(first + token) * step_y :], sums[token * rows :]
            divisor = factors[first + token, 2]
            for p in range(size[0]):
                row[p] = narrow(total_row[p] / divisor, out)


@part
def scan_rows(
    job: Any, like: Any, floats: Any, q: Any, k: Any, v: Any, factors: Any, scale: Any,
    states: Any, runs: Any, y: Any, sizes: Any,
) -> None:  # fmt: skip
    """All runs of some rows of one matrix of one request: the `job`th of requests × heads × parts.

    q, k, v and y are addresses with steps, as in `pass_norms`; `states` is one with the numbers of
    a slot.
    """
    (v_dim, k_dim), heads, number = sizes, factors.shape[1], floats.itemsize
    parts, (sources, firsts, tokens, counts, kept) = padded(v_dim, JOB_ROWS) // JOB_ROWS, runs
    request, head, low = job // parts // heads, job // parts % heads, job % parts * JOB_ROWS
    size = min(JOB_ROWS, v_dim - low), k_dim
    whole = padded(size[0], ROWS), padded(k_dim, LANES)
    room = np.empty(whole[0] * whole[1], floats.dtype)
    held = np.intp(room.ctypes.data)
    first_state = states[0] + (head * v_dim + low) * k_dim * number
    place = open_state(
        floats, stored_at(first_state, sources[request], states[1] * number), size, whole, held
    )
    for run in range(firsts[request], firsts[request + 1]):
        token, count = tokens[run], counts[run]
        stored = stored_at(first_state, kept[run], states[1] * number)
        if count > 0:
            after, row = place_after(stored, size, whole, held), head * k_dim
            at = (token * v[1] + head * v_dim + low) * like.itemsize
            out = (token * y[1] + head * v_dim + low) * like.itemsize
            scan_tokens(
                floats, (row_at(q[0] + (token * q[1] + row) * like.itemsize, like), q[1]),
                (row_at(k[0] + (token * k[1] + row) * like.itemsize, like), k[1]),
                (row_at(v[0] + at, like), v[1]), factors[token : token + count, head], scale,
                count, size, whole, (place, after, held), (row_at(y[0] + out, like), y[1]),
            )  # fmt: skip
            place = after
        keep_state(floats, place, stored, size, whole)
    room[0] = 0  # the room is let go behind its last use, and its address is no use of it


def _rows(
    like: Any, floats: Any, q: Any, k: Any, v: Any, factors: Any, scale: Any, states: Any,
    runs: Any, y: Any, sizes: Any,
) -> None:  # fmt: skip
    (q_at, step_q), (k_at, step_k), (v_at, step_v) = q, k, v
    (first_slot, slot_size), (y_at, step_y), (v_dim, k_dim) = states, y, sizes
    (sources, firsts, tokens, counts, kept) = runs
    parts = padded(v_dim, JOB_ROWS) // JOB_ROWS
    for job in prange(len(sources) * factors.shape[1] * parts):
        scan_rows(
            job, like, floats, (q_at, step_q), (k_at, step_k), (v_at, step_v), factors, scale[0],
            (first_slot, slot_size), (sources, firsts, tokens, counts, kept), (y_at, step_y),
            (v_dim, k_dim),
        )  # fmt: skip


_rows_loop = Loop(_rows, STRICT)


def mlstm_runs_compiled(
    rows: CellRows, gates: CellGates, matrix: Tensor, norm: Tensor, runs: TokenRuns
) -> Tensor:
    """y as `rows.v`; the states advance from slot to slot."""
    tokens, heads, v_dim = rows.v.shape
    k_dim = rows.k.shape[2]
    assert matrix.stride()[1:] == (v_dim * k_dim, k_dim, 1), matrix.stride()
    q, k, v = map(in_rows, rows)
    kinds = row_like(v.dtype), row_like(matrix.dtype)
    places = [(tensor.data_ptr(), tensor.stride(0)) for tensor in (q, k, v)]
    factors = token_factors(q, k, gates, norm, runs)
    scale = torch.tensor([k_dim**-0.5], dtype=matrix.dtype, device="cpu").numpy()
    y = torch.empty(tokens, heads, v_dim, dtype=v.dtype)
    _rows_loop(
        tokens * heads * v_dim * k_dim,
        *kinds, *places, factors, scale, (matrix.data_ptr(), matrix.stride(0)),
        tuple(runs), (y.data_ptr(), y.stride(0)), (v_dim, k_dim),
    )  # fmt: skip
    return y
