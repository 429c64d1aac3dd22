"""The formulas that kernels are compared with, written out in float64, token by token.

A recurrence is an `Advance`: `through` runs it over the tokens of one request, `ragged` over a
batch of requests as a prefill has them, `in_runs` over runs from slot to slot. `attended` is one
query of softmax attention. Formulas of a single kernel stand in its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Advance = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Of a token's index and the state before it: the state after it, and its output."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and rates beside inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def strided_states(slots: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int = 8) -> Tensor:
    """Random states, a strided view into wider rows, like a section of a slot."""
    size = torch.Size(shape).numel()
    rows = torch.randn(slots, size + gap, dtype=torch.float64).to(dtype)
    return rows[:, gap:].view(slots, *shape)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def through(advance: Advance, tokens: Iterable[int], state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one request, and its state before each token and after the last."""
    outputs, seen = [], [state.double()]
    for token in tokens:
        after, output = advance(token, seen[-1])
        seen.append(after)
        outputs.append(output)
    return torch.stack(outputs), seen


def ragged(
    advance: Advance,
    states: Tensor,
    spans: Sequence[tuple[int, int]],
    slots: Sequence[int],
    snapshots: Sequence[tuple[int, int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Outputs of all requests, and all slots after them.

    Each request goes on from its slot and ends there; a snapshot (request, position, slot) is its
    state after that position.
    """
    after, outputs, first = states.double().clone(), [], 0
    for index, (start, end) in enumerate(spans):
        tokens = range(first, first + end - start)
        output, seen = through(advance, tokens, states[slots[index]])
        outputs.append(output)
        after[slots[index]] = seen[-1]
        for request, position, slot in snapshots:
            if request == index:
                after[slot] = seen[position - start]
        first = tokens.stop
    return torch.cat(outputs), after


def in_runs(advance: Advance, states: Tensor, runs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs like y, and all slots after runs (first token, count, source, target, copy).

    A source of -1 is cleared; targets and copies of -1 are written nowhere.
    """
    after, outputs = states.double().clone(), torch.zeros_like(y, dtype=torch.float64)
    for first, count, src, dst, copy in runs.tolist():
        tokens = range(first, first + count)
        output, seen = through(advance, tokens, states[src] * (src >= 0))
        outputs[tokens.start : tokens.stop] = output
        for slot in {dst, copy} - {-1}:
            after[slot] = seen[-1]
    return outputs, after


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activates: bool) -> Advance:
    """The states are the inputs [channels, width - 1] that the window still holds."""
    x, weight = x.double(), weight.double()
    shift = torch.zeros(len(weight)).double() if bias is None else bias.double()

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, x[token, :, None]), dim=1)
        total = (window * weight).sum(1) + shift
        return window[:, 1:], total / (1 + (-total).exp()) if activates else total

    return advance


def selective_scan(given: Sequence[Tensor]) -> Advance:
    """Mamba-1, of x, dt, A, B, C and D."""
    x, dt, A, B, C, D = (tensor.double() for tensor in given)

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.exp(dt[token, :, None] * A) * state
        state = state + torch.outer(dt[token] * x[token], B[token])
        return state, state @ C[token] + D * x[token]

    return advance


def rg_lru(given: Sequence[Tensor]) -> Advance:
    """RG-LRU, of x, its two gates before their sigmoid, rates and positions."""
    x, enter, recur, rates = (tensor.double() for tensor in given[:4])

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(rates * torch.sigmoid(recur[token]))
        entering = torch.sigmoid(enter[token]) * x[token]
        if given[4][token] == 0:
            return entering, entering
        state = decay * state + torch.sqrt(1 - decay * decay) * entering
        return state, state

    return advance


def mlstm(given: Sequence[Tensor], cap: float, eps: float) -> Advance:
    """The mLSTM cell, of q, k, v and the two gates before their cap.

    A state is one row: the matrices of all heads [heads, v_dim, k_dim], then the norm of each with
    its running maximum behind it [heads, k_dim + 1].
    """
    q, k, v, enter, forget = (tensor.double() for tensor in given)
    heads, v_dim, k_dim = v.shape[1], v.shape[2], k.shape[2]
    entering, log_keep = (
        cap * (enter / cap).tanh(),
        -(1 + (-cap * (forget / cap).tanh()).exp()).log(),
    )

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        matrix = state[: heads * v_dim * k_dim].view(heads, v_dim, k_dim)
        norms = state[matrix.numel() :].view(heads, k_dim + 1)
        norm, peak = norms[:, :k_dim], norms[:, k_dim:]
        later = torch.maximum(log_keep[token, :, None] + peak, entering[token, :, None])
        keep = (log_keep[token, :, None] + peak - later).exp()
        fed = (entering[token, :, None] - later).exp() * k[token]
        matrix = keep[..., None] * matrix + torch.einsum("hv,hk->hvk", v[token], fed)
        norm, query = keep * norm + fed, q[token] / k_dim**0.5
        divisor = torch.maximum((norm * query).sum(1, keepdim=True).abs(), (-later).exp()) + eps
        y = torch.einsum("hvk,hk->hv", matrix, query) / divisor
        return torch.cat((matrix.flatten(), torch.cat((norm, later), dim=1).flatten())), y

    return advance


def weighted_mean(given: Sequence[Tensor]) -> Advance:
    """RWKV-4's, of k, v, positions, decays and the bonus; states are [3, dim]."""
    k, v, decay, bonus = (given[i].double() for i in (0, 1, 3, 4))

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        num, den, peak = state
        if given[2][token] == 0:
            return torch.stack((v[token], torch.ones_like(den), k[token])), v[token]
        most = torch.maximum(peak, k[token] + bonus)
        old, new = (peak - most).exp(), (k[token] + bonus - most).exp()
        y = (old * num + new * v[token]) / (old * den + new)
        later = torch.maximum(peak - decay, k[token])
        old, new = (peak - decay - later).exp(), (k[token] - later).exp()
        return torch.stack((old * num + new * v[token], old * den + new, later)), y

    return advance


def state_space(given: Sequence[Tensor]) -> Advance:
    """Mamba-2, of x, dt, A, B, C and D, where heads share groups of B and C."""
    x, dt, A, B, C, D = (tensor.double() for tensor in given)
    per_group = x.shape[1] // B.shape[1]

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        b, c = (rows[token].repeat_interleave(per_group, 0) for rows in (B, C))
        decay = (dt[token] * A).exp()[:, None, None]
        state = decay * state + torch.einsum("h,hp,hn->hpn", dt[token], x[token], b)
        return state, torch.einsum("hpn,hn->hp", state, c) + D[:, None] * x[token]

    return advance


def delta_rule(given: Sequence[Tensor]) -> Advance:
    """The gated delta rule, of q, k, v, g and beta; heads of v share those of k.

    A decay g is one number of a head, or one of each channel of its keys.
    """
    q, k, v, g, beta = (tensor.double() for tensor in given)
    per_key = v.shape[1] // k.shape[1]
    decay = g.exp().view(*g.shape, *(1,) * (4 - g.dim()))

    def advance(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (rows[token].repeat_interleave(per_key, 0) for rows in (q, k))
        decayed = decay[token] * state
        error = v[token] - torch.einsum("hk,hkv->hv", key, decayed)
        state = decayed + torch.einsum("hk,h,hv->hkv", key, beta[token], error)
        return state, torch.einsum("hk,hkv->hv", query, state)

    return advance


def first_seen(position: int, window: int) -> int:
    """The first position that a query sees; a window of 0 is none."""
    return max(0, position - window + 1) if window else 0


def attended(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """The answer [q_heads, value_dim] to one query, of what it sees: [seen, kv_heads, dim]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group, out = len(q) // keys.shape[1], []
    for head, query in enumerate(q):
        scores = keys[:, head // group] @ query * scale
        weight = (cap * (scores / cap).tanh() if cap else scores).exp()
        total = weight.sum() + (0 if sinks is None else sinks[head].double().exp())
        out.append((weight[:, None] * values[:, head // group]).sum(0) / total)
    return torch.stack(out)
