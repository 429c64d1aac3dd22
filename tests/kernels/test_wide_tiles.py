"""Heads and states that need several tiles, against the references in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.paged_attention import paged_attention_reference
from ferryman_kernels.recurrence._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan_reference

# Their tensors come in lists, so the checker cannot count the arguments.
DECODE: Any = paged_attention_decode_triton
PREFILL: Any = paged_attention_prefill_triton
ATTENTION: Any = paged_attention_reference
SCAN: Any = chunk_scan_triton
SCAN_REFERENCE: Any = chunk_scan_reference


def assert_near(got: Tensor, right: Tensor) -> None:
    error = (got.cpu().double() - right).abs().max() / right.abs().max()
    assert float(error) < 2e-5, float(error)


@pytest.mark.parametrize("head_dim", [160, 256, 512])
def test_wide_heads_attend_in_smaller_tiles(head_dim: int, device: torch.device) -> None:
    keys, values = torch.randn(2, 8, 1, 16, head_dim)
    table, spans = torch.randperm(8).view(2, 4), ((0, 37), (20, 55))
    q = torch.randn(72, 2, head_dim)
    wide: list[Any] = [tensor.double() for tensor in (q, keys, values)]
    on_card: list[Any] = [tensor.to(device) for tensor in (q, keys, values, table)]
    found = PREFILL(*on_card, spans, 0.1, 0)
    assert_near(found, ATTENTION(*wide, table, spans, 0.1, 0))
    last = [36, 71]
    positions = torch.tensor([36, 54], device=device)
    stepped = DECODE(q[last].to(device), *on_card[1:], positions, 0.1, 0)
    ends = ((36, 37), (54, 55))
    right = ATTENTION(wide[0][last], *wide[1:], table, ends, 0.1, 0)
    assert_near(stepped, right)


@pytest.mark.parametrize(("head_dim", "state"), [(80, 96), (128, 256)])
def test_large_states_go_by_in_parts(head_dim: int, state: int, device: torch.device) -> None:
    spans, slots, snapshots = ((0, 21),), torch.tensor([1]), ((0, 16, 0),)
    x, dt, A, D = torch.randn(21, 2, head_dim), torch.rand(21, 2), -torch.rand(2), torch.randn(2)
    B, C = torch.randn(2, 21, 1, state)
    states = torch.randn(2, 2, head_dim, state)
    wide = states.double()
    given: list[Any] = [tensor.double() for tensor in (x, dt, A, B, C, D)]
    right = SCAN_REFERENCE(*given, wide, spans, slots, snapshots, 16)
    moved = states.to(device)
    on_card: list[Any] = [tensor.to(device) for tensor in (x, dt, A, B, C, D)]
    found = SCAN(*on_card, moved, spans, slots.to(device), snapshots, 16)
    assert_near(found, right)
    assert_near(moved, wide)
