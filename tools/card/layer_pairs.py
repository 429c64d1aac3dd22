"""Chains of kernels between a layer's products as they were, against the one launch that they are.

The heads of attention on their way to pages, the inputs of a delta rule, and the gate of a shared
expert, in the sizes of published models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ferryman.model.shapes.state import AttentionState, written_by_parts
from ferryman_kernels.elementwise.gated_sum import add_gated_, add_gated_reference_
from ferryman_kernels.elementwise.heads_into_pages import (
    HeadNorms,
    HeadTurn,
    ProjectedHeads,
    TokenPlaces,
)
from ferryman_kernels.recurrence.delta_step import DeltaWeights

PAGE_SIZE = 16
HEADS = {"Qwen3 8B": (32, 8, 128, 128), "Qwen3-Next": (16, 2, 256, 64)}
"""Heads of queries and keys, channels of a head, and those of them that turn."""
DELTA = (16, 32, 128, 128)
"""Qwen3-Next's heads of keys and values, and their channels."""
HIDDEN_DIM = 2048


@dataclass(frozen=True, slots=True)
class TwoWays:
    """One result by the kernels before and by those of now. They agree if no number differs by more
    than `bound`."""

    name: str
    before: Callable[[], Tensor]
    now: Callable[[], Tensor]
    bound: float = 0.0

    def agree(self) -> bool:
        before, now = self.before().double(), self.now().double()
        return torch.allclose(before, now, rtol=self.bound, atol=self.bound)


def layer_pairs(device: torch.device, tokens: tuple[int, ...]) -> Iterator[TwoWays]:
    """All chains, each for these numbers of tokens, in bfloat16."""
    for count in tokens:
        for name in HEADS:
            yield _heads(name, count, device)
        yield _delta_inputs(count, device)
        yield _gated_sum(count, device)


def _heads(name: str, tokens: int, device: torch.device) -> TwoWays:
    q_heads, kv_heads, dim, rotary_dim = HEADS[name]
    sizes = [count * dim for count in (q_heads, kv_heads, kv_heads)]
    product = torch.randn(tokens, sum(sizes), device=device).bfloat16()
    parts = (part.view(tokens, -1, dim) for part in product.split_with_sizes(sizes, dim=1))
    heads = ProjectedHeads(*parts)
    weight = torch.rand(dim, device=device)
    inv_freq = 1e4 ** (-torch.arange(rotary_dim // 2, device=device) / (rotary_dim // 2))
    turn = HeadTurn(HeadNorms(weight, weight, None, 1e-6), inv_freq, 1.0)
    num_pages = -(-tokens // PAGE_SIZE)
    slab = torch.zeros(2, num_pages, kv_heads, PAGE_SIZE, dim, device=device).bfloat16()
    table = torch.arange(num_pages, device=device)[None]
    rows = torch.zeros(tokens, dtype=torch.int64, device=device)
    pages = AttentionState(slab[0], slab[1])
    places = TokenPlaces(table, rows, torch.arange(tokens).to(device))
    before = partial(written_by_parts, pages, heads, turn, places)
    now = partial(pages.write_turned, heads, turn, places)
    return TwoWays(f"heads of {name}, {tokens} tokens", before, now, 2.0**-6)


def _delta_inputs(tokens: int, device: torch.device) -> TwoWays:
    k_heads, v_heads, k_dim, v_dim = DELTA
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    rows = torch.randn(tokens, channels + 2 * v_heads, device=device).bfloat16()
    mixed, a, b = rows.split_with_sizes((channels, v_heads, v_heads), dim=1)
    weights = DeltaWeights(
        torch.zeros(channels, 4, device=device),
        torch.full((k_dim,), k_dim**-0.5, device=device),
        torch.rand(v_heads, device=device),
        torch.randn(v_heads, device=device),
        1.0,
    )

    def before() -> Tensor:
        q, k, _ = weights.heads(mixed, v_heads, v_dim)
        return _joined(q, k, *weights.rates(a, b))

    def now() -> Tensor:
        q, k, _, g, beta = weights.inputs(mixed, a, b, v_heads, v_dim)
        return _joined(q, k, g, beta)

    return TwoWays(f"delta inputs, {tokens} tokens", before, now, 1e-5)


def _joined(*parts: Tensor) -> Tensor:
    """One launch more on both sides."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _gated_sum(tokens: int, device: torch.device) -> TwoWays:
    total, y = torch.randn(2, tokens, HIDDEN_DIM, device=device).bfloat16()
    gate = torch.randn(tokens, 1, device=device).bfloat16()

    def by(add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        return add(total.clone(), y.clone(), gate)

    name = f"shared expert's gate, {tokens} tokens, two copies"
    return TwoWays(name, partial(by, add_gated_reference_), partial(by, add_gated_), 2.0**-6)
