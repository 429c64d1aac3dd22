"""The chunk scan's loop for the CPU: the state of a head stays in the cache over all its blocks.

Formulas and names are those of `ssd_chunk_scan`. The 64 lanes of a vector are positions of a block,
or columns of the state; rows are padded to whole vectors with zeros, which change no sum. All sums
have the order of the source, so the bits of a head do not depend on what else is computed.

    queries [blocks, ssm_groups, ssm_state, t]      transposed, so that positions are lanes
    keys    [blocks, ssm_groups, s, ssm_state]
    seen    [blocks, ssm_groups, s, t]              C[t]·B[s]
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
from ferryman_kernels.cpu._lanes import LANES, no_sums
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
from ferryman_kernels.cpu._vectors import row_at
from ferryman_kernels.ragged import SlotAt, Span
from ferryman_kernels.recurrence.chunk_grid import describe_blocks


@part
def lay_group(B: Any, C: Any, low: Any, high: Any, steps: Any, keys: Any, queries: Any) -> None:
    """Widens a block's B and C of one group; rows of B and C follow each other by `steps`."""
    keys[:], queries[:] = 0, 0
    state_dim = queries.shape[0]
    for position in range(low, high):
        b, c = (position - low) * steps[0], (position - low) * steps[1]
        for n in range(state_dim):
            keys[position, n] = wide(B[b + n])
            queries[n, position] = wide(C[c + n])


@part
def see(keys: Any, queries: Any, seen: Any) -> None:
    """The products of a block's keys with its queries."""
    state_dim, positions = queries.shape
    width, flat = keys.shape[1], queries.reshape(-1)
    for s in range(0, keys.shape[0], ROWS):
        for t in range(0, positions, LANES):
            sums = no_sums(), no_sums(), no_sums(), no_sums()
            places = t, positions, 1, width
            sums = add_rows(sums, flat, places, keys.reshape(-1), s * width, state_dim)
            store_rows(seen.reshape(-1), s * positions + t, positions, sums)


@part
def sum_decays(steps: Any, A: Any, span: Any, log_decay: Any) -> None:
    """L: in float64, since a difference of two long float32 sums would lose the small steps."""
    (low, high), total = span, 0.0
    for position in range(log_decay.shape[0]):
        if low <= position < high:
            total += np.float64(steps[position]) * np.float64(A)
        log_decay[position] = total


@part
def weigh(log_decay: Any, steps: Any, seen: Any, span: Any, scores: Any) -> None:
    """exp(L[t] - L[s])·dt[s]·seen[s, t] for low ≤ s ≤ t < high, and 0 elsewhere in those rows."""
    low, high = span
    for s in range(low, high):
        scores[s] = 0
        # Parts that begin at 0: an index that might be negative keeps a loop from being a vector's.
        row, products, sums = scores[s, s:high], seen[s, s:high], log_decay[s:high]
        own, dt = log_decay[s], steps[s]
        for i in range(row.shape[0]):
            row[i] = exp(np.float32(sums[i] - own)) * dt * products[i]


@part
def read_out(
    state: Any, queries: Any, entering: Any, x: Any, scores: Any, span: Any, y: Any
) -> None:
    """y [head_dim, t] of one block: what the state shows, decayed, and what the block adds."""
    (low, high), (state_dim, positions) = span, queries.shape
    width, head_dim, flat = state.shape[1], state.shape[0], queries.reshape(-1)
    for p in range(0, head_dim, ROWS):
        for t in range(0, positions, LANES):
            sums = no_sums(), no_sums(), no_sums(), no_sums()
            shown = t, positions, 1, width
            sums = add_rows(sums, flat, shown, state.reshape(-1), p * width, state_dim)
            sums = scaled_rows(sums, entering, t)
            own = low * positions + t, positions, head_dim, 1
            at = low * head_dim + p
            sums = add_rows(sums, scores.reshape(-1), own, x.reshape(-1), at, high - low)
            store_rows(y.reshape(-1), p * positions + t, positions, sums)


@part
def feed(state: Any, decay: Any, keys: Any, fed: Any, span: Any) -> None:
    """state ← decay·state + Σ fed[s] ⊗ keys[s]; `decay` has one number in all its lanes."""
    (head_dim, width), (low, high) = state.shape, span
    flat = state.reshape(-1)
    for p in range(0, head_dim, ROWS):
        for n in range(0, width, LANES):
            at = p * width + n
            sums = scaled_rows(rows_at(flat, at, width), decay, 0)
            places = low * width + n, width, head_dim, 1
            rows = fed.reshape(-1)
            sums = add_rows(sums, keys.reshape(-1), places, rows, low * head_dim + p, high - low)
            store_rows(flat, at, width, sums)


@part
def take_block(
    x: Any, step: Any, span: Any, log_decay: Any, steps: Any, own: Any, fed: Any
) -> None:
    """Widens a head's x of one block to `own`, and times its dt and its decay to the end to `fed`;
    rows of x follow each other by `step`."""
    (low, high), last = span, log_decay[log_decay.shape[0] - 1]
    for s in range(low, high):
        to_end = exp(np.float32(last - log_decay[s])) * steps[s]
        row, widened, decayed = x[(s - low) * step :], own[s], fed[s]
        for p in range(decayed.shape[0]):
            widened[p] = wide(row[p])
            decayed[p] = widened[p] * to_end


@part
def write_out(shown: Any, own: Any, D: Any, span: Any, first: Any, y: Any) -> None:
    """y [tokens, ssm_heads · ssm_head_dim] from the column `first` on ← what was shown, and D·x.

    `own` takes the sums first: `shown` is read by its rows, and y is written by its own.
    """
    low, high = span
    for p in range(own.shape[1]):
        line = shown[p]
        for t in range(low, high):
            own[t, p] = line[t] + D * own[t, p]
    for t in range(low, high):
        out, row = y[t - low, first:], own[t]
        for p in range(row.shape[0]):
            out[p] = narrow(row[p], out)


def _scan(
    like: Any, x: int, stride_x: int, dt: Any, A: Any, B: int, stride_b: int, C: int, stride_c: int,
    D: Any, states: int, slot_size: int, slots: Any, firsts: Any, blocks: Any, wanted: Any, y: Any,
    sizes: Any,
) -> None:  # fmt: skip
    """x, B, C and `states` are addresses, with strides of tokens and slots in elements.

    `blocks` are (token of position 0, low, high), and a request owns those from its `firsts` on;
    `wanted` is the slot that gets the state behind a block, or -1. y [tokens, ssm_heads ·
    ssm_head_dim].
    """
    heads, groups, head_dim, state_dim, chunk_len = sizes
    positions, width = padded(chunk_len, LANES), padded(state_dim, LANES)
    rows, number = padded(head_dim, ROWS), np.float32
    keys = np.empty((len(blocks), groups, padded(chunk_len, ROWS), width), number)
    queries = np.empty((len(blocks), groups, state_dim, positions), number)
    seen = np.empty((len(blocks), groups, padded(chunk_len, ROWS), positions), number)
    # Once for all heads of a group.
    for job in prange(len(blocks) * groups):
        block, group = job // groups, job % groups
        low, high = blocks[block, 1], blocks[block, 2]
        token = blocks[block, 0] + low
        b = row_at(B + (token * stride_b + group * state_dim) * like.itemsize, like)
        c = row_at(C + (token * stride_c + group * state_dim) * like.itemsize, like)
        lay_group(b, c, low, high, (stride_b, stride_c), keys[block, group], queries[block, group])
        see(keys[block, group], queries[block, group], seen[block, group])
    for job in prange(len(slots) * heads):
        request, head = job // heads, job % heads
        group, size = head * groups // heads, (head_dim, state_dim)
        state = np.zeros((rows, width), number)
        stored = state_of(states, (slots[request], slot_size), head, size, A)
        state[:head_dim, :state_dim] = stored
        log_decay, steps = np.empty(positions, np.float64), np.empty(positions, number)
        entering, decay = np.empty(positions, number), np.empty(LANES, number)
        own, fed = np.zeros((chunk_len, rows), number), np.zeros((chunk_len, rows), number)
        scores, shown = (
            np.empty((chunk_len, positions), number),
            np.empty((rows, positions), number),
        )
        for block in range(firsts[request], firsts[request + 1]):
            low, high = span = blocks[block, 1], blocks[block, 2]
            token = blocks[block, 0] + low
            steps[low:high] = dt[token : token + high - low, head]
            sum_decays(steps, A[head], span, log_decay)
            for t in range(positions):
                entering[t] = exp(number(log_decay[t]))
            decay[:] = entering[positions - 1]
            row = row_at(x + (token * stride_x + head * head_dim) * like.itemsize, like)
            take_block(row, stride_x, span, log_decay, steps, own[:, :head_dim], fed[:, :head_dim])
            weigh(log_decay, steps, seen[block, group], span, scores)
            read_out(state, queries[block, group], entering, own, scores, span, shown)
            write_out(shown, own[:, :head_dim], D[head], span, head * head_dim, y[token:])
            feed(state, decay, keys[block, group], fed, span)
            if wanted[block] >= 0:
                kept = state_of(states, (wanted[block], slot_size), head, size, A)
                kept[:] = state[:head_dim, :state_dim]
        stored[:] = state[:head_dim, :state_dim]


_scan_loop = Loop(_scan, STRICT)


def chunk_scan_compiled(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    spans: Sequence[Span],
    slots: Tensor,
    snapshots: Sequence[SlotAt],
    chunk_len: int,
) -> Tensor:
    tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[1:]
    assert ssm_states.stride()[1:] == (head_dim * state_dim, state_dim, 1), ssm_states.stride()
    x, B, C = (in_rows(each) for each in (x, B, C))
    firsts, blocks, wanted = describe_blocks(spans, snapshots, chunk_len)
    y = torch.empty(tokens, heads, head_dim, dtype=x.dtype)
    products = tokens * heads * head_dim * (2 * state_dim + chunk_len)
    _scan_loop(
        products // PRODUCTS_PER_ELEMENT,
        row_like(x.dtype), x.data_ptr(), x.stride(0), dt.numpy(), A.numpy(), B.data_ptr(),
        B.stride(0), C.data_ptr(), C.stride(0), D.numpy(), ssm_states.data_ptr(),
        ssm_states.stride(0), slots.numpy(), np.array(firsts), np.array(blocks), np.array(wanted),
        as_array(y.view(tokens, -1)), (heads, groups, head_dim, state_dim, chunk_len),
    )  # fmt: skip
    return y
