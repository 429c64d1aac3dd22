"""Means of blocks against their definition, a softmax over the tokens of a block, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.oracles import assert_close, strided_states, wide
from torch import Tensor

from ferryman_kernels.recurrence.cells._block_mean_triton import block_mean_runs_triton
from ferryman_kernels.recurrence.cells.block_mean import (
    block_mean_decode,
    block_mean_runs_compiled,
    block_mean_runs_reference,
    block_mean_scan,
)
from ferryman_kernels.recurrence.cells.block_mean_rows import BlockedRows

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
DIM, NUM_SLOTS, TOKENS = 37, 9, 61
RUNS = [block_mean_runs_reference, block_mean_runs_compiled, block_mean_runs_triton]

every_backend = pytest.mark.parametrize("backend", RUNS)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))
every_length = pytest.mark.parametrize(("block_len", "series"), [(4, 2), (12, 1), (1, 2), (5, 2)])


def _inputs(block_len: int, series: int, dtype: torch.dtype) -> BlockedRows:
    """One text from position 0 on; a few scores are large."""
    values, scores = torch.randn(2, TOKENS, series * DIM).to(dtype).unbind(0)
    scores[torch.rand(scores.shape) < 0.1] *= 20
    bias = torch.randn(block_len, series * DIM, dtype=torch.float64).to(wide(dtype))
    return BlockedRows(values, scores, torch.arange(TOKENS), bias)


def _part(rows: BlockedRows, tokens: slice) -> BlockedRows:
    return BlockedRows(rows.values[tokens], rows.scores[tokens], rows.positions[tokens], rows.bias)


def _expected(rows: BlockedRows, series: int) -> Tensor:
    """The definition: a softmax for each token over all that its block's mean is of so far."""
    block_len, means = len(rows.bias), []
    values, scores = (x.double().view(TOKENS, series, DIM) for x in rows[:2])
    bias = rows.bias.double().view(block_len, series, DIM)
    for token in range(TOKENS):
        begin = token // block_len * block_len
        seen = [(t, series - 1) for t in range(begin, token + 1)]
        if series == 2:
            seen += [(t, 0) for t in range(max(0, begin - block_len), begin)]
        logits = torch.stack([scores[t, s] + bias[t % block_len, s] for t, s in seen])
        weighted = torch.stack([values[t, s] for t, s in seen])
        means.append((logits.softmax(0) * weighted).sum(0))
    return torch.stack(means)


def _states(series: int, dtype: torch.dtype) -> Tensor:
    """Slots of nothing; a text's first token must not read what is there."""
    return strided_states(NUM_SLOTS, (3 * series, DIM), wide(dtype), gap=11)


@every_backend
@every_length
@every_dtype
def test_a_block_s_mean_is_over_its_tokens(
    backend: Callable[..., None],
    block_len: int,
    series: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Runs go from slot to slot, write copies, and no other slot."""
    rows, states = _inputs(block_len, series, dtype), _states(series, dtype)
    runs = torch.tensor([[0, 7, 5, 1, 3], [7, 0, 1, 1, 6], [7, 30, 1, 2, -1], [37, 24, 2, -1, 4]])
    place = device if backend is block_mean_runs_triton else CPU
    moved, given = states.to(place, copy=True), BlockedRows(*(x.to(place) for x in rows))
    y = torch.full((TOKENS, DIM), torch.nan, dtype=states.dtype, device=place)
    for run in torch.split(runs.to(place), 1):
        backend(given, moved, run, y)
    assert_close(y.cpu(), _expected(rows, series), TOLERANCE[dtype])
    untouched = [0, 5, 7, 8]
    assert torch.equal(moved.cpu()[untouched], states[untouched])
    assert torch.equal(moved[3], moved[6])
    last = moved[4].cpu().view(series, 3, DIM)[-1]
    assert torch.equal(last[0] / last[1], y[-1].cpu())


@every_length
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_in_pieces_has_its_bits(block_len: int, series: int, dtype: torch.dtype) -> None:
    """Chunks, single tokens, snapshots, and a state in another slot change none."""
    rows, slot = _inputs(block_len, series, dtype), torch.tensor([3])
    whole_states = _states(series, dtype)
    whole = block_mean_scan(rows, whole_states, ((0, TOKENS),), slot, ((0, 22, 5),))
    states, parts = _states(series, dtype), []
    for start, end in ((0, 3), (3, 16), (16, 22)):
        parts.append(block_mean_scan(_part(rows, slice(start, end)), states, ((start, end),), slot))
    assert torch.equal(states[3], whole_states[5])
    for token in range(22, TOKENS):
        read, write = torch.tensor([3 if token == 22 else 1]), torch.tensor([1])
        parts.append(block_mean_decode(_part(rows, slice(token, token + 1)), states, read, write))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states[1], whole_states[3])


def test_requests_of_a_batch_have_the_bits_of_each_alone() -> None:
    rows = _inputs(4, 2, torch.float32)
    spans, slots = ((0, 9), (0, 1), (0, 51)), torch.tensor([4, 0, 7])
    positions = torch.cat([torch.arange(*span) for span in spans])
    together = rows._replace(positions=positions)
    states = _states(2, torch.float32)
    y = block_mean_scan(together, states, spans, slots)
    first = 0
    for span, slot in zip(spans, slots, strict=True):
        tokens = slice(first, first + span[1])
        alone = _states(2, torch.float32)
        made = block_mean_scan(_part(together, tokens), alone, (span,), slot[None])
        assert torch.equal(made, y[tokens])
        assert torch.equal(alone[slot], states[slot])
        first += span[1]
