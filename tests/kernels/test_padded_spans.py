"""A chunk with padding behind it has the bits of the chunk alone, in its rows and in all slots.

On a card the number of its tokens and its place are numbers of the device. Triton's interpreter
stands for one; rows of padding hold no numbers, and must not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.engine.replayed_graphs import like_a_card
from torch import Tensor

from ferryman_kernels.attention.paged_attention import (
    paged_attention_prefill,
    paged_prefill_by_splits,
)
from ferryman_kernels.ragged import PaddedSpan, SlotAt, Spans
from ferryman_kernels.recurrence.causal_conv import causal_conv_prefill
from ferryman_kernels.recurrence.cells.block_mean import block_mean_scan
from ferryman_kernels.recurrence.cells.block_mean_rows import BlockedRows
from ferryman_kernels.recurrence.channel_delta_scan import channel_delta_scan
from ferryman_kernels.recurrence.selective_scan import selective_scan
from ferryman_kernels.recurrence.token_scans import chunk_scan_by_token, delta_scan_by_token

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")

ROOM, SLOTS, OWN = 32, 6, 2
EMPTY = (1, 0, -1, -1, -1, 0)
NO_STORE = (0, 0, -1, -1)
Op = Callable[[Sequence[Tensor], Tensor, Spans, Tensor, Sequence[SlotAt]], Tensor]


def conv(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    torch.manual_seed(1)
    weight, bias = torch.randn(10, 4), torch.randn(10)
    return causal_conv_prefill(rows[0], states, weight, bias, spans, slots, snapshots)


def mamba1(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    (x, dt, B, C), A, D = rows, -torch.ones(6, 5), torch.ones(6)
    return selective_scan(x, dt.abs(), A, B, C, D, states, spans, slots, snapshots)


def mamba2(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    (x, dt, B, C), A, D = rows, -torch.ones(2), torch.ones(2)
    return chunk_scan_by_token(x, dt.abs(), A, B, C, D, states, spans, slots, snapshots, 1)


def delta(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    q, k, v, g, beta = rows
    given = q, k, v, -g.abs(), beta.clamp(0, 1)
    return delta_scan_by_token(*given, states, spans, slots, snapshots, 1)


def kimi(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    q, k, v, g, beta = rows
    return channel_delta_scan(q, k, v, -g.abs(), beta.clamp(0, 1), states, spans, slots, snapshots)


def means(rows: Any, states: Tensor, spans: Spans, slots: Tensor, snapshots: Any) -> Tensor:
    values, scores = rows
    positions, bias = torch.arange(3, 3 + len(values)), torch.ones(4, 24)
    return block_mean_scan(
        BlockedRows(values, scores, positions, bias), states, spans, slots, snapshots
    )


RECURRENCES: dict[str, tuple[Op, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "convolution": (conv, ((10,),), (10, 3)),
    "mamba-1": (mamba1, ((6,), (6,), (5,), (5,)), (6, 5)),
    "mamba-2": (mamba2, ((2, 4), (2,), (1, 5), (1, 5)), (2, 4, 5)),
    "delta": (delta, ((2, 4), (2, 4), (2, 5), (2,), (2,)), (2, 4, 5)),
    "kimi-delta": (kimi, ((2, 4), (2, 4), (2, 5), (2, 4), (2,)), (2, 4, 5)),
    "means of blocks": (means, ((24,), (24,)), (6, 12)),
}


def padded(start: int, count: int, runs: Sequence[Any], stores: Sequence[Any]) -> PaddedSpan:
    """Three rounds of runs, and the store of two snapshots and of the end."""
    all_runs = [*runs, *[EMPTY] * (3 - len(runs))]
    all_stores = [*stores, *[NO_STORE] * (2 - len(stores)), (0, 0, count or -1, -1)]
    place = torch.tensor([start, count])
    return PaddedSpan(ROOM, place[0], place[1], torch.tensor(all_runs), torch.tensor(all_stores))


CHUNKS = {
    "one token": (40, 1, ()),
    "more than a block": (16, 17, ()),
    "a snapshot of the first inputs": (31, 9, ((32, 5),)),
    "snapshots, one at the end": (28, 20, ((32, 4), (48, 5))),
}


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)
def test_a_padded_chunk_is_scanned_as_it_is_alone(recurrence: Any, chunk: Any) -> None:
    (op, row_shapes, state_shape), (start, count, snapshots) = recurrence, chunk
    torch.manual_seed(0)
    rows = [torch.randn(ROOM, *shape) for shape in row_shapes]
    states, slots = torch.randn(SLOTS, *state_shape), torch.tensor([OWN])
    cuts = [0, *(position - start for position, _ in snapshots)]
    if cuts[-1] < count:
        cuts.append(count)
    copies = [slot for _, slot in snapshots] + [-1]
    runs = [
        (low, high - low, OWN, OWN, copy, 0)
        for low, high, copy in zip(cuts, cuts[1:], copies, strict=False)
    ]
    stores = [(0, 0, position - start, slot) for position, slot in snapshots]
    own_states = states.clone()
    with like_a_card():
        own = [row[:count].clone() for row in rows]
        at = [(0, position, slot) for position, slot in snapshots]
        expected = op(own, own_states, ((start, start + count),), slots, at)
        for row in rows:
            row[count:] = torch.nan
        y = op(rows, states, padded(start, count, runs, stores), slots, ())
    assert y[:count].equal(expected)
    assert not y[count:].any(), "later layers find numbers there"
    assert states.equal(own_states)


@pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)
def test_a_chunk_of_no_token_touches_no_slot(recurrence: Any) -> None:
    op, row_shapes, state_shape = recurrence
    rows = [torch.full((ROOM, *shape), torch.nan) for shape in row_shapes]
    states = torch.randn(SLOTS, *state_shape)
    before = states.clone()
    with like_a_card():
        y = op(rows, states, padded(0, 0, (), ()), torch.tensor([-1]), ())
    assert states.equal(before)
    assert not y.any()


@pytest.mark.parametrize(
    "attend", [paged_attention_prefill, paged_prefill_by_splits], ids=["fastest", "by-splits"]
)
@pytest.mark.parametrize("window_len", [0, 9])
@pytest.mark.parametrize(("start", "count"), [(0, 5), (37, 21), (3, ROOM), (0, 0)])
def test_a_padded_chunk_attends_as_it_does_alone(
    attend: Callable[..., Tensor], window_len: int, start: int, count: int
) -> None:
    torch.manual_seed(0)
    q, (keys, values) = torch.randn(ROOM, 4, 8), torch.randn(2, 50, 2, 16, 8)
    wide = torch.full((1, 64), -1)
    num_pages = -(-(start + count) // 16)
    wide[0, :num_pages] = torch.randperm(50)[:num_pages]
    sinks, q[count:] = torch.randn(4), torch.nan
    with like_a_card():
        seen = 0.3, window_len, sinks
        y = attend(q, keys, values, wide, padded(start, count, (), ()), *seen)
        if not count:
            assert y.isfinite().all()
            return
        span = ((start, start + count),)
        own = wide[:, :num_pages].contiguous()
        expected = attend(q[:count].clone(), keys, values, own, span, *seen)
    assert y[:count].equal(expected)
    assert not y[count:].any()
