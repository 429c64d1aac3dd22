"""The loop of Mamba-2's recurrence for the CPU, for prefill and decode alike.

Formulas and names are those of `ssd_decode`. Four rows of a head's state share what is loaded of B
and C; the 16 lanes of a vector are columns of the state. So a token reads and writes a state once,
in the nearest cache within a chunk. On a CPU that is as fast as products over blocks, which
multiply as often, and it has one order of sums (decision 0137).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
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
from ferryman_kernels.cpu._row_tiles import padded
from ferryman_kernels.cpu._vectors import LANES, fused, load, row_at, spread, store, store_totals
from ferryman_kernels.recurrence.loops._states import (
    in_rows,
    keep_state,
    open_state,
    place_after,
    stored_at,
)
from ferryman_kernels.recurrence.loops.runs import TokenRuns

ROWS = 4
"""Rows of a state that share a vector of B and C while it is in a register."""
BLOCK = 32
"""Tokens whose B and C stay in the nearest cache while all rows of a head pass over them."""


@part
def advance_rows(
    source: Any, target: Any, width: Any, decay: Any, fed: Any, at: Any, b: Any, c: Any, shown: Any
) -> None:
    """One token of four rows of a state: target ← decay·source + fed ⊗ b, and shown ← target·c."""
    kept, zero = spread(decay), spread(source.dtype.type(0))
    fed0, fed1 = spread(fed[at]), spread(fed[at + 1])
    fed2, fed3 = spread(fed[at + 2]), spread(fed[at + 3])
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    for n in range(0, width, LANES):
        key, query = load(b, n), load(c, n)
        row0 = fused(fed0, key, fused(kept, load(source, n), zero))
        row1 = fused(fed1, key, fused(kept, load(source, width + n), zero))
        row2 = fused(fed2, key, fused(kept, load(source, 2 * width + n), zero))
        row3 = fused(fed3, key, fused(kept, load(source, 3 * width + n), zero))
        store(target, n, row0)
        store(target, width + n, row1)
        store(target, 2 * width + n, row2)
        store(target, 3 * width + n, row3)
        sum0, sum1 = fused(row0, query, sum0), fused(row1, query, sum1)
        sum2, sum3 = fused(row2, query, sum2), fused(row3, query, sum3)
    store_totals(shown, at, sum0, sum1, sum2, sum3)


@part
def advance_tokens(
    floats: Any, size: Any, places: Any, count: Any, decays: Any, fed: Any, b: Any, c: Any,
    shown: Any,
) -> None:  # fmt: skip
    """`count` tokens of one head, four rows of its state after the other.

    `places` are addresses: of the state before the tokens, of the one after them, and of room for
    those between. `size` is that of a state in whole vectors; fed and shown have its rows for each
    token, b and c its columns.
    """
    (rows, width), (source, target, held) = size, places
    for row in range(0, rows, ROWS):
        at = row * width * floats.itemsize
        for token in range(count):
            old = source if token == 0 else held
            new = target if token == count - 1 else held
            advance_rows(
                row_at(old + at, floats), row_at(new + at, floats), width, decays[token],
                fed[token * rows :], row, b[token * width :], c[token * width :],
                shown[token * rows :],
            )  # fmt: skip


@part
def take_tokens(
    given: Any, steps: Any, a: Any, count: Any, size: Any, whole: Any, decays: Any, fed: Any,
    b: Any, c: Any,
) -> None:  # fmt: skip
    """Widens what a head needs of its tokens; `given` are rows of x, B and C with their steps."""
    (x, step_x), (keys, step_b), (queries, step_c) = given
    (head_dim, state_dim), (rows, width) = size, whole
    for token in range(count):
        # Rows that begin at 0: an index that might be negative keeps a loop from being a vector's.
        step, row, key, query = (
            steps[token],
            x[token * step_x :],
            keys[token * step_b :],
            queries[token * step_c :],
        )
        fed_row, b_row, c_row = fed[token * rows :], b[token * width :], c[token * width :]
        decays[token] = exp(step * a)
        for p in range(head_dim):
            fed_row[p] = step * wide(row[p])
        for n in range(state_dim):
            b_row[n] = wide(key[n])
        for n in range(state_dim):
            c_row[n] = wide(query[n])


@part
def scan_tokens(
    given: Any, floats: Any, steps: Any, constants: Any, count: Any, sizes: Any, places: Any, y: Any
) -> None:
    """`count` tokens of one head of one request, from the state at one address to another.

    `given` are rows of x, B and C at the first token, each with the step to the next one; y is a
    row with its step. `constants` are A and D of the head, `sizes` those of a state, as stored and
    in whole vectors. `places` are the addresses of the state before, of the state after, and of
    room for those between.
    """
    (a, d), (size, whole), (source, target, held) = constants, sizes, places
    (head_dim, _), (rows, width), (out, step_y) = size, whole, y
    (x, step_x), (keys, step_b), (queries, step_c) = given
    block = min(count, BLOCK)
    decays, fed = np.empty(block, floats.dtype), np.zeros(block * rows, floats.dtype)
    b, c = np.zeros(block * width, floats.dtype), np.zeros(block * width, floats.dtype)
    shown = np.empty(block * rows, floats.dtype)
    for first in range(0, count, BLOCK):
        tokens = min(count - first, BLOCK)
        rows_here = (
            (x[first * step_x :], step_x),
            (keys[first * step_b :], step_b),
            (queries[first * step_c :], step_c),
        )
        take_tokens(rows_here, steps[first:], a, tokens, size, whole, decays, fed, b, c)
        after = target if first + tokens == count else held
        advance_tokens(floats, whole, (source, after, held), tokens, decays, fed, b, c, shown)
        source = after
        for token in range(tokens):
            row, raw_row = out[(first + token) * step_y :], x[(first + token) * step_x :]
            sums = shown[token * rows :]
            for p in range(head_dim):
                row[p] = narrow(sums[p] + d * wide(raw_row[p]), out)


@part
def scan_head(
    job: Any, like: Any, floats: Any, given: Any, steps: Any, weights: Any, states: Any, runs: Any,
    y: Any, sizes: Any,
) -> None:  # fmt: skip
    """Scans all runs of one head of one request: the `job`th of requests × heads.

    `given` are the addresses of x, B and C, each with its step from token to token in numbers of
    the dtype of `like`; `states` an address and the numbers of a slot. `weights` are A and D; y is
    an address and a row like the output.
    """
    (heads, groups, size), (x, B, C), (out, out_like) = sizes, given, y
    request, head, (head_dim, state_dim) = job // heads, job % heads, size
    group, number = head * groups // heads, floats.itemsize
    sources, firsts, tokens, counts, kept = runs
    whole = padded(head_dim, ROWS), padded(state_dim, LANES)
    room = np.empty(whole[0] * whole[1], floats.dtype)
    held, first_state = np.intp(room.ctypes.data), states[0] + head * head_dim * state_dim * number
    place = open_state(
        floats, stored_at(first_state, sources[request], states[1] * number), size, whole, held
    )
    for run in range(firsts[request], firsts[request + 1]):
        token, count = tokens[run], counts[run]
        stored = stored_at(first_state, kept[run], states[1] * number)
        if count > 0:
            after = place_after(stored, size, whole, held)
            rows = (
                (row_at(x[0] + (token * x[1] + head * head_dim) * like.itemsize, like), x[1]),
                (row_at(B[0] + (token * B[1] + group * state_dim) * like.itemsize, like), B[1]),
                (row_at(C[0] + (token * C[1] + group * state_dim) * like.itemsize, like), C[1]),
            )
            at = out + (token * heads + head) * head_dim * out_like.itemsize
            scan_tokens(
                rows, floats, steps[token : token + count, head],
                (weights[0][head], weights[1][head]), count, (size, whole), (place, after, held),
                (row_at(at, out_like), heads * head_dim),
            )  # fmt: skip
            place = after
        keep_state(floats, place, stored, size, whole)
    room[0] = 0  # the room is let go behind its last use, and its address is no use of it


def _scan(
    like: Any, floats: Any, given: Any, dt: Any, A: Any, D: Any, states: Any, runs: Any, y: int,
    sizes: Any,
) -> None:  # fmt: skip
    # A shared loop takes numbers and arrays, no tuples.
    (x, step_x), (B, step_B), (C, step_C) = given
    (first_slot, slot_size), (sources, firsts, tokens, counts, kept) = states, runs
    heads, groups, (rows, columns) = sizes
    for job in prange(len(sources) * heads):
        parts = (x, step_x), (B, step_B), (C, step_C)
        scan_head(
            job, like, floats, parts, dt, (A, D), (first_slot, slot_size),
            (sources, firsts, tokens, counts, kept), (y, like), (heads, groups, (rows, columns)),
        )  # fmt: skip


_scan_loop = Loop(_scan, STRICT)


def ssd_scan_compiled(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    runs: TokenRuns,
) -> Tensor:
    """y as `x`, [tokens, ssm_heads, ssm_head_dim]; the states advance from slot to slot."""
    tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[1:]
    assert ssm_states.stride()[1:] == (head_dim * state_dim, state_dim, 1), ssm_states.stride()
    x, B, C = (in_rows(each) for each in (x, B, C))
    y = torch.empty(tokens, heads, head_dim, dtype=x.dtype)
    _scan_loop(
        tokens * heads * head_dim * state_dim,
        row_like(x.dtype), row_like(ssm_states.dtype),
        tuple((each.data_ptr(), each.stride(0)) for each in (x, B, C)), dt.numpy(), A.numpy(),
        D.numpy(), (ssm_states.data_ptr(), ssm_states.stride(0)), tuple(runs), y.data_ptr(),
        (heads, groups, (head_dim, state_dim)),
    )  # fmt: skip
    return y


def has_ssd_loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor
) -> bool:
    """True if the loop takes them: rows of one dtype, all else in the dtype of its sums."""
    # The first question, as in every launcher: on a card there are kernels of its own.
    if x.is_cuda or not serves(x, ssm_states):
        return False
    rows, sums = (x, B, C), (dt, A, D, ssm_states)
    same_rows = len({each.dtype for each in rows}) == 1
    return same_rows and {each.dtype for each in sums} == {wide_dtype(x.dtype)}
