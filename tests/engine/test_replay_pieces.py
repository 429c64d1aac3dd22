"""A recording runs its loops without Python between them, and torch's operations by Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ferryman.engine.forward.recorded_launches import recorded_launches
from ferryman.model.shapes.state import LayerCount
from ferryman_kernels.cpu._compiled import numba
from ferryman_kernels.cpu.native_launches import MOST_LAUNCHES
from ferryman_kernels.elementwise.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(numba is None, reason="there are no compiled loops")

WEIGHT = torch.linspace(0.5, 2, 8)


def normed(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = rms_norm(x, WEIGHT, 0.5)
    return x


def test_loops_that_follow_each_other_are_one_piece_of_at_most_so_many() -> None:
    x = torch.arange(16.0).view(2, 8)
    with torch.inference_mode():
        with recorded_launches() as recorder:
            found = normed(normed(x, MOST_LAUNCHES + 6).mul_(3), 2)
        recording, count = recorder.recording(), LayerCount()
        assert [piece.num_launches for piece in recording.pieces] == [MOST_LAUNCHES, 6, 1, 2]
        for factor in (-2.0, 0.25):
            x.mul_(factor).add_(1)
            recording.replay(count)
            assert found.equal(normed(normed(x, MOST_LAUNCHES + 6).mul_(3), 2))
    assert count.num_done == 2 * len(recording.launches) == 2 * (MOST_LAUNCHES + 9)
