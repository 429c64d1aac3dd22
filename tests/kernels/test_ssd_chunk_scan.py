"""The chunked scan against the recurrence, token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch
from tests.kernels.loop_versions import (
    check_that_threads_leave_the_bits_of_a_scan,
    slow_to_compile,
)
from tests.kernels.oracles import assert_close, ragged, state_space, strided_states, through, wide
from torch import Tensor

from ferryman_kernels.recurrence._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels.recurrence.loops._ssd_compiled import _scan_loop
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan, chunk_scan_reference

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")
Run = Callable[..., Tensor]
SCAN: Run = chunk_scan


@dataclass(frozen=True)
class ScanInputs:
    """All inputs except the states, in the form that the op takes."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    def tensors(self, place: torch.device = CPU) -> list[Tensor]:
        return [getattr(self, field.name).to(place) for field in fields(self)]

    def part(self, low: int, high: int) -> ScanInputs:
        x, dt, B, C = (t[low:high] for t in (self.x, self.dt, self.B, self.C))
        return ScanInputs(x, dt, self.A, B, C, self.D)

    def through(self, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs of one request, and its state before each token and after the last."""
        return through(state_space(self.tensors()), range(len(self.x)), state)


def _inputs(tokens: int, dtype: torch.dtype, *, groups: int = 2, head_dim: int = 8) -> ScanInputs:
    return ScanInputs(
        x=torch.randn(tokens, 4, head_dim).to(dtype),
        dt=torch.rand(tokens, 4, dtype=wide(dtype)),
        A=-torch.rand(4, dtype=wide(dtype)) * 4,
        B=torch.randn(tokens, groups, 16).to(dtype),
        C=torch.randn(tokens, groups, 16).to(dtype),
        D=torch.randn(4, dtype=wide(dtype)),
    )


def _states(dtype: torch.dtype) -> Tensor:
    return strided_states(11, (4, 8, 16), wide(dtype))


SPANS = ((0, 37), (16, 48), (5, 29), (32, 33), (0, 16))
SLOTS = (3, 1, 6, 0, 8)
SNAPSHOTS = ((0, 16, 2), (0, 32, 4), (1, 32, 5), (2, 16, 7), (4, 16, 9))


# Snapshots and starts at 16 and 32 lie within blocks of 64.
@pytest.mark.parametrize("chunk_len", [16, 64])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_reference, chunk_scan_triton])
def test_a_ragged_scan_equals_the_recurrence_of_each_request(
    run: Run, dtype: torch.dtype, chunk_len: int, device: torch.device
) -> None:
    if run is chunk_scan_triton and dtype == torch.float64:
        pytest.skip("the kernel carries float32 states")
    place = device if run is chunk_scan_triton else CPU
    inputs = _inputs(sum(end - start for start, end in SPANS), dtype)
    states = _states(dtype)
    oracle = state_space(inputs.tensors())
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    moved, slots = states.to(place, copy=True), torch.tensor(SLOTS, device=place)
    y = run(*inputs.tensors(place), moved, SPANS, slots, SNAPSHOTS, chunk_len)
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved, expected_states, TOLERANCE[dtype])
    assert torch.equal(moved[10].cpu(), states[10])


@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton])
def test_a_request_gets_the_same_from_a_mixed_batch_as_alone(
    run: Run, device: torch.device
) -> None:
    """Row 19 of the catalogue: a grid over the whole batch spoils all requests but the first."""
    place = device if run is chunk_scan_triton else CPU
    inputs = _inputs(sum(end - start for start, end in SPANS), torch.float32)
    states, slots = _states(torch.float32), torch.tensor(SLOTS, device=place)
    together = states.to(place, copy=True)
    y = run(*inputs.tensors(place), together, SPANS, slots, SNAPSHOTS, 16)
    first = 0
    for index, (start, end) in enumerate(SPANS):
        alone = states.to(place, copy=True)
        part, last = inputs.part(first, first + end - start), first + end - start
        asked = [(0, position, slot) for i, position, slot in SNAPSHOTS if i == index]
        own = run(*part.tensors(place), alone, ((start, end),), slots[index : index + 1], asked, 16)
        torch.testing.assert_close(y[first:last], own, rtol=1e-6, atol=1e-6)
        for slot in (SLOTS[index], *(slot for _, _, slot in asked)):
            torch.testing.assert_close(together[slot], alone[slot], rtol=1e-6, atol=1e-6)
        first = last


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton])
def test_every_snapshot_on_the_grid_is_the_state_of_its_prefix(
    run: Run, dtype: torch.dtype, device: torch.device
) -> None:
    if run is chunk_scan_triton and dtype == torch.float64:
        pytest.skip("the kernel carries float32 states")
    place = device if run is chunk_scan_triton else CPU
    inputs, grid = _inputs(70, dtype), range(8, 71, 8)
    states = torch.zeros(len(grid) + 1, 4, 8, 16, dtype=inputs.D.dtype, device=place)
    slot = torch.tensor([0], device=place)
    asked = [(0, position, i + 1) for i, position in enumerate(grid)]
    run(*inputs.tensors(place), states, ((0, 70),), slot, asked, 8)
    _, seen = inputs.through(torch.zeros(4, 8, 16))
    for i, position in enumerate(grid):
        torch.testing.assert_close(
            states[i + 1].cpu().double(), seen[position], rtol=TOLERANCE[dtype], atol=1e-5
        )
        prefix = torch.zeros(1, 4, 8, 16, dtype=states.dtype, device=place)
        run(*inputs.part(0, position).tensors(place), prefix, ((0, position),), slot, (), 8)
        assert torch.equal(prefix[0], states[i + 1]), position


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton])
def test_resuming_on_the_grid_has_the_bits_of_the_cold_run(
    run: Run, dtype: torch.dtype, device: torch.device
) -> None:
    if run is chunk_scan_triton and dtype == torch.float64:
        pytest.skip("the kernel carries float32 states")
    place = device if run is chunk_scan_triton else CPU
    inputs, slot = _inputs(75, dtype), torch.tensor([0], device=place)
    cold = torch.zeros(1, 4, 8, 16, dtype=inputs.D.dtype, device=place)
    y = run(*inputs.tensors(place), cold, ((0, 75),), slot, (), 8)
    for cut in (8, 32, 64, 72):
        states = torch.zeros_like(cold)
        parts = [
            run(*inputs.part(low, high).tensors(place), states, ((low, high),), slot, (), 8)
            for low, high in ((0, cut), (cut, 75))
        ]
        assert torch.equal(torch.cat(parts), y), cut
        assert torch.equal(states, cold), cut


@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton])
def test_a_flood_of_decay_neither_overflows_nor_drowns_the_small_steps(
    run: Run, device: torch.device
) -> None:
    """Long sums of log decays: differences of float32 sums would be off by whole percents."""
    place = device if run is chunk_scan_triton else CPU
    inputs = _inputs(64, torch.float32)
    inputs.dt[:20] = 1e5
    inputs.dt[20:] *= 1e-2
    states = torch.zeros(1, 4, 8, 16, device=place)
    slot = torch.tensor([0], device=place)
    y = run(*inputs.tensors(place), states, ((0, 64),), slot, (), 64)
    expected, seen = inputs.through(torch.zeros(4, 8, 16))
    assert bool(y.isfinite().all())
    torch.testing.assert_close(y[20:].cpu().double(), expected[20:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[0].cpu().double(), seen[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton])
@pytest.mark.parametrize("chunk_len", [1, 5, 24, 64])
def test_any_chunk_length_scans_the_same(run: Run, chunk_len: int, device: torch.device) -> None:
    place = device if run is chunk_scan_triton else CPU
    inputs, states = _inputs(50, torch.float32, groups=1, head_dim=12), torch.zeros(1, 4, 12, 16)
    slot, moved = torch.tensor([0], device=place), states.to(place, copy=True)
    y = run(*inputs.tensors(place), moved, ((7, 57),), slot, (), chunk_len)
    expected, seen = inputs.through(states[0])
    assert_close(y, expected, 2e-5)
    assert_close(moved[0], seen[-1], 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, slow_to_compile(torch.bfloat16)])
def test_threads_that_share_a_scan_leave_the_bits_of_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of tokens chooses between the versions, and must not choose the bits."""
    inputs, states = _inputs(sum(end - start for start, end in SPANS), dtype), _states(dtype)

    def scan(moved: Tensor) -> Tensor:
        return SCAN(*inputs.tensors(), moved, SPANS, torch.tensor(SLOTS), SNAPSHOTS, 16)

    check_that_threads_leave_the_bits_of_a_scan(monkeypatch, _scan_loop, states, scan)


def test_heads_and_states_of_odd_sizes_are_padded_and_nothing_else_is_read() -> None:
    """Rows of 70 and 3 fill no vector; what lies behind them in memory is NaN."""
    tokens, heads, head_dim, state_dim = 23, 2, 3, 70
    wide = torch.full((tokens, heads * head_dim + 2 * state_dim + 5), torch.nan)
    mixed = wide[:, : heads * head_dim + 2 * state_dim]
    mixed.copy_(torch.randn(mixed.shape))
    x, B, C = mixed.split_with_sizes((heads * head_dim, state_dim, state_dim), dim=1)
    inputs = ScanInputs(
        x.view(tokens, heads, head_dim), torch.rand(tokens, heads), -torch.rand(heads),
        B.view(tokens, 1, state_dim), C.view(tokens, 1, state_dim), torch.randn(heads),
    )  # fmt: skip
    states = torch.randn(2, heads, head_dim, state_dim)
    expected, seen = inputs.through(states[1])
    y = SCAN(*inputs.tensors(), states, ((0, 23),), torch.tensor([1]), ((0, 16, 0),), 8)
    assert_close(y, expected, 2e-5)
    assert_close(states[1], seen[-1], 2e-5)
    assert_close(states[0], seen[16], 2e-5)
