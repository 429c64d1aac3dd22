"""The chunked delta rule against the recurrence, token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.delta_rule import (
    CPU,
    DeltaInputs,
    Heads,
    random_inputs,
    random_states,
    recurrence,
)
from tests.kernels.loop_versions import (
    check_that_threads_leave_the_bits_of_a_scan,
    slow_to_compile,
)
from tests.kernels.oracles import assert_close, delta_rule, ragged, wide
from torch import Tensor

from ferryman_kernels.recurrence._delta_chunk_scan_triton import delta_chunk_scan_triton
from ferryman_kernels.recurrence.delta_chunk_scan import (
    delta_chunk_scan,
    delta_chunk_scan_reference,
)
from ferryman_kernels.recurrence.delta_decode import delta_decode
from ferryman_kernels.recurrence.loops._delta_compiled import _scan_loop

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}
Run = Callable[..., Tensor]
SCAN: Run = delta_chunk_scan
HEADS = Heads()
FEW = Heads(k_heads=1, v_heads=2, k_dim=4, v_dim=5)
SPANS = ((0, 37), (16, 48), (5, 18), (32, 33), (0, 16))
SLOTS = (3, 1, 6, 0, 8)
SNAPSHOTS = ((0, 16, 2), (0, 32, 4), (1, 32, 5), (2, 16, 7), (4, 16, 9))

every_run = pytest.mark.parametrize(
    "run", [delta_chunk_scan, delta_chunk_scan_reference, delta_chunk_scan_triton]
)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def _place(run: Run, dtype: torch.dtype, device: torch.device) -> torch.device:
    if run is not delta_chunk_scan_triton:
        return CPU
    if dtype == torch.float64:
        pytest.skip("the kernel carries float32 states")
    return device


# Snapshots and starts at 16 and 32 lie within blocks of 64.
@pytest.mark.parametrize("chunk_len", [16, 64])
@every_run
@every_dtype
def test_a_ragged_scan_equals_the_recurrence_of_each_request(
    run: Run, dtype: torch.dtype, chunk_len: int, device: torch.device
) -> None:
    place = _place(run, dtype, device)
    inputs = random_inputs(sum(end - start for start, end in SPANS), dtype, HEADS)
    states = random_states(11, dtype, HEADS)
    oracle = delta_rule(inputs.tensors())
    expected, expected_states = ragged(oracle, states, SPANS, SLOTS, SNAPSHOTS)
    moved, slots = states.to(place, copy=True), torch.tensor(SLOTS, device=place)
    y = run(*inputs.tensors(place), moved, SPANS, slots, SNAPSHOTS, chunk_len)
    assert y.dtype == dtype
    assert_close(y, expected, TOLERANCE[dtype])
    assert_close(moved, expected_states, TOLERANCE[dtype])
    assert torch.equal(moved[10].cpu(), states[10])


@every_run
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_resuming_on_the_grid_has_the_bits_of_the_cold_run(
    run: Run, dtype: torch.dtype, device: torch.device
) -> None:
    place = _place(run, dtype, device)
    inputs, slot = random_inputs(43, dtype, FEW), torch.tensor([0], device=place)
    cold = torch.zeros(1, *FEW.state_shape, dtype=wide(dtype), device=place)
    y = run(*inputs.tensors(place), cold, ((0, 43),), slot, (), 8)
    for cut in (8, 32):
        states = torch.zeros_like(cold)
        parts = [
            run(*inputs.part(low, high).tensors(place), states, ((low, high),), slot, (), 8)
            for low, high in ((0, cut), (cut, 43))
        ]
        assert torch.equal(torch.cat(parts), y), cut
        assert torch.equal(states, cold), cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gets_the_bits_in_a_mixed_batch_that_it_gets_alone(dtype: torch.dtype) -> None:
    inputs = random_inputs(sum(end - start for start, end in SPANS), dtype, HEADS)
    states, slots = random_states(11, dtype, HEADS), torch.tensor(SLOTS)
    together, first = states.clone(), 0
    y = SCAN(*inputs.tensors(), together, SPANS, slots, SNAPSHOTS, 16)
    for index, (start, end) in enumerate(SPANS):
        alone, last = states.clone(), first + end - start
        asked = [(0, position, slot) for i, position, slot in SNAPSHOTS if i == index]
        part, own = inputs.part(first, last), slots[index : index + 1]
        y_alone = SCAN(*part.tensors(), alone, ((start, end),), own, asked, 16)
        assert torch.equal(y_alone, y[first:last]), index
        for slot in (SLOTS[index], *(slot for _, _, slot in asked)):
            assert torch.equal(alone[slot], together[slot]), slot
        first = last


@every_run
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_snapshot_on_the_grid_has_the_bits_of_the_run_that_ends_there(
    run: Run, dtype: torch.dtype, device: torch.device
) -> None:
    place = _place(run, dtype, device)
    inputs, grid = random_inputs(29, dtype, FEW), (8, 16, 24, 29)
    shape, slot = FEW.state_shape, torch.tensor([0], device=place)
    states = torch.zeros(len(grid) + 1, *shape, dtype=wide(dtype), device=place)
    asked = [(0, position, i + 1) for i, position in enumerate(grid)]
    run(*inputs.tensors(place), states, ((0, 29),), slot, asked, 8)
    _, seen = recurrence(inputs, torch.zeros(*shape))
    for i, position in enumerate(grid):
        torch.testing.assert_close(
            states[i + 1].cpu().double(), seen[position], rtol=TOLERANCE[dtype], atol=1e-5
        )
        prefix = torch.zeros(1, *shape, dtype=wide(dtype), device=place)
        run(*inputs.part(0, position).tensors(place), prefix, ((0, position),), slot, (), 8)
        assert torch.equal(prefix[0], states[i + 1]), position


@every_run
def test_cutting_anywhere_is_the_same_recurrence(run: Run, device: torch.device) -> None:
    place = _place(run, torch.float32, device)
    inputs, slot = random_inputs(41, torch.float32, FEW), torch.tensor([0], device=place)
    expected, seen = recurrence(inputs, torch.zeros(*FEW.state_shape))
    for cut in (1, 17, 40):
        states = torch.zeros(1, *FEW.state_shape, device=place)
        parts = [
            run(*inputs.part(low, high).tensors(place), states, ((low, high),), slot, (), 16)
            for low, high in ((0, cut), (cut, 41))
        ]
        assert_close(torch.cat(parts), expected, 2e-5)
        assert_close(states[0], seen[-1], 2e-5)


@every_run
def test_keys_that_repeat_are_learned_exactly(run: Run, device: torch.device) -> None:
    """Without decay and with β = 1 the system is all ones: its powers are binomials, up to 10¹⁸."""
    place, heads = _place(run, torch.float32, device), Heads(k_heads=1, v_heads=1)
    random = random_inputs(64, torch.float32, heads)
    same = torch.zeros_like(random.k)
    same[..., 3] = 1.0
    inputs = DeltaInputs(same, same, random.v, torch.zeros(64, 1), torch.ones(64, 1))
    states = torch.randn(1, *heads.state_shape, device=place)
    slot = torch.tensor([0], device=place)
    y = run(*inputs.tensors(place), states, ((0, 64),), slot, (), 64)
    torch.testing.assert_close(y.cpu(), random.v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[0, 0, 3].cpu(), random.v[-1, 0], rtol=1e-4, atol=1e-4)


@every_run
def test_a_flood_of_decay_neither_overflows_nor_drowns_the_small_steps(
    run: Run, device: torch.device
) -> None:
    """Long sums of log decays: differences of float32 sums would be off by whole percents."""
    place = _place(run, torch.float32, device)
    inputs = random_inputs(64, torch.float32, FEW)
    inputs.g[:20] = -1e5
    inputs.g[20:] *= 1e-2
    states = torch.zeros(1, *FEW.state_shape, device=place)
    slot = torch.tensor([0], device=place)
    y = run(*inputs.tensors(place), states, ((0, 64),), slot, (), 64)
    expected, seen = recurrence(inputs, torch.zeros(*FEW.state_shape))
    assert bool(y.isfinite().all())
    assert_close(y, expected, 1e-4)
    assert_close(states[0], seen[-1], 1e-4)


@every_run
@pytest.mark.parametrize("chunk_len", [1, 5, 24, 64])
def test_any_chunk_length_and_odd_heads_scan_the_same(
    run: Run, chunk_len: int, device: torch.device
) -> None:
    place, tokens = _place(run, torch.float32, device), min(25, 6 * chunk_len)
    heads = Heads(k_heads=1, v_heads=3, k_dim=11, v_dim=5)
    inputs, states = random_inputs(tokens, torch.float32, heads), torch.zeros(1, *heads.state_shape)
    slot, moved = torch.tensor([0], device=place), states.to(place, copy=True)
    y = run(*inputs.tensors(place), moved, ((7, 7 + tokens),), slot, (), chunk_len)
    expected, seen = recurrence(inputs, states[0])
    assert_close(y, expected, 2e-5)
    assert_close(moved[0], seen[-1], 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, slow_to_compile(torch.bfloat16)])
def test_threads_that_share_a_scan_leave_the_bits_of_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of tokens chooses between the versions, and must not choose the bits."""
    inputs = random_inputs(sum(end - start for start, end in SPANS), dtype, HEADS)
    states = random_states(11, dtype, HEADS)

    def scan(moved: Tensor) -> Tensor:
        return SCAN(*inputs.tensors(), moved, SPANS, torch.tensor(SLOTS), SNAPSHOTS, 16)

    check_that_threads_leave_the_bits_of_a_scan(monkeypatch, _scan_loop, states, scan)


def test_heads_of_odd_sizes_are_padded_and_nothing_else_is_read() -> None:
    """Heads of 66 and 70 fill no tile; what lies behind a token's heads in memory is NaN."""
    tokens, heads = 75, Heads(k_heads=1, v_heads=2, k_dim=66, v_dim=70)
    whole = random_inputs(tokens, torch.float32, heads)
    rows = (torch.full((tokens, 3, 200), torch.nan) for _ in range(3))
    q, k, v = (
        row[:, : each.shape[1], : each.shape[2]].copy_(each)
        for row, each in zip(rows, (whole.q, whole.k, whole.v), strict=True)
    )
    inputs = DeltaInputs(q, k, v, whole.g, whole.beta)
    states = random_states(3, torch.float32, heads)
    untouched = states[2].clone()
    expected, seen = recurrence(inputs, states[1])
    y = SCAN(*inputs.tensors(), states, ((0, tokens),), torch.tensor([1]), ((0, 64, 0),), 64)
    assert_close(y, expected, 2e-5)
    assert_close(states[1], seen[-1], 2e-5)
    assert_close(states[0], seen[64], 2e-5)
    assert torch.equal(states[2], untouched)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_nan_comes_through_to_what_depends_on_it_and_to_nothing_else(name: str) -> None:
    """One NaN in token 21; which outputs are NaN follows from the recurrence, in float64."""
    heads = Heads(k_heads=1, v_heads=2, k_dim=4, v_dim=70)
    inputs, states = random_inputs(40, torch.float32, heads), torch.randn(2, *heads.state_shape)
    spoilt = states[0] if name == "state" else getattr(inputs, name)[21]
    spoilt[(0,) * spoilt.dim()] = torch.nan
    expected, seen = recurrence(inputs, states[0])
    y = SCAN(*inputs.tensors(), states, ((0, 40),), torch.tensor([0]), ((0, 16, 1),), 16)
    assert bool(expected.isnan().any())
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(states[0].isnan(), seen[-1].isnan())
    assert torch.equal(states[1].isnan(), seen[16].isnan())


def test_decoding_goes_on_from_a_scan() -> None:
    inputs, slot = random_inputs(40, torch.float64, HEADS), torch.tensor([0])
    scan: Run = delta_chunk_scan
    step: Run = delta_decode
    states = torch.zeros(1, *HEADS.state_shape, dtype=torch.float64)
    parts = [
        scan(*inputs.part(0, 30).tensors(), states, ((0, 30),), slot, (), 16),
        *(step(states, *inputs.part(at, at + 1).tensors(), slot, slot) for at in range(30, 40)),
    ]
    expected, seen = recurrence(inputs, torch.zeros(*HEADS.state_shape))
    assert_close(torch.cat(parts), expected, 1e-11)
    assert_close(states[0], seen[-1], 1e-11)
