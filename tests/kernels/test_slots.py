"""Whole slots are copied and cleared bit for bit, other slots stay, beyond 2³¹ bytes too."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.slots import (
    clear_slots,
    clear_slots_reference,
    clear_slots_triton,
    copy_slots,
    copy_slots_reference,
    copy_slots_triton,
)

CPU = torch.device("cpu")
MAP_NORESERVE = 0x4000
"""Linux's flag, which the module mmap does not define: a mapping that reserves no memory."""


def _slab(slots: int, slot_bytes: int) -> Tensor:
    return torch.randint(0, 256, (slots, slot_bytes), dtype=torch.uint8)


@pytest.mark.parametrize("slot_bytes", [64, 192, 32768 + 64])
@pytest.mark.parametrize("run", [copy_slots, copy_slots_reference, copy_slots_triton])
def test_a_copied_slot_has_the_bytes_of_its_source(
    run: Callable[..., None], slot_bytes: int, device: torch.device
) -> None:
    place = device if run is copy_slots_triton else CPU
    before = _slab(7, slot_bytes)
    slab = before.to(place, copy=True)
    run(slab, torch.tensor([5, 0], device=place), torch.tensor([1, 6], device=place))
    expected = before.clone()
    expected[1], expected[6] = before[5], before[0]
    assert torch.equal(slab.cpu(), expected)


@pytest.mark.parametrize("slot_bytes", [64, 192, 32768 + 64])
@pytest.mark.parametrize("run", [clear_slots, clear_slots_reference, clear_slots_triton])
def test_a_cleared_slot_is_zero_and_its_neighbours_are_not(
    run: Callable[..., None], slot_bytes: int, device: torch.device
) -> None:
    place = device if run is clear_slots_triton else CPU
    before = _slab(7, slot_bytes)
    slab = before.to(place, copy=True)
    run(slab, torch.tensor([6, 2], device=place))
    before[[6, 2]] = 0
    assert torch.equal(slab.cpu(), before)


@pytest.mark.parametrize("run", [copy_slots, clear_slots])
def test_no_slots_are_no_work(run: Callable[..., None]) -> None:
    slab, none = _slab(3, 64), torch.empty(0, dtype=torch.int64)
    run(slab, *([none] * (2 if run is copy_slots else 1)))


@pytest.mark.parametrize(
    ("copy", "clear"),
    [
        pytest.param(copy_slots, clear_slots, id="cpu path"),
        pytest.param(copy_slots_triton, clear_slots_triton, id="triton"),
    ],
)
def test_slots_beyond_two_gigabytes_are_addressed_in_64_bits(
    copy: Callable[..., None], clear: Callable[..., None]
) -> None:
    """A sparse mapping: only touched pages exist. With 32 bits another slot would be hit."""
    if copy is copy_slots_triton and torch.cuda.is_available():
        pytest.skip("test_on_cuda does this in device memory")
    slot_bytes, num_slots = 1 << 16, 200_000
    mapping = mmap.mmap(-1, slot_bytes * num_slots, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    slab = torch.frombuffer(mapping, dtype=torch.uint8).view(num_slots, slot_bytes)
    assert slab.nbytes > 3 << 32
    slab[199_999] = 7
    wrapped = (199_998 * slot_bytes) % (1 << 32) // slot_bytes
    slab[wrapped] = 1
    copy(slab, torch.tensor([199_999]), torch.tensor([199_998]))
    assert bool((slab[199_998] == 7).all())
    clear(slab, torch.tensor([199_999]))
    assert not slab[199_999].any()
    assert bool((slab[wrapped] == 1).all())
