"""Paged attention against softmax written out for each query and head in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, attended, first_seen
from tests.kernels.slabs import PAGE_SIZE, table_of
from torch import Tensor

from ferryman_kernels.attention import _attention_tiles
from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_reference,
)

TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
HEAD_DIM, SCALE = 16, 0.3
SPANS = ((0, 70), (24, 31), (5, 6), (13, 100))
WINDOWS = [0, 1, 11, 64]


def _pages(dtype: torch.dtype, slots: int) -> tuple[Tensor, Tensor]:
    """Keys and values of 2 heads as strided views of one slab; the memory between them is NaN."""
    size = 2 * PAGE_SIZE * HEAD_DIM
    rows = torch.full((slots, 3 * size), torch.nan, dtype=dtype)
    views = [rows[:, low : low + size] for low in (0, 2 * size)]
    for view in views:
        view.copy_(torch.randn(slots, size))
    key, value = (view.view(slots, 2, PAGE_SIZE, HEAD_DIM) for view in views)
    return key, value


def answer(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: int, window: int
) -> Tensor:
    """One query [q_heads, head_dim] at its position."""
    span = range(first_seen(position, window), position + 1)
    seen = [(table[p // PAGE_SIZE], p % PAGE_SIZE) for p in span]
    k, v = (torch.stack([pages[slot, :, at] for slot, at in seen]) for pages in (keys, values))
    return attended(q, k, v, SCALE)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("q_heads", [2, 6], ids=["a head each", "three share"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [paged_attention_prefill, paged_attention_reference, paged_attention_prefill_triton]
)
def test_a_chunk_sees_everything_up_to_each_of_its_positions(
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    q_heads: int,
    window: int,
    device: torch.device,
) -> None:
    place = device if run is paged_attention_prefill_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    keys, values = _pages(dtype, 40)
    table = table_of([end for _, end in SPANS], 40)
    q = torch.randn(sum(end - start for start, end in SPANS), q_heads, HEAD_DIM).to(dtype)
    positions = [(i, p) for i, (start, end) in enumerate(SPANS) for p in range(start, end)]
    expected = [
        answer(q[t], keys, values, table[i], p, window) for t, (i, p) in enumerate(positions)
    ]
    y = run(*(t.to(place) for t in (q, keys, values, table)), SPANS, SCALE, window)
    assert y.dtype == dtype
    tolerance = max(TOLERANCE[dtype], 0 if run is not paged_attention_prefill_triton else 5e-6)
    assert_close(y, torch.stack(expected), tolerance)


def test_a_card_with_less_shared_memory_sees_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes smaller tiles: of 64 queries, where the chunk has 70 and 87."""
    keys, values = _pages(torch.bfloat16, 40)
    table = table_of([end for _, end in SPANS], 40)
    q = torch.randn(sum(end - start for start, end in SPANS), 2, HEAD_DIM).bfloat16()
    wide = q.double(), keys.double(), values.double(), table
    expected = paged_attention_reference(*wide, SPANS, SCALE, 0)
    asked: list[torch.device] = []

    def little(place: torch.device) -> int:
        asked.append(place)
        return 99 * 1024

    monkeypatch.setattr(_attention_tiles, "shared_bytes", little)
    given = q.to(device), keys.to(device), values.to(device), table.to(device)
    found = paged_attention_prefill_triton(*given, SPANS, SCALE, 0)
    assert asked == [device]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("q_heads", [2, 6], ids=["a head each", "three share"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("run", [paged_attention_decode, paged_attention_decode_triton])
def test_a_decoded_token_sees_its_whole_past(
    run: Callable[..., Tensor],
    dtype: torch.dtype,
    q_heads: int,
    window: int,
    device: torch.device,
) -> None:
    place = device if run is paged_attention_decode_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    positions = [0, 7, 8, 150, 63]
    keys, values = _pages(dtype, 60)
    table = table_of([position + 1 for position in positions], 60)
    q = torch.randn(len(positions), q_heads, HEAD_DIM).to(dtype)
    expected = [
        answer(q[i], keys, values, table[i], position, window)
        for i, position in enumerate(positions)
    ]
    moved = [t.to(place) for t in (q, keys, values, table, torch.tensor(positions))]
    y = run(*moved, SCALE, window)
    tolerance = max(TOLERANCE[dtype], 0 if run is not paged_attention_decode_triton else 5e-6)
    assert_close(y, torch.stack(expected), tolerance)


@pytest.mark.parametrize("run", [paged_attention_decode, paged_attention_decode_triton])
def test_many_splits_of_the_keys_join_to_one_softmax(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is paged_attention_decode_triton else CPU
    positions = [1500, 511, 512]
    keys, values = _pages(torch.float32, 330)
    table = table_of([position + 1 for position in positions], 330)
    q = torch.randn(3, 2, HEAD_DIM)
    for window in (0, 700):
        expected = [
            answer(q[i], keys, values, table[i], position, window)
            for i, position in enumerate(positions)
        ]
        moved = [t.to(place) for t in (q, keys, values, table, torch.tensor(positions))]
        y = run(*moved, SCALE, window)
        assert_close(y, torch.stack(expected), 1e-5)


@pytest.mark.parametrize("run", [paged_attention_prefill, paged_attention_prefill_triton])
def test_pages_behind_the_window_may_be_gone(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is paged_attention_prefill_triton else CPU
    keys, values = _pages(torch.float32, 40)
    table = table_of([60], 40)
    q = torch.randn(4, 2, HEAD_DIM)
    moved = [t.to(place) for t in (q, keys, values)]
    whole = run(*moved, table.to(place), ((56, 60),), SCALE, 10)
    table[0, : 47 // PAGE_SIZE] = -1  # the first query sees positions 47 … 56
    assert torch.equal(run(*moved, table.to(place), ((56, 60),), SCALE, 10), whole)
