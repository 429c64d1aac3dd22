"""A recurrence computes a token from the tokens before it, and from nothing else.

The cold run scans a request's tokens alone, in one span. Every other way to the same tokens has its
bits: spans that begin anywhere, single tokens through decode, among other requests, in other slots,
over a snapshot, by two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels.cpu import _compiled
from ferryman_kernels.ragged import SlotAt, Span
from ferryman_kernels.recurrence.causal_conv import causal_conv_prefill
from ferryman_kernels.recurrence.cells.block_mean import block_mean_decode, block_mean_scan
from ferryman_kernels.recurrence.cells.block_mean_rows import BlockedRows
from ferryman_kernels.recurrence.cells.mlstm import CellStates, mlstm_decode, mlstm_scan
from ferryman_kernels.recurrence.cells.mlstm_rows import CellGates, CellRows
from ferryman_kernels.recurrence.cells.wkv import wkv_decode, wkv_scan
from ferryman_kernels.recurrence.cells.wkv_rows import WeightedRows
from ferryman_kernels.recurrence.channel_delta_scan import channel_delta_decode, channel_delta_scan
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.delta_decode import delta_decode
from ferryman_kernels.recurrence.delta_step import DeltaWeights, delta_step
from ferryman_kernels.recurrence.mamba_step import StepWeights, mamba_step
from ferryman_kernels.recurrence.rg_lru import rg_lru_decode, rg_lru_scan
from ferryman_kernels.recurrence.selective_scan import selective_scan, selective_scan_decode
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import selective_state_update

pytest.importorskip("numba")

SLOTS = 8
CHUNK = 16
States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recurrence:
    """`rows` are the tensors of its tokens, one row a token; `states` have one row a slot.

    y is what `prefill(rows, states, spans, slots, snapshots)` and `decode(rows, states, slots,
    into)` return.
    """

    rows: tuple[Tensor, ...]
    states: States
    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]

    def part(self, low: int, high: int) -> tuple[Tensor, ...]:
        return tuple(each[low:high] for each in self.rows)

    def copied_states(self) -> States:
        return tuple(each.clone() for each in self.states)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def mamba(tokens: int, dtype: torch.dtype) -> Recurrence:
    """A Mamba-2 mixer from the convolution on; 9 columns of a state fill no vector."""
    heads, head_dim, groups, state_dim, width, wide = 4, 6, 2, 9, 4, _wide(dtype)
    inner, group = heads * head_dim, groups * state_dim
    conv_dim = inner + 2 * group
    mixed, dt = torch.randn(tokens, conv_dim).to(dtype), torch.randn(tokens, heads).to(dtype)
    weights = StepWeights(
        torch.randn(conv_dim, width, dtype=wide), torch.randn(conv_dim, dtype=wide),
        -torch.rand(heads, dtype=wide), torch.rand(heads, dtype=wide),
        torch.randn(heads, dtype=wide), (0.001, 10.0),
    )  # fmt: skip
    states = (
        torch.randn(SLOTS, conv_dim, width - 1).to(dtype),
        torch.randn(SLOTS, heads, head_dim, state_dim, dtype=wide),
    )

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        (mixed, dt), (conv, ssm) = rows, states
        taps = weights.conv_weight, weights.conv_bias
        mixed = causal_conv_prefill(mixed, conv, *taps, spans, slots, snapshots)
        x, B, C = mixed.split_with_sizes((inner, group, group), dim=1)
        x = x.view(-1, heads, head_dim)
        B, C = (each.view(-1, groups, state_dim) for each in (B, C))
        dt, A, D = weights.time_steps(dt), weights.A, weights.D
        return chunk_scan(x, dt, A, B, C, D, ssm, spans, slots, snapshots, CHUNK)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        (mixed, dt), (conv, ssm) = rows, states
        return mamba_step(mixed, dt, weights, conv, ssm, slots, into)

    return Recurrence((mixed, dt), states, prefill, decode)


def lightning(tokens: int, dtype: torch.dtype) -> Recurrence:
    """The same recurrence without a convolution, with the decay of its head alone."""
    heads, dim, wide = 3, 32, _wide(dtype)
    x, B, C = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(3))
    A, D = -torch.rand(heads, dtype=wide), torch.zeros(heads, dtype=wide)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        x, B, C = rows
        steps = A.new_ones(len(x), heads)
        return chunk_scan(x, steps, A, B, C, D, states[0], spans, slots, snapshots, CHUNK)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        x, B, C = rows
        steps = A.new_ones(len(x), heads)
        return selective_state_update(states[0], x, steps, A, B, C, D, slots, into)

    states = (torch.randn(SLOTS, heads, dim, dim, dtype=wide),)
    return Recurrence((x, B, C), states, prefill, decode)


def gated_delta(tokens: int, dtype: torch.dtype) -> Recurrence:
    """A gated delta net from the convolution on; two value heads share a key."""
    k_heads, heads, k_dim, v_dim, width, wide = 2, 4, 12, 20, 3, _wide(dtype)
    conv_dim = 2 * k_heads * k_dim + heads * v_dim
    mixed = torch.randn(tokens, conv_dim).to(dtype)
    a, b = (torch.randn(tokens, heads).to(dtype) for _ in range(2))
    weights = DeltaWeights(
        torch.randn(conv_dim, width, dtype=wide), torch.full((k_dim,), k_dim**-0.5, dtype=wide),
        torch.rand(heads, dtype=wide), torch.randn(heads, dtype=wide), 1.0,
    )  # fmt: skip
    states = (
        torch.randn(SLOTS, conv_dim, width - 1).to(dtype),
        torch.randn(SLOTS, heads, k_dim, v_dim, dtype=wide),
    )

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        (mixed, a, b), (conv, ssm) = rows, states
        mixed = causal_conv_prefill(mixed, conv, weights.conv_weight, None, spans, slots, snapshots)
        q, k, v = weights.heads(mixed, heads, v_dim)
        g, beta = weights.rates(a, b)
        return delta_chunk_scan(q, k, v, g, beta, ssm, spans, slots, snapshots, CHUNK)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        mixed, a, b = rows
        conv, ssm = states
        return delta_step(mixed, a, b, weights, conv, ssm, slots, into)

    return Recurrence((mixed, a, b), states, prefill, decode)


def unfused_delta(tokens: int, dtype: torch.dtype) -> Recurrence:
    """The rule alone, in whole vectors, so that states are read and written in their slots."""
    heads, k_dim, v_dim, wide = 2, 32, 64, _wide(dtype)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, heads, k_dim), dim=-1).to(wide)
    v = torch.randn(tokens, heads, v_dim).to(dtype)
    g, beta = -torch.rand(tokens, heads, dtype=wide), torch.rand(tokens, heads, dtype=wide)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        q, k, v, g, beta = rows
        return delta_chunk_scan(q, k, v, g, beta, states[0], spans, slots, snapshots, CHUNK)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        q, k, v, g, beta = rows
        return delta_decode(states[0], q, k, v, g, beta, slots, into)

    states = (torch.randn(SLOTS, heads, k_dim, v_dim, dtype=wide),)
    return Recurrence((q, k, v, g, beta), states, prefill, decode)


def channel_delta(tokens: int, dtype: torch.dtype) -> Recurrence:
    heads, k_dim, v_dim, wide = 2, 20, 12, _wide(dtype)
    q, k = torch.nn.functional.normalize(torch.randn(2, tokens, heads, k_dim), dim=-1).to(wide)
    v = torch.randn(tokens, heads, v_dim).to(dtype)
    g, beta = -torch.rand(tokens, heads, k_dim, dtype=wide), torch.rand(tokens, heads, dtype=wide)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        q, k, v, g, beta = rows
        return channel_delta_scan(q, k, v, g, beta, states[0], spans, slots, snapshots)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        q, k, v, g, beta = rows
        return channel_delta_decode(states[0], q, k, v, g, beta, slots, into)

    states = (torch.randn(SLOTS, heads, k_dim, v_dim, dtype=wide),)
    return Recurrence((q, k, v, g, beta), states, prefill, decode)


def selective(tokens: int, dtype: torch.dtype) -> Recurrence:
    """Mamba-1; 70 channels are two blocks of jobs and a part of one."""
    channels, state_dim, wide = 70, 16, _wide(dtype)
    x, dt = torch.randn(tokens, channels, dtype=wide), torch.rand(tokens, channels, dtype=wide)
    B, C = (torch.randn(tokens, state_dim, dtype=wide) for _ in range(2))
    A, D = -torch.rand(channels, state_dim, dtype=wide), torch.rand(channels, dtype=wide)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        x, dt, B, C = rows
        return selective_scan(x, dt, A, B, C, D, states[0], spans, slots, snapshots)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        x, dt, B, C = rows
        return selective_scan_decode(states[0], x, dt, A, B, C, D, slots, into)

    states = (torch.randn(SLOTS, channels, state_dim, dtype=wide),)
    return Recurrence((x, dt, B, C), states, prefill, decode)


def gated_linear(tokens: int, dtype: torch.dtype) -> Recurrence:
    """RG-LRU; 300 channels are a block of jobs and a part of one. No token is the first of all."""
    channels, wide = 300, _wide(dtype)
    x, enter, recur = (torch.randn(tokens, channels).to(dtype) for _ in range(3))
    rates, positions = -4 * torch.rand(channels, dtype=wide), torch.arange(7, 7 + tokens)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        x, enter, recur, positions = rows
        given = x, enter, recur, rates, positions
        return rg_lru_scan(*given, states[0], spans, slots, snapshots)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        x, enter, recur, positions = rows
        return rg_lru_decode(states[0], x, enter, recur, rates, positions, slots, into)

    states = (torch.randn(SLOTS, channels, dtype=wide),)
    return Recurrence((x, enter, recur, positions), states, prefill, decode)


def matrix_cell(tokens: int, dtype: torch.dtype) -> Recurrence:
    """mLSTM; 70 rows are a job's and a part of one, 20 columns a vector and a part of one."""
    heads, v_dim, k_dim, wide = 2, 70, 20, _wide(dtype)
    q, k = (torch.randn(tokens, heads, k_dim).to(dtype) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim).to(dtype)
    enter, forget = (2 * torch.randn(tokens, heads).to(dtype) for _ in range(2))

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        cell = CellRows(*rows[:3]), CellGates(rows[3], rows[4], 15.0, 1e-6), CellStates(*states)
        return mlstm_scan(*cell, spans, slots, snapshots)

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        cell = CellRows(*rows[:3]), CellGates(rows[3], rows[4], 15.0, 1e-6), CellStates(*states)
        return mlstm_decode(*cell, slots, into)

    states = (
        torch.randn(SLOTS, heads, v_dim, k_dim, dtype=wide),
        torch.randn(SLOTS, heads, k_dim + 1, dtype=wide),
    )
    return Recurrence((q, k, v, enter, forget), states, prefill, decode)


def weighted(tokens: int, dtype: torch.dtype) -> Recurrence:
    """RWKV-4; 300 channels are a block of jobs and a part of one. No token is the first of all."""
    channels, wide = 300, _wide(dtype)
    k, v = (torch.randn(tokens, channels).to(dtype) for _ in range(2))
    decay, bonus = torch.rand(channels, dtype=wide), torch.randn(channels, dtype=wide)
    positions = torch.arange(7, 7 + tokens)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        return wkv_scan(
            WeightedRows(rows[0], rows[1], rows[2], decay, bonus),
            states[0],
            spans,
            slots,
            snapshots,
        )

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        return wkv_decode(
            WeightedRows(rows[0], rows[1], rows[2], decay, bonus), states[0], slots, into
        )

    states = torch.randn(SLOTS, 3, channels, dtype=wide)
    states[:, 1] = 1 + states[:, 1].abs()
    return Recurrence((k, v, positions), (states,), prefill, decode)


def block_means(tokens: int, dtype: torch.dtype) -> Recurrence:
    """DeepSeek-V4's means of blocks that overlap; 300 channels are a block of jobs and a part of
    one. No token is the first of all."""
    channels, wide = 300, _wide(dtype)
    values, scores = (torch.randn(tokens, 2 * channels).to(dtype) for _ in range(2))
    bias, positions = torch.randn(4, 2 * channels, dtype=wide), torch.arange(7, 7 + tokens)

    def prefill(
        rows: Any, states: Any, spans: list[Span], slots: Tensor, snapshots: list[SlotAt]
    ) -> Tensor:
        return block_mean_scan(
            BlockedRows(rows[0], rows[1], rows[2], bias), states[0], spans, slots, snapshots
        )

    def decode(rows: Any, states: Any, slots: Tensor, into: Tensor) -> Tensor:
        return block_mean_decode(
            BlockedRows(rows[0], rows[1], rows[2], bias), states[0], slots, into
        )

    states = torch.randn(SLOTS, 6, channels, dtype=wide)
    states[:, 1::3] = 1 + states[:, 1::3].abs()
    return Recurrence((values, scores, positions), (states,), prefill, decode)


KINDS = [mamba, lightning, gated_delta, unfused_delta, channel_delta, selective, gated_linear]
KINDS += [matrix_cell, weighted, block_means]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
TOKENS = 41


def _cold(way: Recurrence, first_slot: int, tokens: int) -> tuple[Tensor, States]:
    """y of the first tokens of `way`, and their states, from those of a slot."""
    states, slots = way.copied_states(), torch.tensor([first_slot])
    y = way.prefill(way.part(0, tokens), states, [(0, tokens)], slots, [])
    return y, tuple(each[first_slot] for each in states)


def _check(found: tuple[Tensor, States], expected: tuple[Tensor, States]) -> None:
    assert torch.equal(found[0], expected[0])
    for own, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(own, other)


@every_kind
@every_dtype
def test_single_tokens_have_the_bits_of_a_span(
    kind: Callable[[int, torch.dtype], Recurrence], dtype: torch.dtype
) -> None:
    """As decode has them: in place, then into another slot, then in place again."""
    way = kind(TOKENS, dtype)
    states, places = way.copied_states(), [2] * 15 + [5] * (TOKENS - 15)
    rows = []
    for token, (old, new) in enumerate(zip([2, *places], places, strict=False)):
        slots = torch.tensor([old]), torch.tensor([new])
        rows.append(way.decode(way.part(token, token + 1), states, *slots))
    _check((torch.cat(rows), tuple(each[5] for each in states)), _cold(way, 2, TOKENS))


@every_kind
@every_dtype
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_spans_and_neighbours_leave_the_bits(
    kind: Callable[[int, torch.dtype], Recurrence], dtype: torch.dtype, data: st.DataObject
) -> None:
    """A request in spans that begin anywhere, among others of any length, in any place and slot."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    way = kind(TOKENS, dtype)
    cuts = sorted(data.draw(st.sets(st.integers(1, TOKENS - 1), max_size=4)))
    states, rows = way.copied_states(), []
    for low, high in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        lengths = data.draw(st.lists(st.integers(1, 20), max_size=3))
        place = data.draw(st.integers(0, len(lengths)))
        others = [kind(length, dtype) for length in lengths]
        parts = [other.rows for other in others]
        parts.insert(place, way.part(low, high))
        spans: list[Span] = [(0, length) for length in lengths]
        spans.insert(place, (low, high))
        slots = [slot for slot in range(SLOTS) if slot != 3][: len(lengths)]
        slots.insert(place, 3)
        joined = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        y = way.prefill(joined, states, spans, torch.tensor(slots), [])
        first = sum(end - start for start, end in spans[:place])
        rows.append(y[first : first + high - low])
    _check((torch.cat(rows), tuple(each[3] for each in states)), _cold(way, 3, TOKENS))


@every_kind
def test_a_snapshot_has_the_bits_of_the_run_that_ends_there(
    kind: Callable[[int, torch.dtype], Recurrence],
) -> None:
    """At block ends, and at the end of the span, where the working slot has them, too."""
    way = kind(TOKENS, torch.float32)
    states, snapshots = way.copied_states(), list[SlotAt]([(0, 32, 6), (0, 16, 5), (0, TOKENS, 7)])
    y = way.prefill(way.rows, states, [(0, TOKENS)], torch.tensor([1]), snapshots)
    for _, position, slot in snapshots:
        kept = tuple(each[slot] for each in states)
        _check((y[:position], kept), _cold(way, 1, position))
    assert all(torch.equal(each[1], each[7]) for each in states)


@every_kind
def test_a_batch_of_single_tokens_has_the_bits_of_each_alone(
    kind: Callable[[int, torch.dtype], Recurrence],
) -> None:
    way, slots = kind(6, torch.float32), torch.tensor([4, 0, 7, 2, 1, 6])
    states = way.copied_states()
    y = way.decode(way.rows, states, slots, slots)
    for row, slot in enumerate(slots.tolist()):
        own, at = way.copied_states(), torch.tensor([slot])
        alone = way.decode(way.part(row, row + 1), own, at, at)
        _check(
            (y[row : row + 1], tuple(each[slot] for each in states)),
            (alone, tuple(each[slot] for each in own)),
        )


@every_kind
def test_two_threads_leave_the_bits(
    kind: Callable[[int, torch.dtype], Recurrence], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, before = kind(TOKENS, torch.float32), torch.get_num_threads()
    token, slots = way.part(0, 1), torch.tensor([2])
    answers = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            # Few numbers would stay on one thread.
            monkeypatch.setattr(_compiled, "WORTH_SHARING", 1)
            states = way.copied_states()
            y = way.decode(token, states, slots, slots)
            answers.append((_cold(way, 2, TOKENS), (y, states)))
        finally:
            torch.set_num_threads(before)
    (cold, step), (shared_cold, shared_step) = answers
    _check(shared_cold, cold)
    _check(shared_step, step)
