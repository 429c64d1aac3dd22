"""The loop of the delta rule for the CPU, for prefill and decode alike.

Formulas and names are those of `delta_decode`; a decay may belong to a head or to each channel of
its key (`channel_delta_scan`). 64 columns of a head's state pass over some tokens before the next
ones do: columns do not know each other. With decayed keys k' = exp(g)·k and queries q' = exp(g)·q

    fed = β·(v - k'·state),   y = q'·state + (q·k)·fed,   state ← exp(g)·state + k ⊗ fed

a token reads the state once: the pass that feeds it takes the next token's sums as well. Those are
taken in the order of the rows, whatever the number of tokens (decision 0137).
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
from ferryman_kernels.cpu._vectors import LANES, exps, fused, load, row_at, spread, store, total
from ferryman_kernels.recurrence.loops._states import (
    in_rows,
    keep_state,
    open_state,
    place_after,
    stored_at,
)
from ferryman_kernels.recurrence.loops.runs import TokenRuns

COLUMNS = 4 * LANES
"""Columns of a state that pass over a block of tokens at once."""
BLOCK = 8
"""Tokens whose keys and queries stay in the nearest cache meanwhile."""


@part
def row_of(state: Any, at: Any) -> Any:
    """64 columns of a row, in four vectors."""
    return (
        load(state, at),
        load(state, at + LANES),
        load(state, at + 2 * LANES),
        load(state, at + 3 * LANES),
    )


@part
def store_row(state: Any, at: Any, row: Any) -> None:
    store(state, at, row[0])
    store(state, at + LANES, row[1])
    store(state, at + 2 * LANES, row[2])
    store(state, at + 3 * LANES, row[3])


@part
def scaled_sum(factor: Any, row: Any, added: Any) -> Any:
    """factor·row + added, by columns."""
    lanes = spread(factor)
    return (
        fused(lanes, row[0], added[0]),
        fused(lanes, row[1], added[1]),
        fused(lanes, row[2], added[2]),
        fused(lanes, row[3], added[3]),
    )


@part
def no_row(like: Any) -> Any:
    zero = spread(like.dtype.type(0))
    return zero, zero, zero, zero


@part
def fed_row(old: Any, at: Any, decay: Any, key: Any, fed: Any) -> Any:
    """decay·old + key·fed of a row."""
    return scaled_sum(key, fed, scaled_sum(decay, row_of(old, at), no_row(old)))


@part
def read_columns(state: Any, step: Any, rows: Any, keys: Any, queries: Any) -> Any:
    """The sums k'·state and q'·state over all rows of the columns at `state`, `step` apart."""
    matched, queried = no_row(state), no_row(state)
    for row in range(rows):
        numbers = row_of(state, row * step)
        matched, queried = (
            scaled_sum(keys[row], numbers, matched),
            scaled_sum(queries[row], numbers, queried),
        )
    return matched, queried


@part
def feed_and_read(
    old: Any, step: Any, new: Any, rows: Any, token: Any, fed: Any, next_token: Any
) -> Any:
    """Feeds a token to the columns at `old`, and returns the next token's sums over them.

    Tokens are (decays, keys) and (decayed keys, decayed queries); the columns go to `new`, where
    their rows follow each other.
    """
    (decays, keys), (next_keys, next_queries) = token, next_token
    matched, queried = no_row(old), no_row(old)
    for row in range(rows):
        numbers = fed_row(old, row * step, decays[row], keys[row], fed)
        store_row(new, row * COLUMNS, numbers)
        matched = scaled_sum(next_keys[row], numbers, matched)
        queried = scaled_sum(next_queries[row], numbers, queried)
    return matched, queried


@part
def feed_columns(
    old: Any, step: Any, new: Any, new_step: Any, rows: Any, token: Any, fed: Any
) -> None:
    decays, keys = token
    for row in range(rows):
        store_row(new, row * new_step, fed_row(old, row * step, decays[row], keys[row], fed))


@part
def advance_columns(
    floats: Any, whole: Any, places: Any, count: Any, tokens: Any, values: Any, sums: Any
) -> None:
    """`count` tokens of 64 columns of one head.

    `places` are the addresses, each with its step from row to row, of the columns before the tokens
    and of those after them, and the address of room for those between. `tokens` hold, each flat:
    decays, keys, decayed keys and decayed queries with the rows of a state for each token; rates
    and q·k, a number for each. `values` and `sums` begin at these columns and have the width of a
    state for each token.
    """
    (rows, width), ((source, step), (target, target_step), held) = whole, places
    decays, keys, decayed, queries, rates, matches = tokens
    none, minus = no_row(floats), -floats.dtype.type(1)
    matched, queried = read_columns(row_at(source, floats), step, rows, decayed, queries)
    for token in range(count):
        at, row, next_row = token * width, token * rows, (token + 1) * rows
        unfed = scaled_sum(minus, matched, row_of(values, at))
        fed = scaled_sum(rates[token], unfed, none)
        store_row(sums, at, scaled_sum(matches[token], fed, queried))
        feeding, old = (decays[row:], keys[row:]), row_at(source, floats)
        if token == count - 1:
            feed_columns(old, step, row_at(target, floats), target_step, rows, feeding, fed)
        else:
            following = decayed[next_row:], queries[next_row:]
            new = row_at(held, floats)
            matched, queried = feed_and_read(old, step, new, rows, feeding, fed, following)
            source, step = held, COLUMNS


@part
def dot(a: Any, b: Any, count: Any) -> Any:
    """The sum of products over `count` numbers, a multiple of a vector's."""
    sums = spread(a.dtype.type(0))
    for n in range(0, count, LANES):
        sums = fused(load(a, n), load(b, n), sums)
    return total(sums)


@part
def take_tokens(
    given: Any, floats: Any, g: Any, beta: Any, count: Any, size: Any, whole: Any, tokens: Any,
    values: Any,
) -> None:  # fmt: skip
    """Widens and decays what a head needs of its tokens; `given` are rows of q, k and v with
    their steps, g [tokens, 1 or k_dim] and beta [tokens] are the head's own."""
    ((q, step_q), (k, step_k), (v, step_v)), (k_dim, v_dim) = given, size
    (rows, width), (decays, keys, decayed, queries, rates, matches) = whole, tokens
    for token in range(count):
        # Rows that begin at 0: an index that might be negative keeps a loop from being a vector's.
        at, logs = token * rows, g[token]
        decay, key, raw_key = decays[at : at + rows], keys[at : at + rows], k[token * step_k :]
        faded, query, raw_query = (
            decayed[at : at + rows],
            queries[at : at + rows],
            q[token * step_q :],
        )
        value, raw_value = values[token * width :], v[token * step_v :]
        for row in range(k_dim):
            key[row], query[row] = raw_key[row], raw_query[row]
        if logs.shape[0] == k_dim:
            decay[:k_dim], decay[k_dim:] = logs, 0
            for row in range(0, rows, LANES):
                store(decay, row, exps(load(decay, row)))
        else:
            decay[:] = exp(logs[0])
        matches[token] = dot(key, query, rows)
        for row in range(rows):
            faded[row] = decay[row] * key[row]
            query[row] = decay[row] * query[row]
        for n in range(v_dim):
            value[n] = wide(raw_value[n])
        rates[token] = beta[token]


@part
def scan_tokens(
    given: Any, floats: Any, g: Any, beta: Any, count: Any, sizes: Any, places: Any, y: Any
) -> None:
    """`count` tokens of one head of one request, from the state at one address to another.

    `given` are rows of q, k and v at the first token, each with the step to the next one; y is a
    row with its step. `sizes` are those of a state, as stored and in whole vectors; `places` the
    addresses of the state before, of the state after, and of room for those between.
    """
    (size, whole), (source, target, held), (out, step_y) = sizes, places, y
    (rows, width), block, dtype = whole, min(count, BLOCK), floats.dtype
    tokens = (
        np.zeros(block * rows, dtype), np.zeros(block * rows, dtype), np.zeros(block * rows, dtype),
        np.zeros(block * rows, dtype), np.empty(block, dtype), np.empty(block, dtype),
    )  # fmt: skip
    values, sums = np.zeros(block * width, dtype), np.empty(block * width, dtype)
    (q, step_q), (k, step_k), (v, step_v) = given
    for first in range(0, count, BLOCK):
        taken = min(count - first, BLOCK)
        here = (
            (q[first * step_q :], step_q),
            (k[first * step_k :], step_k),
            (v[first * step_v :], step_v),
        )
        take_tokens(here, floats, g[first:], beta[first:], taken, size, whole, tokens, values)
        # In the room the rows of 64 columns follow each other, so they stay in the nearest cache:
        # in a slot they are a power of two apart, and fall into a part of its lines.
        begins, ends = first == 0, first + taken == count
        for n in range(0, width, COLUMNS):
            at, inside = n * floats.itemsize, (held + n * rows * floats.itemsize, COLUMNS)
            before = (source + at, width) if begins else inside
            after = (target + at, width) if ends else inside
            columns = before, after, inside[0]
            advance_columns(floats, whole, columns, taken, tokens, values[n:], sums[n:])
        for token in range(taken):
            row, totals = out[(first + token) * step_y :], sums[token * width :]
            for n in range(size[1]):
                row[n] = narrow(totals[n], out)


@part
def scan_head(
    job: Any, like: Any, floats: Any, given: Any, g: Any, beta: Any, states: Any, runs: Any, y: Any,
    sizes: Any,
) -> None:  # fmt: skip
    """Scans all runs of one value head of one request: the `job`th of requests × heads.

    `given` are the addresses of q, k (in the dtype of `floats`) and v (of `like`), each with its
    step from token to token; `states` an address and the numbers of a slot; y is an address and a
    row like the output.
    """
    (heads, k_heads, size), (q, k, v), (out, out_like) = sizes, given, y
    request, head, (k_dim, v_dim) = job // heads, job % heads, size
    shared, number = head * k_heads // heads * k_dim, floats.itemsize
    sources, firsts, tokens, counts, kept = runs
    whole = padded(k_dim, LANES), padded(v_dim, COLUMNS)
    elements, first_state = whole[0] * whole[1], states[0] + head * k_dim * v_dim * number
    room = np.empty(2 * elements, floats.dtype)
    held = np.intp(room.ctypes.data)
    padded_state, slot_bytes = held + elements * number, states[1] * number
    stored = stored_at(first_state, sources[request], slot_bytes)
    place = open_state(floats, stored, size, whole, padded_state)
    for run in range(firsts[request], firsts[request + 1]):
        token, count = tokens[run], counts[run]
        stored = stored_at(first_state, kept[run], slot_bytes)
        if count > 0:
            after = place_after(stored, size, whole, padded_state)
            rows = (
                (row_at(q[0] + (token * q[1] + shared) * number, floats), q[1]),
                (row_at(k[0] + (token * k[1] + shared) * number, floats), k[1]),
                (row_at(v[0] + (token * v[1] + head * v_dim) * like.itemsize, like), v[1]),
            )
            at = out + (token * heads + head) * v_dim * out_like.itemsize
            scan_tokens(
                rows, floats, g[token : token + count, head], beta[token : token + count, head],
                count, (size, whole), (place, after, held), (row_at(at, out_like), heads * v_dim),
            )  # fmt: skip
            place = after
        keep_state(floats, place, stored, size, whole)
    room[0] = 0  # the room is let go behind its last use, and its address is no use of it


def _scan(
    like: Any, floats: Any, given: Any, g: Any, beta: Any, states: Any, runs: Any, y: int,
    sizes: Any,
) -> None:  # fmt: skip
    # A shared loop takes numbers and arrays, no tuples.
    (q, step_q), (k, step_k), (v, step_v) = given
    (first_slot, slot_size), (sources, firsts, tokens, counts, kept) = states, runs
    heads, groups, (rows, columns) = sizes
    for job in prange(len(sources) * heads):
        parts = (q, step_q), (k, step_k), (v, step_v)
        scan_head(
            job, like, floats, parts, g, beta, (first_slot, slot_size),
            (sources, firsts, tokens, counts, kept), (y, like), (heads, groups, (rows, columns)),
        )  # fmt: skip


_scan_loop = Loop(_scan, STRICT)


def delta_scan_compiled(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, runs: TokenRuns
) -> Tensor:
    """y as `v`, [tokens, v_heads, v_dim]; g [tokens, v_heads, 1 or k_dim]."""
    tokens, heads, v_dim = v.shape
    k_heads, k_dim = k.shape[1:]
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    q, k, v = in_rows(q.to(g.dtype)), in_rows(k.to(g.dtype)), in_rows(v)
    y = torch.empty(tokens, heads, v_dim, dtype=v.dtype)
    _scan_loop(
        tokens * heads * k_dim * v_dim,
        row_like(v.dtype), row_like(g.dtype),
        tuple((each.data_ptr(), each.stride(0)) for each in (q, k, v)), g.numpy(), beta.numpy(),
        (ssm_states.data_ptr(), ssm_states.stride(0)), tuple(runs), y.data_ptr(),
        (heads, k_heads, (k_dim, v_dim)),
    )  # fmt: skip
    return y


def has_delta_loop(v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor) -> bool:
    """True if the loop takes them: gates and states in the dtype of its sums."""
    # The first question, as in every launcher: on a card there are kernels of its own.
    if v.is_cuda or not serves(v, ssm_states):
        return False
    return {each.dtype for each in (g, beta, ssm_states)} == {wide_dtype(v.dtype)}
