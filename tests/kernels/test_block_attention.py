"""Attention to chosen blocks against softmax written out for each query and head in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, attended
from tests.kernels.slabs import PAGE_SIZE, table_of
from torch import Tensor

from ferryman_kernels.attention.blocks import block_attention
from ferryman_kernels.attention.blocks.block_attention import attend_to_blocks
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
)
from ferryman_kernels.attention.splits._split_attention_triton import (
    split_decode_triton,
    split_prefill_triton,
)

KV_HEADS, HEAD_DIM, SCALE, SLOTS = 2, 16, 0.3, 40
POSITIONS = [0, 7, 8, 75, 63, 64]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def _pages(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as strided views of one slab; the memory between them is NaN."""
    size = KV_HEADS * PAGE_SIZE * HEAD_DIM
    slab = torch.full((SLOTS, 2 * size + 24), torch.nan, dtype=dtype)
    views = slab[:, 8 : 8 + size], slab[:, 16 + size : 16 + 2 * size]
    for view in views:
        view.copy_(torch.randn(SLOTS, size))
    key, value = (view.view(SLOTS, KV_HEADS, PAGE_SIZE, HEAD_DIM) for view in views)
    return key, value


def _chosen(length: int, count: int) -> list[list[list[int]]]:
    """Up to `count` blocks that each token sees, for each head of keys, with or without its own."""
    return [
        [sorted(torch.randperm(position // length + 1)[:count].tolist()) for _ in range(KV_HEADS)]
        for position in POSITIONS
    ]


def _padded(chosen: list[list[list[int]]], count: int) -> Tensor:
    return torch.tensor([[head + [-1] * (count - len(head)) for head in row] for row in chosen])


@pytest.mark.parametrize(("length", "count"), [(3, 5), (4, 1), (8, 2), (24, 2)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("run", [paged_attention_decode, split_decode_triton])
def test_each_head_of_keys_is_seen_in_its_own_blocks(
    run: Callable[..., Tensor], dtype: torch.dtype, length: int, count: int, device: torch.device
) -> None:
    place = device if run is split_decode_triton else CPU
    if run is split_decode_triton and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    pages, table = _pages(dtype), table_of([position + 1 for position in POSITIONS], SLOTS)
    chosen = _chosen(length, count)
    q = torch.randn(len(POSITIONS), 3 * KV_HEADS, HEAD_DIM).to(dtype)
    rows, positions = torch.arange(len(POSITIONS)), torch.tensor(POSITIONS)
    named = table.to(place), rows.to(place), positions.to(place)
    keys, values = (part.to(place) for part in pages)
    found = attend_to_blocks(
        run, q.to(place), (keys, values), named, _padded(chosen, count).to(place), length, SCALE
    )
    assert found.dtype == dtype
    expected = []
    for token, position in enumerate(POSITIONS):
        for head in range(KV_HEADS):
            at = [p for b in chosen[token][head] for p in range(b * length, (b + 1) * length)]
            seen = [p for p in at if p <= position]
            slots, offsets = table[token, [p // PAGE_SIZE for p in seen]], torch.tensor(seen) % 8
            k, v = (part[slots, head, offsets][:, None] for part in pages)
            expected.append(attended(q[token, 3 * head : 3 * head + 3], k, v, SCALE))
    assert_close(found, torch.cat(expected).view_as(q), max(TOLERANCE[dtype], 5e-6))


@pytest.mark.parametrize("length", [4, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("decode", "prefill", "end"),
    [
        (paged_attention_decode, paged_attention_prefill, 80),
        # Triton's interpreter takes seconds for each dozen tokens.
        (split_decode_triton, split_prefill_triton, 26),
    ],
    ids=["processor", "card"],
)
def test_all_blocks_have_the_bits_of_attention_without_an_index(
    decode: Callable[..., Tensor],
    prefill: Callable[..., Tensor],
    end: int,
    dtype: torch.dtype,
    length: int,
) -> None:
    if decode is split_decode_triton and torch.cuda.is_available():
        pytest.skip("tensors are the processor's")
    pages, table = _pages(dtype), table_of([end], SLOTS)
    q = torch.randn(end, 4, HEAD_DIM).to(dtype)
    positions = torch.arange(end)
    blocks = torch.arange(-(-end // length)).expand(end, KV_HEADS, -1)
    blocks = torch.where(blocks <= (positions // length)[:, None, None], blocks, -1)
    named = table, torch.zeros_like(positions), positions
    found = attend_to_blocks(decode, q, pages, named, blocks, length, SCALE)
    tables = table.expand(end, -1).contiguous()
    assert torch.equal(found, decode(q, *pages, tables, positions, SCALE, 0))
    assert torch.equal(found, prefill(q, *pages, table, ((0, end),), SCALE, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_does_not_depend_on_what_is_in_memory_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, table = _pages(dtype), table_of([position + 1 for position in POSITIONS], SLOTS)
    q = torch.randn(len(POSITIONS), 4, HEAD_DIM).to(dtype)
    named = table, torch.arange(len(POSITIONS)), torch.tensor(POSITIONS)
    given = q, pages, named, _padded(_chosen(8, 3), 3), 8, SCALE
    whole = attend_to_blocks(paged_attention_decode, *given)
    monkeypatch.setattr(block_attention, "ENTRIES", 7)
    assert torch.equal(attend_to_blocks(paged_attention_decode, *given), whole)


def test_a_token_that_pads_a_batch_gets_zeros() -> None:
    pages, table = _pages(torch.float32), table_of([40, 40], SLOTS)
    table[1] = -1
    q, blocks = torch.randn(2, 4, HEAD_DIM), torch.tensor([[[0, 4]] * 2, [[-1, -1]] * 2])
    named = table, torch.arange(2), torch.tensor([39, -1])
    found = attend_to_blocks(paged_attention_decode, q, pages, named, blocks, 8, SCALE)
    assert bool(found[0].any())
    assert not bool(found[1].any())
