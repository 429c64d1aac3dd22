"""Questions to a card's kernels: has a row the same bits alone, among others, and in any part?

A question computes rows [rows, …] of an op in several ways, the first of which is each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ferryman.model.one_order import in_one_order
from ferryman.model.weights.linear import PlainLinear, make_linear
from ferryman_kernels.attention.latent_attention import (
    latent_decode_by_splits,
    latent_prefill_by_splits,
)
from ferryman_kernels.attention.paged_attention import (
    paged_decode_by_splits,
    paged_prefill_by_splits,
)
from ferryman_kernels.elementwise.activations import gelu, sigmoid, silu, softplus
from ferryman_kernels.elementwise.rms_norm import rms_norm
from ferryman_kernels.products.grouped_product import (
    FloatStack,
    grouped_product_in_one_order,
    sort_pairs,
)
from ferryman_kernels.recurrence.token_scans import (
    chunk_scan_by_token,
    delta_scan_by_token,
    state_update_by_token,
)

Rows = Callable[[Tensor], Tensor]
Question = Callable[[torch.device], Iterator[tuple[str, Tensor, Tensor]]]
"""Each way's name, what it gives, and what single rows gave."""

ROWS = 100
PARTS = (slice(0, 2), slice(3, 20), slice(30, 95), slice(0, ROWS))


def differing_rows(question: Question, device: torch.device) -> str:
    """The ways in which rows differ, and how many; empty if none does."""
    with torch.inference_mode():
        torch.manual_seed(0)
        found = [
            f"{name} in {int((given != alone).flatten(1).any(1).sum())} of {len(alone)} rows"
            for name, given, alone in question(device)
            if not torch.equal(given, alone)
        ]
    return ", ".join(found)


def of_rows(
    run: Rows, dim: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = torch.randn(ROWS, dim, device=device).to(dtype)
    alone = torch.cat([run(row[None]) for row in x])
    for part in PARTS:
        yield f"rows {part.start} to {part.stop}", run(x[part]), alone[part]


def _dense(out_dim: int, in_dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The product of the device under bits."""
    weight = torch.randn(out_dim, in_dim, device=device).to(dtype)
    product = in_one_order(PlainLinear(weight, None)) if weight.is_cuda else make_linear(weight)
    yield from of_rows(product, in_dim, dtype, device)


def _experts(device: torch.device) -> Any:
    """A processor's experts are other loops, which the tests ask."""
    if device.type == "cpu":
        return
    weight = torch.randn(8, 512, 1024, device=device).bfloat16()
    stack, x = FloatStack(weight, None), torch.randn(ROWS, 1024, device=device).bfloat16()
    chosen = (torch.arange(ROWS, device=device) ** 2 % 8)[:, None]

    def run(part: slice) -> Tensor:
        return grouped_product_in_one_order(x[part], stack, *sort_pairs(chosen[part], 8))

    alone = torch.cat([run(slice(row, row + 1)) for row in range(ROWS)])
    for part in PARTS:
        yield f"rows {part.start} to {part.stop}", run(part), alone[part]


def _attention(window: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Queries behind 1,100 keys, which are three splits."""
    length, page_size, heads = 1100, 16, (8, 2)
    table = torch.randperm(-(-length // page_size), device=device)[None]
    keys, values = (
        torch.randn(table.shape[1], heads[1], page_size, head_dim, device=device).to(dtype)
        for _ in range(2)
    )
    q = torch.randn(length, heads[0], head_dim, device=device).to(dtype)
    at = torch.tensor([0, 5, 511, 512, 700, 1024, 1099], device=device)

    def steps(at: Tensor) -> Tensor:
        tables = table.expand(len(at), -1).contiguous()
        return paged_decode_by_splits(q[at], keys, values, tables, at, head_dim**-0.5, window)

    def chunk(low: int, high: int) -> Tensor:
        given = q[low:high], keys, values, table, ((low, high),), head_dim**-0.5, window
        return paged_prefill_by_splits(*given)

    alone = torch.cat([steps(each[None]) for each in at])
    yield "a batch", steps(at), alone
    yield "one chunk", chunk(0, length)[at], alone
    yield "two chunks", torch.cat((chunk(0, 530), chunk(530, length)))[at], alone


def _latents(device: torch.device) -> Any:
    length, page_size, heads, sizes = 600, 16, 16, (512, 0.1)
    table = torch.randperm(-(-length // page_size), device=device)[None]
    pages = torch.randn(table.shape[1], page_size, 576, device=device).bfloat16()
    q = torch.randn(length, heads, 576, device=device).bfloat16()
    at = torch.tensor([0, 511, 512, 599], device=device)

    def steps(at: Tensor) -> Tensor:
        tables = table.expand(len(at), -1).contiguous()
        return latent_decode_by_splits(q[at], pages, tables, at, *sizes)

    alone = torch.cat([steps(each[None]) for each in at])
    yield "a batch", steps(at), alone
    whole = latent_prefill_by_splits(q, pages, table, ((0, length),), *sizes)
    yield "one chunk", whole[at], alone


def _mamba(device: torch.device) -> Any:
    tokens, heads = 70, 8
    x = torch.randn(tokens, heads, 64, device=device).bfloat16()
    dt, A, D = torch.rand(tokens, heads), -torch.rand(heads), torch.rand(heads)
    B, C = torch.randn(2, tokens, 1, 128, device=device).bfloat16()
    dt, A, D = (each.to(device) for each in (dt, A, D))
    slot, states = torch.tensor([0], device=device), torch.zeros(1, heads, 64, 128, device=device)

    def step(token: int) -> Tensor:
        own = slice(token, token + 1)
        given = x[own], dt[own], A, B[own], C[own], D
        return state_update_by_token(states, *given, slot, slot)

    def chunk(low: int, high: int) -> Tensor:
        part = slice(low, high)
        given = x[part], dt[part], A, B[part], C[part], D
        return chunk_scan_by_token(*given, states, [(low, high)], slot, (), 64)

    alone = torch.cat([step(token) for token in range(tokens)])
    states.zero_()
    yield "two chunks", torch.cat([chunk(0, 64), chunk(64, tokens)]), alone


def _delta(device: torch.device) -> Any:
    tokens, heads = 70, 4
    q, k = F.normalize(torch.randn(2, tokens, heads, 128, device=device), dim=-1)
    v = torch.randn(tokens, heads, 128, device=device).bfloat16()
    g, beta = -torch.rand(tokens, heads, device=device), torch.rand(tokens, heads, device=device)
    slot, states = torch.tensor([0], device=device), torch.zeros(1, heads, 128, 128, device=device)

    def chunk(low: int, high: int) -> Tensor:
        part = slice(low, high)
        given = q[part], k[part], v[part], g[part], beta[part]
        return delta_scan_by_token(*given, states, [(low, high)], slot, (), 64)

    def cut_at(*cuts: int) -> Tensor:
        states.zero_()
        ends = zip((0, *cuts), (*cuts, tokens), strict=True)
        return torch.cat([chunk(low, high) for low, high in ends])

    yield "one chunk", cut_at(), cut_at(*range(1, tokens))


def _single_numbers(device: torch.device) -> Any:
    """The functions between the kernels, which are torch's on a card."""
    for name, run in (
        ("softplus", softplus),
        ("sigmoid", sigmoid),
        ("silu", silu),
        ("gelu", gelu),
        ("exp", torch.exp),
        ("softmax", partial(torch.softmax, dim=-1)),
        ("layer_norm", lambda x: F.layer_norm(x, x.shape[1:])),
        ("few sums", lambda x: x[:, :6].sum(-1, keepdim=True)),
        ("rms_norm", lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-5)),
    ):
        for dim in (33, 64, 1000):
            for way, given, alone in of_rows(run, dim, torch.float32, device):
                yield f"{name} of {dim}, {way}", given, alone


ROW_QUESTIONS: Mapping[str, Question] = {
    "product, 4,096 × 2,048": partial(_dense, 4096, 2048, torch.bfloat16),
    "product, 20,000 × 1,024": partial(_dense, 20_000, 1024, torch.bfloat16),
    "product, 300 × 1,000, float32": partial(_dense, 300, 1000, torch.float32),
    "experts": _experts,
    "attention, heads of 128": partial(_attention, 0, 128, torch.bfloat16),
    "attention, window of 300, heads of 64": partial(_attention, 300, 64, torch.bfloat16),
    "attention, heads of 64, float32": partial(_attention, 0, 64, torch.float32),
    "latents": _latents,
    "Mamba-2": _mamba,
    "gated delta rule": _delta,
    "between them": _single_numbers,
}
