"""The delta rule's chunk scan for the CPU: the states of a key head's value heads stay in the cache
over all their blocks.

Formulas and names are those of `delta_chunk_scan`. The 64 lanes of a vector are columns of the
state, which never meet each other: each panel of 64 is scanned by itself. Rows of a tile are tokens
of the block, counted from the first one that the span has there, or rows of the state. All sums
have the order of the source, so the bits of a head do not depend on what else is computed. Rows
behind the last token fill a tile and are read by none.

    keys, queries  [t, k_dim]
    turned         [k_dim, s]        the keys again, so that positions are lanes
    known, seen    [t, s]            k[t]·k[s] and q[t]·k[s]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman_kernels.cpu._compiled import (
    STRICT,
    Loop,
    as_array,
    exp,
    narrow,
    part,
    prange,
    row_like,
    wide,
)
from ferryman_kernels.cpu._lanes import LANES, add_scaled, no_sums
from ferryman_kernels.cpu._scan_tiles import (
    PRODUCTS_PER_ELEMENT,
    ROWS,
    add_rows,
    in_rows,
    padded,
    rows_at,
    scaled_rows,
    state_of,
    store_rows,
)
from ferryman_kernels.cpu._vectors import row_at, store
from ferryman_kernels.ragged import SlotAt, Span
from ferryman_kernels.recurrence.chunk_grid import describe_blocks


@part
def lay_tokens(stored: Any, step: Any, count: Any, k_dim: Any, rows: Any) -> None:
    """Widens `count` tokens of one key head; `stored` tokens follow each other by `step`."""
    for t in range(count):
        row, widened = stored[t * step :], rows[t, :k_dim]
        for n in range(widened.shape[0]):
            widened[n] = wide(row[n])


@part
def turn(rows: Any, count: Any, turned: Any) -> None:
    for n in range(turned.shape[0]):
        for t in range(count):
            turned[n, t] = rows[t, n]


@part
def match(rows: Any, turned: Any, count: Any, found: Any) -> None:
    """The products of a block's rows with its keys, at least those up to a row's own token."""
    (k_dim, positions), width = turned.shape, rows.shape[1]
    for t in range(0, count, ROWS):
        for s in range(0, min(t + ROWS, count), LANES):
            sums = no_sums(), no_sums(), no_sums(), no_sums()
            places = s, positions, 1, width
            sums = add_rows(sums, turned.reshape(-1), places, rows.reshape(-1), t * width, k_dim)
            store_rows(found.reshape(-1), t * positions + s, positions, sums)


@part
def sum_decays(g: Any, log_decay: Any) -> None:
    """L: in float64, since a difference of two long float32 sums would lose the small steps."""
    total = 0.0
    for t in range(g.shape[0]):
        total += np.float64(g[t])
        log_decay[t] = total


@part
def weigh(log_decay: Any, beta: Any, matches: Any, system: Any, scores: Any) -> None:
    """The factors of fed[s] in the solution, with their sign, and in y, both for s ≤ t."""
    known, seen = matches
    for t in range(beta.shape[0]):
        rate, now, own, shown = -beta[t], log_decay[t], known[t], seen[t]
        into, out = system[t, : t + 1], scores[t, : t + 1]
        for s in range(into.shape[0]):
            between = exp(np.float32(now - log_decay[s]))
            into[s] = rate * between * own[s]
            out[s] = between * shown[s]


@part
def decay_tokens(log_decay: Any, beta: Any, rows: Any, falling: Any, asking: Any) -> None:
    """The factors of the entering state in the solution, with their sign, and in y."""
    keys, queries = rows
    for t in range(beta.shape[0]):
        decay = exp(np.float32(log_decay[t]))
        rate = -beta[t] * decay
        key, query, into, out = keys[t], queries[t], falling[t], asking[t]
        for n in range(key.shape[0]):
            into[n] = rate * key[n]
            out[n] = decay * query[n]


@part
def take_values(v: Any, step: Any, beta: Any, columns: Any, fed: Any) -> None:
    """fed ← β·v of one panel; tokens of v follow each other by `step`."""
    for t in range(beta.shape[0]):
        rate, row, into = beta[t], v[t * step :], fed[t, :columns]
        for c in range(into.shape[0]):
            into[c] = rate * wide(row[c])
        fed[t, columns:] = 0


@part
def solve_rows(sums: Any, fed: Any, at: Any, system: Any, diagonal: Any, next_row: Any) -> None:
    """Solves four rows of the system, whose sums have all that earlier tokens fed, into `fed`."""
    sums0, sums1, sums2, sums3 = sums
    store(fed, at, sums0)
    row = diagonal + next_row
    sums1 = add_scaled(sums1, fed, at, system[row])
    store(fed, at + LANES, sums1)
    row += next_row
    sums2 = add_scaled(sums2, fed, at, system[row])
    sums2 = add_scaled(sums2, fed, at + LANES, system[row + 1])
    store(fed, at + 2 * LANES, sums2)
    row += next_row
    sums3 = add_scaled(sums3, fed, at, system[row])
    sums3 = add_scaled(sums3, fed, at + LANES, system[row + 1])
    sums3 = add_scaled(sums3, fed, at + 2 * LANES, system[row + 2])
    store(fed, at + 3 * LANES, sums3)


@part
def show_rows(sums: Any, fed: Any, at: Any, scores: Any, diagonal: Any, next_row: Any) -> Any:
    """Four rows of y, with what their own tokens fed: each sees itself and those before it."""
    sums0, sums1, sums2, sums3 = sums
    row = diagonal
    sums0 = add_scaled(sums0, fed, at, scores[row])
    row += next_row
    sums1 = add_scaled(sums1, fed, at, scores[row])
    sums1 = add_scaled(sums1, fed, at + LANES, scores[row + 1])
    row += next_row
    sums2 = add_scaled(sums2, fed, at, scores[row])
    sums2 = add_scaled(sums2, fed, at + LANES, scores[row + 1])
    sums2 = add_scaled(sums2, fed, at + 2 * LANES, scores[row + 2])
    row += next_row
    sums3 = add_scaled(sums3, fed, at, scores[row])
    sums3 = add_scaled(sums3, fed, at + LANES, scores[row + 1])
    sums3 = add_scaled(sums3, fed, at + 2 * LANES, scores[row + 2])
    sums3 = add_scaled(sums3, fed, at + 3 * LANES, scores[row + 3])
    return sums0, sums1, sums2, sums3


@part
def solve(state: Any, factors: Any, count: Any, fed: Any, shown: Any) -> None:
    """fed and y [t, 64] of one panel of a block, four tokens after the other; fed comes as β·v."""
    falling, asking, system, scores = factors
    positions, width = system.shape[1], falling.shape[1]
    held, flat = state.reshape(-1), fed.reshape(-1)
    for t in range(0, count, ROWS):
        at, row, diagonal = t * LANES, t * width, t * positions + t
        entering, before = (0, LANES, 1, width), (0, LANES, 1, positions)
        sums = rows_at(flat, at, LANES)
        sums = add_rows(sums, held, entering, falling.reshape(-1), row, width)
        sums = add_rows(sums, flat, before, system.reshape(-1), t * positions, t)
        solve_rows(sums, flat, at, system.reshape(-1), diagonal, positions)
        sums = no_sums(), no_sums(), no_sums(), no_sums()
        sums = add_rows(sums, held, entering, asking.reshape(-1), row, width)
        sums = add_rows(sums, flat, before, scores.reshape(-1), t * positions, t)
        sums = show_rows(sums, flat, at, scores.reshape(-1), diagonal, positions)
        store_rows(shown.reshape(-1), at, LANES, sums)


@part
def feed(state: Any, decay: Any, turned: Any, log_decay: Any, count: Any, fed: Any) -> None:
    """state ← decay·state + Σ exp(L[end] - L[s])·k[s] ⊗ fed[s]; `decay` has one number in all its
    lanes."""
    last, positions, flat = log_decay[count - 1], turned.shape[1], state.reshape(-1)
    for s in range(count):
        to_end, row = exp(np.float32(last - log_decay[s])), fed[s]
        for c in range(row.shape[0]):
            row[c] = row[c] * to_end
    for n in range(0, state.shape[0], ROWS):
        sums = scaled_rows(rows_at(flat, n * LANES, LANES), decay, 0)
        places = 0, LANES, 1, positions
        sums = add_rows(sums, fed.reshape(-1), places, turned.reshape(-1), n * positions, count)
        store_rows(flat, n * LANES, LANES, sums)


@part
def write_out(shown: Any, count: Any, columns: Any, first: Any, y: Any) -> None:
    """y [tokens, v_heads · v_dim] from the column `first` on ← a panel of what was shown."""
    for t in range(count):
        out, row = y[t, first:], shown[t, :columns]
        for c in range(row.shape[0]):
            out[c] = narrow(row[c], out)


@part
def take_state(stored: Any, panels: Any) -> None:
    k_dim, v_dim = stored.shape
    for n in range(k_dim):
        for c in range(0, v_dim, LANES):
            row = stored[n, c : c + LANES]
            panels[c // LANES, n, : row.shape[0]] = row


@part
def keep_state(panels: Any, stored: Any) -> None:
    k_dim, v_dim = stored.shape
    for n in range(k_dim):
        for c in range(0, v_dim, LANES):
            row = stored[n, c : c + LANES]
            row[:] = panels[c // LANES, n, : row.shape[0]]


def _scan(
    like_k: Any, like_v: Any, q: int, stride_q: int, k: int, stride_k: int, v: int, stride_v: int,
    g: Any, beta: Any, states: int, slot_size: int, slots: Any, firsts: Any, blocks: Any,
    wanted: Any, y: Any, sizes: Any,
) -> None:  # fmt: skip
    """q, k, v and `states` are addresses, with strides of tokens and slots in elements.

    `blocks` are (token of position 0, low, high), and a request owns those from its `firsts` on;
    `wanted` is the slot that gets the state behind a block, or -1. y [tokens, v_heads · v_dim].
    """
    k_heads, v_heads, k_dim, v_dim, chunk_len = sizes
    positions, rows = padded(chunk_len, LANES), padded(chunk_len, ROWS)
    deep, panels, number = padded(k_dim, ROWS), padded(v_dim, LANES) // LANES, np.float32
    per_key, size = v_heads // k_heads, (k_dim, v_dim)
    for job in prange(len(slots) * k_heads):
        request, key_head = job // k_heads, job % k_heads
        held = np.zeros((per_key, panels, deep, LANES), number)
        for each in range(per_key):
            head = key_head * per_key + each
            place = slots[request], slot_size
            take_state(state_of(states, place, head, size, g), held[each])
        keys, queries = np.zeros((rows, deep), number), np.zeros((rows, deep), number)
        falling, asking = np.zeros((rows, deep), number), np.zeros((rows, deep), number)
        turned = np.zeros((deep, positions), number)
        known, seen = np.zeros((rows, positions), number), np.zeros((rows, positions), number)
        system, scores = np.zeros((rows, positions), number), np.zeros((rows, positions), number)
        fed, shown = np.zeros((rows, LANES), number), np.zeros((rows, LANES), number)
        log_decay, decay = np.empty(chunk_len, np.float64), np.empty(LANES, number)
        for block in range(firsts[request], firsts[request + 1]):
            token, count = blocks[block, 0] + blocks[block, 1], blocks[block, 2] - blocks[block, 1]
            end, first = token + count, key_head * k_dim
            key = row_at(k + (token * stride_k + first) * like_k.itemsize, like_k)
            query = row_at(q + (token * stride_q + first) * like_k.itemsize, like_k)
            lay_tokens(key, stride_k, count, k_dim, keys)
            lay_tokens(query, stride_q, count, k_dim, queries)
            turn(keys, count, turned)
            match(keys, turned, count, known)
            match(queries, turned, count, seen)
            for each in range(per_key):
                head = key_head * per_key + each
                rates = beta[token:end, head]
                sum_decays(g[token:end, head], log_decay)
                weigh(log_decay, rates, (known, seen), system, scores)
                decay_tokens(log_decay, rates, (keys, queries), falling, asking)
                decay[:] = exp(number(log_decay[count - 1]))
                factors = falling, asking, system, scores
                for panel in range(panels):
                    first = head * v_dim + panel * LANES
                    columns = min(v_dim - panel * LANES, LANES)
                    values = row_at(v + (token * stride_v + first) * like_v.itemsize, like_v)
                    state = held[each, panel]
                    take_values(values, stride_v, rates, columns, fed)
                    solve(state, factors, count, fed, shown)
                    write_out(shown, count, columns, first, y[token:])
                    feed(state, decay, turned, log_decay, count, fed)
                if wanted[block] >= 0:
                    place = wanted[block], slot_size
                    keep_state(held[each], state_of(states, place, head, size, g))
        for each in range(per_key):
            head = key_head * per_key + each
            place = slots[request], slot_size
            keep_state(held[each], state_of(states, place, head, size, g))


_scan_loop = Loop(_scan, STRICT)


def delta_chunk_scan_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    (tokens, v_heads, v_dim), (k_heads, k_dim) = v.shape, k.shape[1:]
    assert ssm_states.stride()[1:] == (k_dim * v_dim, v_dim, 1), ssm_states.stride()
    assert q.dtype is k.dtype, (q.dtype, k.dtype)
    q, k, v = (in_rows(each) for each in (q, k, v))
    firsts, blocks, wanted = describe_blocks(spans, snapshots, chunk_len)
    y = torch.empty(tokens, v_heads, v_dim, dtype=v.dtype)
    products = y.numel() * (3 * k_dim + 2 * chunk_len)
    _scan_loop(
        products // PRODUCTS_PER_ELEMENT,
        row_like(k.dtype), row_like(v.dtype), q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0),
        v.data_ptr(), v.stride(0), g.contiguous().numpy(), beta.contiguous().numpy(),
        ssm_states.data_ptr(), ssm_states.stride(0), slots.numpy(), np.array(firsts),
        np.array(blocks), np.array(wanted), as_array(y.view(tokens, -1)),
        (k_heads, v_heads, k_dim, v_dim, chunk_len),
    )  # fmt: skip
    return y
