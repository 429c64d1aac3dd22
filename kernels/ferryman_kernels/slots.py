"""Whole slots of a slab [num_slots, slot_bytes]: all layers of a kind in one launch.

    copy_slots:   slab[dst[i]] ← slab[src[i]]
    clear_slots:  slab[slots[i]] ← 0

No slot may be written twice in one call, nor read by one pair and written by another: the pairs
run in no order. Addresses are computed in 64 bits, for a slab is larger than 2³¹ bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def copy_slots_reference(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    slab[dst] = slab[src]


def clear_slots_reference(slab: Tensor, slots: Tensor) -> None:
    slab[slots] = 0


def copy_slots(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slot `src[i]` to slot `dst[i]`; both int64 [pairs]."""
    _check_slab(slab, src)
    _check_slab(slab, dst)
    assert src.shape == dst.shape, (src.shape, dst.shape)
    copy_slots_reference(slab, src, dst)


def clear_slots(slab: Tensor, slots: Tensor) -> None:
    """Fill the given slots, int64 [slots], with zero bytes."""
    _check_slab(slab, slots)
    clear_slots_reference(slab, slots)


def _check_slab(slab: Tensor, slots: Tensor) -> None:
    assert slab.dtype == torch.uint8, slab.shape
    assert slab.ndim == 2, slab.shape
    assert slab.is_contiguous(), slab.shape
    assert slots.dtype == torch.int64, (slots.dtype, slots.shape)
    assert slots.ndim == 1, (slots.dtype, slots.shape)
    assert slots.device == slab.device, (slots.device, slab.device)
