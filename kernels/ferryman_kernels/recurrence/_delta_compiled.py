"""The loop of the delta rule for the CPU, for prefill and decode alike.

Formulas and names are those of `delta_decode`; a decay may belong to a head or to each channel of
its key (`channel_delta_scan`). 32 columns of a head's state pass over some tokens before the next
ones do: columns do not know each other. With decayed keys k' = exp(g)·k and queries q' = exp(g)·q

    fed = β·(v - k'·state),   y = q'·state + (q·k)·fed,   state ← exp(g)·state + k ⊗ fed

a token reads the state once, and the pass that feeds it takes the next token's sums as well. A sum
over the rows of a state takes even and odd rows apart, and joins the two: one order, whatever the
number of tokens (decision 0137).
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
from ferryman_kernels.recurrence._states import (
    in_rows,
    keep_state,
    open_state,
    place_after,
    stored_at,
)
from ferryman_kernels.recurrence.runs import Runs

COLUMNS = 2 * LANES
"""Columns of a state that pass over a block of tokens at once."""
BLOCK = 16
"""Tokens whose keys and queries stay in the nearest cache meanwhile."""


@part
def add_row(state: Any, at: Any, factors: Any, row: Any, sums: Any) -> Any:
    """The sums k'·state and q'·state of 32 columns, each in two vectors, with one row added."""
    (keys, queries), (key0, key1, query0, query1) = factors, sums
    key, query = spread(keys[row]), spread(queries[row])
    low, high = load(state, at), load(state, at + LANES)
    return (
        fused(key, low, key0),
        fused(key, high, key1),
        fused(query, low, query0),
        fused(query, high, query1),
    )


@part
def feed_row(old: Any, new: Any, at: Any, decays: Any, keys: Any, row: Any, fed: Any) -> None:
    """One row of 32 columns: new ← decay·old + key·fed."""
    decay, key, zero = spread(decays[row]), spread(keys[row]), spread(old.dtype.type(0))
    store(new, at, fused(key, fed[0], fused(decay, load(old, at), zero)))
    high = at + LANES
    store(new, high, fused(key, fed[1], fused(decay, load(old, high), zero)))


@part
def joined(even: Any, odd: Any, one: Any) -> Any:
    return (
        fused(odd[0], one, even[0]),
        fused(odd[1], one, even[1]),
        fused(odd[2], one, even[2]),
        fused(odd[3], one, even[3]),
    )


@part
def read_columns(state: Any, whole: Any, factors: Any) -> Any:
    """The sums over all rows of the 32 columns at `state`."""
    (rows, width), zero = whole, spread(state.dtype.type(0))
    even = zero, zero, zero, zero
    odd = zero, zero, zero, zero
    for row in range(0, rows, 2):
        even = add_row(state, row * width, factors, row, even)
        odd = add_row(state, (row + 1) * width, factors, row + 1, odd)
    return joined(even, odd, spread(state.dtype.type(1)))


@part
def feed_and_read(
    old: Any, new: Any, whole: Any, decays: Any, keys: Any, fed: Any, factors: Any
) -> Any:
    """Feeds a token to the 32 columns at `old`, and returns the next token's sums over them."""
    (rows, width), zero = whole, spread(old.dtype.type(0))
    even = zero, zero, zero, zero
    odd = zero, zero, zero, zero
    for row in range(0, rows, 2):
        at, after = row * width, (row + 1) * width
        feed_row(old, new, at, decays, keys, row, fed)
        feed_row(old, new, after, decays, keys, row + 1, fed)
        even = add_row(new, at, factors, row, even)
        odd = add_row(new, after, factors, row + 1, odd)
    return joined(even, odd, spread(old.dtype.type(1)))


@part
def feed_columns(old: Any, new: Any, whole: Any, decays: Any, keys: Any, fed: Any) -> None:
    rows, width = whole
    for row in range(rows):
        feed_row(old, new, row * width, decays, keys, row, fed)


@part
def advance_columns(
    floats: Any, whole: Any, places: Any, count: Any, tokens: Any, values: Any, shown: Any
) -> None:
    """`count` tokens of 32 columns of one head.

    `places` are the addresses of the columns before the tokens, of those after them, and of room
    for those between. `tokens` hold, each flat: decays, keys, decayed keys and decayed queries with
    the rows of a state for each token; rates and q·k, a number for each. `values` and `shown` begin
    at these columns and have the width of a state for each token.
    """
    (rows, width), (source, target, held) = whole, places
    decays, keys, decayed, queries, rates, matches = tokens
    zero = spread(floats.dtype.type(0))
    sums = read_columns(row_at(source, floats), whole, (decayed, queries))
    for token in range(count):
        at, minus = token * width, spread(-floats.dtype.type(1))
        rate, match = spread(rates[token]), spread(matches[token])
        low = fused(minus, sums[0], load(values, at))
        high = fused(minus, sums[1], load(values, at + LANES))
        fed = fused(rate, low, zero), fused(rate, high, zero)
        store(shown, at, fused(match, fed[0], sums[2]))
        store(shown, at + LANES, fused(match, fed[1], sums[3]))
        old = row_at(source if token == 0 else held, floats)
        own, after = token * rows, (token + 1) * rows
        if token == count - 1:
            feed_columns(old, row_at(target, floats), whole, decays[own:], keys[own:], fed)
        else:
            factors = decayed[after:], queries[after:]
            new = row_at(held, floats)
            sums = feed_and_read(old, new, whole, decays[own:], keys[own:], fed, factors)


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
    """What a head needs of its tokens, widened and decayed; `given` are rows of q, k and v with
    their steps, g [tokens, 1 or k_dim] and beta [tokens] are the head's own."""
    ((q, step_q), (k, step_k), (v, step_v)), (k_dim, v_dim) = given, size
    (rows, width), (decays, keys, decayed, queries, rates, matches) = whole, tokens
    for token in range(count):
        # Rows that begin at 0: an index that might be negative keeps a loop from being a vector's.
        at, logs = token * rows, g[token]
        decay, key, own_k = decays[at : at + rows], keys[at : at + rows], k[token * step_k :]
        faded, query, own_q = decayed[at : at + rows], queries[at : at + rows], q[token * step_q :]
        value, own_v = values[token * width :], v[token * step_v :]
        for row in range(k_dim):
            key[row], query[row] = own_k[row], own_q[row]
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
            value[n] = wide(own_v[n])
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
    values, shown = np.zeros(block * width, dtype), np.empty(block * width, dtype)
    (q, step_q), (k, step_k), (v, step_v) = given
    for first in range(0, count, BLOCK):
        taken = min(count - first, BLOCK)
        here = (
            (q[first * step_q :], step_q),
            (k[first * step_k :], step_k),
            (v[first * step_v :], step_v),
        )
        take_tokens(here, floats, g[first:], beta[first:], taken, size, whole, tokens, values)
        after = target if first + taken == count else held
        for n in range(0, width, COLUMNS):
            at = n * floats.itemsize
            columns = source + at, after + at, held + at
            advance_columns(floats, whole, columns, taken, tokens, values[n:], shown[n:])
        source = after
        for token in range(taken):
            row, sums = out[(first + token) * step_y :], shown[token * width :]
            for n in range(size[1]):
                row[n] = narrow(sums[n], out)


@part
def scan_head(
    job: Any, like: Any, floats: Any, given: Any, g: Any, beta: Any, states: Any, runs: Any, y: Any,
    sizes: Any,
) -> None:  # fmt: skip
    """All runs of one value head of one request: the `job`th of requests × heads.

    `given` are the addresses of q, k (in the dtype of `floats`) and v (of `like`), each with its
    step from token to token; `states` an address and the numbers of a slot; y is an address and a
    row like the output.
    """
    (heads, k_heads, size), (q, k, v), (out, out_like) = sizes, given, y
    request, head, (k_dim, v_dim) = job // heads, job % heads, size
    shared, number = head * k_heads // heads * k_dim, floats.itemsize
    sources, firsts, tokens, counts, kept = runs
    whole = padded(k_dim, LANES), padded(v_dim, COLUMNS)
    room = np.empty(whole[0] * whole[1], floats.dtype)
    held, own = np.intp(room.ctypes.data), states[0] + head * k_dim * v_dim * number
    slot_bytes = states[1] * number
    place = open_state(floats, stored_at(own, sources[request], slot_bytes), size, whole, held)
    for run in range(firsts[request], firsts[request + 1]):
        token, count = tokens[run], counts[run]
        stored = stored_at(own, kept[run], slot_bytes)
        if count > 0:
            after = place_after(stored, size, whole, held)
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, runs: Runs
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
    """Whether the loop takes them: gates and states in the dtype of its sums."""
    # The first question, as in every launcher: on a card there are kernels of its own.
    if v.is_cuda or not serves(v, ssm_states):
        return False
    return {each.dtype for each in (g, beta, ssm_states)} == {wide_dtype(v.dtype)}
