"""On a card, latents and a sparse index in one order: a chunk has the bits of its tokens."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.kernels.one_kernel import noted_kernels
from tests.kernels.slabs import PAGE_SIZE, row_pages, table_of
from tests.kernels.test_one_order_of_index_scores import IndexedPrompt
from torch import Tensor

from ferryman_kernels.attention import _latent_attention_triton as latent_triton
from ferryman_kernels.attention.latent_attention import (
    latent_attention_by_splits,
    latent_attention_decode,
    latent_attention_prefill,
    latent_decode_by_splits,
    latent_prefill_by_splits,
)
from ferryman_kernels.attention.sparse_index import choose_decode, choose_prefill_by_token

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are the processor's")

LATENT, ROPE, HEADS, LENGTH, SCALE = 20, 6, 3, 75, 0.3
SPLIT = 32
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_triton, "SPLIT_KEYS", SPLIT)
    monkeypatch.setattr(latent_triton, "MAX_SPLITS", 2)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, pages and the table of one request."""
    pages, table = row_pages(dtype, 40, LATENT + ROPE), table_of([LENGTH], 40)
    return torch.randn(LENGTH, HEADS, LATENT + ROPE).to(dtype), pages, table


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 4.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_chunks_and_single_tokens_have_the_same_bits(
    dtype: torch.dtype, sinks: Tensor | None
) -> None:
    q, pages, table = drawn(dtype)
    sizes = LATENT, SCALE, sinks
    with on_a_card(), noted_kernels() as compiled:
        whole = latent_prefill_by_splits(q, pages, table, ((0, LENGTH),), *sizes)
        cut = [
            latent_prefill_by_splits(q[low:high], pages, table, ((low, high),), *sizes)
            for low, high in ((0, 21), (21, 60), (60, LENGTH))
        ]
        at = torch.tensor([3, 31, 32, 74])
        wide = torch.cat((table, torch.full((1, 9), -1)), dim=1).expand(len(at), -1).contiguous()
        steps = latent_decode_by_splits(q[at], pages, wide, at, *sizes)
    assert torch.equal(torch.cat(cut), whole)
    assert torch.equal(steps, whole[at])
    assert len(compiled) == 2, compiled
    right = latent_attention_prefill(q, pages, table, ((0, LENGTH),), *sizes)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole, right, rtol=tolerance, atol=tolerance)


def test_places_have_the_bits_of_themselves_in_a_wider_table() -> None:
    q, pages, _ = drawn(torch.float32)
    places = torch.arange(40)[None].repeat(LENGTH, 1)
    padded = torch.cat((places, torch.full((LENGTH, 57), -1)), dim=1)
    with on_a_card():
        found = latent_attention_by_splits(q, pages, places, LATENT, SCALE)
        assert torch.equal(latent_attention_by_splits(q, pages, padded, LATENT, SCALE), found)


def test_splits_that_follow_the_width_are_caught() -> None:
    """The tests above can fail: with more splits than it has room for, decode makes longer ones."""
    q, pages, table = drawn(torch.float32)
    at = torch.tensor([LENGTH - 1])
    wide = torch.cat((table, torch.full((1, 40), -1)), dim=1)
    with on_a_card():
        narrow = latent_attention_decode(q[at], pages, table, at, LATENT, SCALE)
        assert not torch.equal(
            latent_attention_decode(q[at], pages, wide, at, LATENT, SCALE), narrow
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chunk_chooses_what_its_tokens_choose_alone(dtype: torch.dtype) -> None:
    prompt, count = IndexedPrompt(LENGTH, 16, dtype), 9
    with on_a_card(), noted_kernels() as compiled:
        whole = choose_prefill_by_token(
            prompt.q, prompt.weights, prompt.pages, prompt.table, ((0, LENGTH),), count
        )
        at = torch.arange(20, LENGTH, 11)
        tables = prompt.table.expand(len(at), -1).contiguous()
        alone = choose_decode(prompt.q[at], prompt.weights[at], prompt.pages, tables, at, count)
        cut = choose_prefill_by_token(
            prompt.q[30:50], prompt.weights[30:50], prompt.pages, prompt.table, ((30, 50),), count
        )
    assert torch.equal(alone, whole[at])
    assert torch.equal(cut, whole[30:50])
    assert len(compiled) == 1, compiled
    assert PAGE_SIZE * prompt.table.shape[1] > count
