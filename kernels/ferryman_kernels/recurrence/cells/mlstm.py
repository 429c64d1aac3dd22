"""The mLSTM cell (Beck et al. 2024, xLSTM), token by token.

    i, f    = cap · tanh(raw / cap)                 two numbers of each head
    peak    ← max(log σ(f) + peak, i)               the running maximum; primes are values before
    keep    = exp(log σ(f) + peak' − peak),   enter = exp(i − peak)
    matrix  ← keep·matrix + enter · v ⊗ k                                     [v_dim, k_dim]
    norm    ← keep·norm + enter · k                                           [k_dim]
    y       = matrix·q / (max(|norm·q|, exp(−peak)) + eps),   q times 1/√k_dim

A cleared state is zero, its maximum too, as the first token of a sequence finds it. The maximum
makes a token's numbers a function of all tokens before it, in their order: so prefill and decode go
token by token. They do so in two passes. The first one computes `keep`, `enter` and the divisor of
each token and head, from the norm and the maximum alone; the second one computes the rows of the
matrix, which stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels.cpu._compiled import serves
from ferryman_kernels.ragged import SlotAt, Spans, check_rows, on_host, result_for
from ferryman_kernels.recurrence.cells._mlstm_compiled import mlstm_runs_compiled
from ferryman_kernels.recurrence.cells._mlstm_triton import mlstm_runs_triton
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows
from ferryman_kernels.recurrence.loops.runs import decode_runs, prefill_runs
from ferryman_kernels.recurrence.selective_scan import runs_of_spans, runs_of_tokens


class CellStates(NamedTuple):
    """`matrix` [slots, heads, v_dim, k_dim] and `norm` [slots, heads, k_dim + 1]: behind a head's
    norm stands its running maximum. Both are strided views of slots in the accumulation dtype."""

    matrix: Tensor
    norm: Tensor


def mlstm_runs_reference(
    rows: CellRows, gates: CellGates, states: CellStates, runs: Tensor, y: Tensor
) -> None:
    """`runs` [runs, 5]: first token, tokens, slot that is read, slot that is written, slot of the
    copy. A negative slot reads as cleared and is not written. Writes `y` as `rows.v`."""
    wide, cap = states.matrix.dtype, gates.cap
    q, k, v = (row.to(wide) for row in rows)
    q = q * q.shape[2] ** -0.5
    enter, forget = ((raw.to(wide) / cap).tanh() * cap for raw in (gates.enter, gates.forget))
    log_keep = torch.nn.functional.logsigmoid(forget)
    for first, count, src, dst, copy in runs.tolist():
        matrix, norm = (
            stored[src].clone() if src >= 0 else torch.zeros_like(stored[0]) for stored in states
        )
        norm, peak = norm[:, :-1], norm[:, -1]
        for t in range(first, first + count):
            later = torch.maximum(log_keep[t] + peak, enter[t])
            kept, entering = (log_keep[t] + peak - later).exp(), (enter[t] - later).exp()
            fed = entering[:, None] * v[t]
            matrix = kept[:, None, None] * matrix + fed[:, :, None] * k[t][:, None]
            norm, peak = kept[:, None] * norm + entering[:, None] * k[t], later
            length = (norm * q[t]).sum(1).abs()
            divisor = torch.maximum(length, (-peak).exp()) + gates.eps
            y[t] = ((matrix * q[t][:, None]).sum(2) / divisor[:, None]).to(y.dtype)
        for slot in (dst, copy):
            if slot >= 0:
                states.matrix[slot] = matrix
                states.norm[slot] = torch.cat((norm, peak[:, None]), dim=1)


def mlstm_scan(
    rows: CellRows,
    gates: CellGates,
    states: CellStates,
    spans: Spans,
    slots: Tensor,
    snapshots: Sequence[SlotAt] = (),
) -> Tensor:
    """Scans each request's tokens from its slot's state; y [tokens, heads, v_dim] as `rows.v`.

    The states advance in place at `slots` [requests]. A snapshot's position lies in (start, end];
    no two of a request are at the same one.
    """
    _check(rows, gates, states)
    check_rows(spans, slots, len(rows.v), snapshots)
    if _has_loop(rows, gates, states):
        return mlstm_runs_compiled(
            rows, gates, *states, prefill_runs(on_host(spans), slots, snapshots)
        )
    y = result_for(spans, rows.v, rows.v.dtype)
    for runs in runs_of_spans(spans, slots, snapshots):
        _advance(rows, gates, states, runs, y)
    return y


def mlstm_decode(
    rows: CellRows, gates: CellGates, states: CellStates, slots: Tensor, into: Tensor
) -> Tensor:
    """One token of each request; states at `slots` [requests] advance into the slots `into`; y as
    above.

    A negative slot reads as cleared, and a negative target is not written. No request of a call may
    read a slot that another one writes.
    """
    _check(rows, gates, states)
    assert slots.shape == into.shape == (len(rows.v),), (slots.shape, into.shape, rows.v.shape)
    if _has_loop(rows, gates, states):
        return mlstm_runs_compiled(rows, gates, *states, decode_runs(slots, into))
    y = torch.empty(rows.v.shape, dtype=rows.v.dtype, device=rows.v.device)
    _advance(rows, gates, states, runs_of_tokens(slots, into), y)
    return y


def _advance(rows: CellRows, gates: CellGates, states: CellStates, runs: Tensor, y: Tensor) -> None:
    if rows.v.is_cuda:
        mlstm_runs_triton(rows, gates, *states, runs, y)
    else:
        mlstm_runs_reference(rows, gates, states, runs, y)


def _has_loop(rows: CellRows, gates: CellGates, states: CellStates) -> bool:
    """True if the loops take them: rows and gates of one dtype, states in that of its sums."""
    # The first question, as in every launcher: on a card there are kernels of its own.
    if rows.v.is_cuda or not serves(rows.v, states.matrix):
        return False
    inputs = (*rows, gates.enter, gates.forget)
    same = len({tensor.dtype for tensor in inputs}) == 1
    return same and {stored.dtype for stored in states} == {wide_dtype(rows.v.dtype)}


def _check(rows: CellRows, gates: CellGates, states: CellStates) -> None:
    tokens, heads, v_dim = rows.v.shape
    k_dim = rows.k.shape[2]
    assert rows.q.shape == rows.k.shape == (tokens, heads, k_dim), (rows.q.shape, rows.k.shape)
    assert gates.enter.shape == gates.forget.shape == (tokens, heads), gates.enter.shape
    assert states.matrix.shape[1:] == (heads, v_dim, k_dim), states.matrix.shape
    assert states.norm.shape[1:] == (heads, k_dim + 1), states.norm.shape
