"""The Mamba-2 scan over whole rows, for training.

    state_t = exp(dt_t·A)·state_{t-1} + dt_t·(x_t ⊗ B_t)
    y_t     = state_t·C_t

It is cut into pieces. Inside a piece it is a masked product like attention's; one small product
carries the states between pieces. All heads share B and C.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decays(log_decay: Tensor) -> Tensor:
    """exp(sum of log_decay over (j, i]) for j ≤ i, else 0: [..., n] to [..., n, n]."""
    total = log_decay.cumsum(-1)
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, piece: int) -> Tensor:
    """y of x [rows, tokens, heads, dim], dt [rows, tokens, heads], b and c [rows, tokens, state].

    `tokens` must be a multiple of `piece`.
    """
    rows, tokens, heads, dim = x.shape
    pieces = tokens // piece
    x = (x * dt[..., None]).view(rows, pieces, piece, heads, dim).transpose(2, 3)
    log_decay = (dt * a).view(rows, pieces, piece, heads).transpose(2, 3)
    b, c = b.view(rows, pieces, piece, -1), c.view(rows, pieces, piece, -1)
    inside = decays(log_decay)
    scores = (c @ b.transpose(-1, -2))[:, :, None] * inside
    y = scores @ x
    # The summand of each piece to the state at its end: [rows, pieces, heads, dim, state].
    added = (x * inside[..., -1, :, None]).transpose(-1, -2) @ b[:, :, None]
    whole = log_decay.sum(-1).transpose(1, 2)
    carried = decays(torch.nn.functional.pad(whole, (1, 0)))[:, :, :-1, 1:]
    flat = added.transpose(1, 2).reshape(rows, heads, pieces, -1)
    before = (carried @ flat).view(rows, heads, pieces, dim, -1).transpose(1, 2)
    since = log_decay.cumsum(-1).exp()[..., None]
    y = y + (c[:, :, None] @ before.transpose(-1, -2)) * since
    return y.transpose(2, 3).reshape(rows, tokens, heads, dim)
