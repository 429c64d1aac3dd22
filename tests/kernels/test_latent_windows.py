"""Latent attention in windows: its formula, pages that are gone, and equal bits in any cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.like_a_card import on_a_card
from tests.kernels.oracles import assert_close, first_seen
from tests.kernels.slabs import PAGE_SIZE, row_pages, rows_of, spoil_beyond, table_of
from tests.kernels.test_latent_attention import LATENT, ROPE, SCALE, SLOTS, TOLERANCE, answer
from torch import Tensor

from ferryman_kernels.attention.latent_attention import (
    latent_attention_decode,
    latent_attention_prefill,
    latent_decode_by_splits,
    latent_prefill_by_splits,
)

SPANS = ((0, 70), (24, 31), (5, 6), (13, 100))
WINDOWS = [1, 11, 64]


def _prompt(dtype: torch.dtype, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of SPANS, pages and a table, from which pages before all windows are gone."""
    ends = [end for _, end in SPANS]
    pages, table = row_pages(dtype, SLOTS, LATENT + ROPE), table_of(ends, SLOTS)
    spoil_beyond(pages, table, ends)
    for row, (start, _) in zip(table, SPANS, strict=True):
        gone = first_seen(start, window) // PAGE_SIZE
        pages[row[:gone]] = torch.nan
        row[:gone] = -1
    q = torch.randn(sum(end - start for start, end in SPANS), 3, LATENT + ROPE).to(dtype)
    return q, pages, table


def _expected(q: Tensor, pages: Tensor, table: Tensor, window: int) -> Tensor:
    tokens = [(i, p) for i, (start, end) in enumerate(SPANS) for p in range(start, end)]
    answers = []
    for query, (row, position) in zip(q, tokens, strict=True):
        seen = rows_of(pages, table[row], position + 1)[first_seen(position, window) :]
        answers.append(answer(query, seen))
    return torch.stack(answers)


def _decoded(
    run: Callable[..., Tensor], q: Tensor, pages: Tensor, table: Tensor, window: int
) -> Tensor:
    """All tokens of SPANS as single ones."""
    rows = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(SPANS)])
    positions = torch.cat([torch.arange(start, end) for start, end in SPANS])
    return run(q, pages, table[rows].contiguous(), positions, LATENT, SCALE, window_len=window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_token_sees_its_window_alone(dtype: torch.dtype, window: int) -> None:
    q, pages, table = _prompt(dtype, window)
    expected = _expected(q, pages, table, window)
    chunk = latent_attention_prefill(q, pages, table, SPANS, LATENT, SCALE, window_len=window)
    assert_close(chunk, expected, TOLERANCE[dtype])
    assert_close(
        _decoded(latent_attention_decode, q, pages, table, window), expected, TOLERANCE[dtype]
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_has_the_bits_of_its_tokens(dtype: torch.dtype, window: int) -> None:
    q, pages, table = _prompt(dtype, window)
    chunk = latent_attention_prefill(q, pages, table, SPANS, LATENT, SCALE, window_len=window)
    assert torch.equal(_decoded(latent_attention_decode, q, pages, table, window), chunk)
    wider = torch.cat((table, torch.full_like(table, -1)), dim=1)
    assert torch.equal(_decoded(latent_attention_decode, q, pages, wider, window), chunk)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_card_s_chunk_has_the_bits_of_its_tokens(dtype: torch.dtype) -> None:
    window, spans = 11, ((13, 40),)
    pages, table = row_pages(dtype, SLOTS, LATENT + ROPE), table_of([40], SLOTS)
    q, positions = torch.randn(27, 2, LATENT + ROPE).to(dtype), torch.arange(13, 40)
    sizes = LATENT, SCALE, None, window
    with on_a_card():
        chunk = latent_prefill_by_splits(q, pages, table, spans, *sizes)
        tables = torch.cat((table, torch.full_like(table, -1)), dim=1).expand(27, -1).contiguous()
        alone = latent_decode_by_splits(q, pages, tables, positions, *sizes)
    assert torch.equal(alone, chunk)
    expected = [
        answer(query, rows_of(pages, table[0], position + 1)[first_seen(position, window) :])
        for query, position in zip(q, positions.tolist(), strict=True)
    ]
    assert_close(chunk, torch.stack(expected), max(TOLERANCE[dtype], 5e-6))


def test_a_token_that_pads_a_batch_gets_zeros() -> None:
    pages, table = row_pages(torch.float32, SLOTS, LATENT + ROPE), table_of([40, 40], SLOTS)
    table[1] = -1
    q, positions = torch.randn(2, 3, LATENT + ROPE), torch.tensor([39, -1])
    found = latent_attention_decode(q, pages, table, positions, LATENT, SCALE, window_len=11)
    assert bool(found[0].any())
    assert not bool(found[1].any())
