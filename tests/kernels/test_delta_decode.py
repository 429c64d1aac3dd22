"""One step of the gated delta rule against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.delta_rule import CPU, Heads, random_inputs, random_states, recurrence
from tests.kernels.oracles import assert_close
from torch import Tensor

from ferryman_kernels.recurrence.delta_decode import (
    delta_decode,
    delta_decode_reference,
    delta_decode_triton,
)
from ferryman_kernels.recurrence.loops._delta_compiled import delta_scan_compiled

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [
    pytest.param(Heads(), id="two heads a key"),
    pytest.param(Heads(k_heads=3, v_heads=3, k_dim=7, v_dim=19), id="odd sizes"),
    pytest.param(Heads(k_heads=1, v_heads=2, k_dim=128, v_dim=128), id="Qwen's head"),
]
Run = Callable[..., Tensor]
every_run = pytest.mark.parametrize(
    "run", [delta_decode, delta_decode_reference, delta_decode_triton]
)


def test_a_processor_runs_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []

    def watched(*args: Any) -> Tensor:
        called.append(True)
        return delta_scan_compiled(*args)

    monkeypatch.setattr("ferryman_kernels.recurrence.delta_decode.delta_scan_compiled", watched)
    inputs, slots = random_inputs(1, torch.bfloat16, Heads()), torch.tensor([0])
    step: Run = delta_decode
    step(random_states(1, torch.bfloat16, Heads()), *inputs.tensors(), slots, slots)
    assert called


@every_run
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", SHAPES)
def test_states_go_from_their_slots_into_others_or_stay_where_they_are(
    run: Run, heads: Heads, dtype: torch.dtype, device: torch.device
) -> None:
    place = device if run is delta_decode_triton else CPU
    inputs, states = random_inputs(4, dtype, heads), random_states(9, dtype, heads)
    slots, into = torch.tensor([3, 1, 8, 3]), torch.tensor([3, 6, 0, 5])
    slots[3] = 7
    expected_states, outs = states.double().clone(), []
    for i, (src, dst) in enumerate(zip(slots.tolist(), into.tolist(), strict=True)):
        out, seen = recurrence(inputs.part(i, i + 1), states[src])
        expected_states[dst] = seen[-1]
        outs.append(out)
    moved = states.to(place, copy=True)
    y = run(moved, *inputs.tensors(place), slots.to(place), into.to(place))
    assert y.dtype == dtype
    assert_close(y, torch.cat(outs), TOLERANCE[dtype])
    assert_close(moved, expected_states, 1e-13 if dtype == torch.float64 else 1e-5)
    untouched = [1, 2, 4, 7, 8]
    assert torch.equal(moved.cpu()[untouched], states[untouched])


@every_run
def test_a_negative_slot_reads_as_cleared_and_is_written_nowhere(
    run: Run, device: torch.device
) -> None:
    place = device if run is delta_decode_triton else CPU
    heads = Heads()
    inputs, states = random_inputs(2, torch.float32, heads), random_states(3, torch.float32, heads)
    moved = states.to(place, copy=True)
    slots, into = torch.tensor([-1, -1], device=place), torch.tensor([-1, 2], device=place)
    y = run(moved, *inputs.tensors(place), slots, into)
    assert torch.equal(moved[:2].cpu(), states[:2])
    cleared = torch.zeros(*heads.state_shape)
    for row in range(2):
        out, seen = recurrence(inputs.part(row, row + 1), cleared)
        assert_close(y[row], out[0], 1e-5)
    assert_close(moved[2], seen[-1], 1e-5)


@every_run
def test_tokens_that_go_through_other_slots_wave_by_wave_end_as_those_that_stay(
    run: Run, device: torch.device
) -> None:
    place, heads = device if run is delta_decode_triton else CPU, Heads()
    inputs, states = random_inputs(4, torch.float32, heads), random_states(6, torch.float32, heads)
    staying, going = states.to(place, copy=True), states.to(place, copy=True)
    way = [torch.tensor([slot], device=place) for slot in (0, 4, 2, 5, 1)]
    for i in range(4):
        token = inputs.part(i, i + 1).tensors(place)
        kept = run(staying, *token, way[0], way[0])
        assert torch.equal(run(going, *token, way[i], way[i + 1]), kept), i
        assert torch.equal(going[int(way[i + 1])], staying[0]), i
    assert torch.equal(going[0].cpu(), states[0])
