"""Attention to latents against softmax written out for each query and head in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, attended, wide
from tests.kernels.slabs import row_pages, rows_of, spoil_beyond, table_of
from torch import Tensor

from ferryman_kernels.attention._latent_attention_triton import latent_attention_triton
from ferryman_kernels.attention.latent_attention import (
    latent_attention,
    latent_attention_decode,
    latent_attention_prefill,
    latent_attention_reference,
)
from ferryman_kernels.attention.latent_pages import places_of

LATENT, ROPE, SCALE, SLOTS = 20, 6, 0.3, 60
SPANS = ((0, 70), (24, 31), (5, 6), (13, 100))
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def answer(q: Tensor, rows: Tensor) -> Tensor:
    """One query [heads, dim] over `rows` [seen, dim]."""
    return attended(q, rows[:, None], rows[:, None, :LATENT], SCALE)


def answer_beside(sinks: Tensor, q: Tensor, rows: Tensor) -> Tensor:
    """The same with one more score a head, `sinks` [heads], that has no value."""
    scores = SCALE * q.double() @ rows.T
    weights = scores.exp()
    norm = weights.sum(1, keepdim=True) + sinks.double().exp()[:, None]
    return weights @ rows[:, :LATENT] / norm


def _chosen(positions: list[int], width: int) -> Tensor:
    """For each token up to `width` positions that it sees, in rising order, then -1."""
    rows = [sorted(torch.randperm(p + 1)[:width].tolist()) for p in positions]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("width", [1, 5, 40])
@pytest.mark.parametrize("heads", [1, 3, 18])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [latent_attention, latent_attention_reference, latent_attention_triton]
)
def test_a_token_attends_to_what_was_chosen_and_to_nothing_else(
    run: Callable[..., Tensor], dtype: torch.dtype, heads: int, width: int, device: torch.device
) -> None:
    place = device if run is latent_attention_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    positions = [0, 7, 8, 75, 63, 75]
    pages, table = row_pages(dtype, SLOTS, LATENT + ROPE), table_of([p + 1 for p in positions], 60)
    spoil_beyond(pages, table, [p + 1 for p in positions])
    chosen = _chosen(positions, width)
    places = places_of(chosen, table, torch.arange(len(positions)), pages.shape[1])
    q = torch.randn(len(positions), heads, LATENT + ROPE).to(dtype)
    expected = [
        answer(q[i], rows_of(pages, table[i], position + 1)[chosen[i][chosen[i] >= 0]])
        for i, position in enumerate(positions)
    ]
    found = run(*(t.to(place) for t in (q, pages, places)), LATENT, SCALE)
    assert found.dtype == dtype
    tolerance = max(TOLERANCE[dtype], 5e-6 if run is latent_attention_triton else 0)
    assert_close(found, torch.stack(expected), tolerance)


@pytest.mark.parametrize("run", [latent_attention, latent_attention_triton])
def test_many_splits_of_the_places_join_to_one_softmax(
    run: Callable[..., Tensor], device: torch.device
) -> None:
    place = device if run is latent_attention_triton else CPU
    positions = [1299, 3, 511]
    pages, table = row_pages(torch.float32, 240, LATENT + ROPE), table_of([1300, 4, 512], 240)
    chosen = _chosen(positions, 1200)  # the second and third splits of the second token are empty
    places = places_of(chosen, table, torch.arange(3), pages.shape[1])
    q = torch.randn(3, 2, LATENT + ROPE)
    expected = [
        answer(q[i], rows_of(pages, table[i], position + 1)[chosen[i][chosen[i] >= 0]])
        for i, position in enumerate(positions)
    ]
    found = run(*(t.to(place) for t in (q, pages, places)), LATENT, SCALE)
    assert_close(found, torch.stack(expected), 1e-5)


@pytest.mark.parametrize("block", [1, 700, 1 << 22], ids=["alone", "few", "all"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_chunk_sees_everything_up_to_each_of_its_positions(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman_kernels.attention.latent_attention.BLOCK", block)
    ends = [end for _, end in SPANS]
    pages, table = row_pages(dtype, SLOTS, LATENT + ROPE), table_of(ends, SLOTS)
    seen = [(i, p) for i, (start, end) in enumerate(SPANS) for p in range(start, end)]
    q = torch.randn(len(seen), 3, LATENT + ROPE).to(dtype)
    expected = [answer(q[t], rows_of(pages, table[i], p + 1)) for t, (i, p) in enumerate(seen)]
    spoil_beyond(pages, table, ends)
    found = latent_attention_prefill(q, pages, table, SPANS, LATENT, SCALE)
    assert_close(found, torch.stack(expected), TOLERANCE[dtype])


def test_a_decoded_token_sees_its_whole_past_and_its_neighbours_in_the_batch() -> None:
    """Two of the rows are consecutive tokens of one request."""
    positions = torch.tensor([30, 31, 0, 77])
    table = table_of([32, 1, 78], SLOTS)[[0, 0, 1, 2]]
    pages = row_pages(torch.float64, SLOTS, LATENT + ROPE)
    spoil_beyond(pages, table[1:], [32, 1, 78])
    q = torch.randn(4, 3, LATENT + ROPE, dtype=torch.float64)
    found = latent_attention_decode(q, pages, table, positions, LATENT, SCALE)
    for i, position in enumerate(positions.tolist()):
        expected = answer(q[i], rows_of(pages, table[i], position + 1))
        assert_close(found[i], expected, 1e-13)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "run", [latent_attention, latent_attention_reference, latent_attention_triton]
)
def test_a_sink_takes_its_part_of_the_weights(
    run: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """In one split of the places and in several, some without any."""
    place = device if run is latent_attention_triton else CPU
    if place is not CPU and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    positions = [1299, 3, 511]
    pages, table = row_pages(dtype, 240, LATENT + ROPE), table_of([1300, 4, 512], 240)
    sinks = torch.tensor([-2.0, 9.0, 1.0], dtype=wide(dtype))
    q = torch.randn(3, 3, LATENT + ROPE).to(dtype)
    for width in (2, 1200):
        chosen = _chosen(positions, width)
        places = places_of(chosen, table, torch.arange(3), pages.shape[1])
        expected = [
            answer_beside(sinks, q[i], rows_of(pages, table[i], p + 1)[chosen[i][chosen[i] >= 0]])
            for i, p in enumerate(positions)
        ]
        on_place = (t.to(place) for t in (q, pages, places))
        found = run(*on_place, LATENT, SCALE, sinks.to(place))
        tolerance = max(TOLERANCE[dtype], 1e-5 if run is latent_attention_triton else 0)
        assert_close(found, torch.stack(expected), tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_chunks_and_decoded_tokens_have_sinks_too(dtype: torch.dtype) -> None:
    pages, table = row_pages(dtype, SLOTS, LATENT + ROPE), table_of([70, 31], SLOTS)
    spans, sinks = ((0, 70), (24, 31)), torch.randn(3, dtype=wide(dtype))
    seen = [(i, p) for i, (start, end) in enumerate(spans) for p in range(start, end)]
    q = torch.randn(len(seen), 3, LATENT + ROPE).to(dtype)
    expected = torch.stack(
        [
            answer_beside(sinks, q[t], rows_of(pages, table[i], p + 1))
            for t, (i, p) in enumerate(seen)
        ]
    )
    found = latent_attention_prefill(q, pages, table, spans, LATENT, SCALE, sinks)
    assert_close(found, expected, TOLERANCE[dtype])
    at, positions = torch.tensor([69, 76]), torch.tensor([69, 30])
    found = latent_attention_decode(q[at], pages, table, positions, LATENT, SCALE, sinks)
    assert_close(found, expected[at], TOLERANCE[dtype])
