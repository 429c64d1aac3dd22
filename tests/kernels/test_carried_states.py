"""The kernel that carries states over blocks, against one block after the other in numpy."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels.recurrence._ssd_chunk_scan_triton import _carry_states_kernel

HEADS, ELEMENTS, SLOTS = 2, 40, 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def carry(
    left: Tensor, total: Tensor, states: Tensor, firsts: list[int], wanted: list[int]
) -> None:
    """`left` [blocks, heads, elements] and `states` [slots, heads, elements] as they become."""
    of_left, of_states = left.numpy(), states.numpy()
    for request, (first, last) in enumerate(pairwise(firsts)):
        state = of_states[request].copy()
        for block in range(first, last):
            fed, of_left[block] = of_left[block].copy(), state
            state = fed + np.exp(total[block].numpy())[:, None] * state
            if wanted[block] >= 0:
                of_states[wanted[block]] = state
        of_states[request] = state


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
@settings(max_examples=25, deadline=None)
def test_states_are_those_of_one_block_after_the_other(
    counts: list[int], data: st.DataObject
) -> None:
    firsts = [0, *accumulate(counts)]
    blocks, drawn = firsts[-1], torch.Generator().manual_seed(sum(counts))
    is_wanted = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    slots = iter(range(len(counts), SLOTS))
    wanted = [next(slots, -1) if asked else -1 for asked in is_wanted]
    left = torch.randn(blocks, HEADS, ELEMENTS, generator=drawn)
    left[data.draw(st.integers(0, blocks - 1)), 0, 0] = torch.nan
    total = -torch.rand(blocks, HEADS, generator=drawn)
    states = torch.randn(SLOTS, HEADS, ELEMENTS, generator=drawn)
    rows = (torch.arange(len(counts)), torch.tensor(firsts), torch.tensor(wanted))
    got = [part.clone().to(DEVICE) for part in (left, total, states, *rows)]
    _carry_states_kernel[len(counts), HEADS, 2](
        *got, HEADS * ELEMENTS, ELEMENTS, BLOCK=32,
    )  # fmt: skip
    carry(left, total, states, firsts, wanted)
    # A card fuses the product and the sum, and its exp is another one.
    bound = 1e-5 if DEVICE.type == "cuda" else 0.0
    for result, right in ((got[0], left), (got[2], states)):
        torch.testing.assert_close(result.cpu(), right, rtol=bound, atol=bound, equal_nan=True)
