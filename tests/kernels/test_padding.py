"""Tokens at position -1 pad a batch: every path writes nothing for them and computes numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.attention._latent_attention_triton import latent_attention_triton
from ferryman_kernels.attention._paged_attention_triton import paged_attention_decode_triton
from ferryman_kernels.attention.latent_attention import latent_attention_reference
from ferryman_kernels.attention.latent_pages import write_latents_reference, write_latents_triton
from ferryman_kernels.attention.paged_attention import paged_attention_decode
from ferryman_kernels.attention.pages import write_kv, write_kv_reference, write_kv_triton

POSITIONS = torch.tensor([5, -1, 2, -1])
# A row of padding names no page; the row before it ends with a page that another token reads.
TABLE = torch.tensor([[3, 1], [-1, -1], [2, 1], [-1, -1]])


@pytest.mark.parametrize("write", [write_kv, write_kv_reference, write_kv_triton])
@pytest.mark.parametrize("table", [TABLE, TABLE.clamp_min(0)], ids=["no page", "page 0"])
def test_no_key_of_padding_is_written(write: Callable[..., None], table: Tensor) -> None:
    pages = torch.full((4, 2, 4, 16), torch.nan)
    heads = torch.randn(4, 2, 16)
    write(pages, pages.clone(), heads, heads, table, torch.arange(4), POSITIONS)
    written = (~pages.isnan()).any(1).any(-1).nonzero().tolist()
    assert written == [[1, 1], [2, 2]]


@pytest.mark.parametrize("write", [write_latents_reference, write_latents_triton])
def test_no_latent_of_padding_is_written(write: Callable[..., None]) -> None:
    pages = torch.full((4, 4, 24), torch.nan)
    write(pages, torch.randn(4, 24), TABLE.clamp_min(0), torch.arange(4), POSITIONS)
    assert (~pages.isnan()).any(-1).nonzero().tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize("attend", [paged_attention_decode, paged_attention_decode_triton])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_padding_attends_to_nothing(
    attend: Callable[..., Tensor], window: int, has_sinks: bool
) -> None:
    keys, values = torch.randn(2, 4, 2, 4, 16)
    keys[0] = values[0] = torch.nan
    q, sinks = torch.randn(4, 4, 16), torch.randn(4) if has_sinks else None
    out = attend(q, keys, values, TABLE, POSITIONS, 0.3, window, sinks)
    real = POSITIONS >= 0
    alone = attend(q[real], keys, values, TABLE[real], POSITIONS[real], 0.3, window, sinks)
    assert out[real].equal(alone)
    assert not out[~real].any()


@pytest.mark.parametrize("attend", [latent_attention_reference, latent_attention_triton])
def test_padding_has_no_place_to_attend_to(attend: Callable[..., Tensor]) -> None:
    pages, q = torch.randn(4, 4, 24), torch.randn(3, 2, 24)
    pages[0] = torch.nan
    places = torch.tensor([[4, 7, -1], [-1, -1, -1], [9, -1, -1]])
    out = attend(q, pages, places, 16, 0.2)
    assert out[[0, 2]].equal(attend(q[[0, 2]], pages, places[[0, 2]], 16, 0.2))
    assert not out[1].any()
