"""Whole slots of a slab [num_slots, slot_bytes]: all layers of a kind in one launch.

    copy_slots:   slab[dst[i]] ← slab[src[i]]
    clear_slots:  slab[slots[i]] ← 0

The pairs run in no order. So no slot may be written twice in one call, or be read by one pair and
written by another. Addresses are computed in 64 bits, because a slab may exceed 2³¹ bytes.
"""

from __future__ import annotations

from ctypes import memmove, memset

import torch
from torch import Tensor

from ferryman_kernels._triton import Kernel, cdiv, tl

BLOCK_WORDS = 4096
"""Words of 8 bytes that one program moves."""


def copy_slots_reference(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    slab[dst] = slab[src]


def clear_slots_reference(slab: Tensor, slots: Tensor) -> None:
    slab[slots] = 0


def copy_slots_memcpy(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    """One memcpy for each slot; ctypes releases the GIL meanwhile."""
    base, size = slab.data_ptr(), slab.shape[1]
    sources, targets = _slots_of(slab, src), _slots_of(slab, dst)
    for source, target in zip(sources, targets, strict=True):
        memmove(base + target * size, base + source * size, size)


def clear_slots_memset(slab: Tensor, slots: Tensor) -> None:
    base, size = slab.data_ptr(), slab.shape[1]
    for slot in _slots_of(slab, slots):
        memset(base + slot * size, 0, size)


def _slots_of(slab: Tensor, slots: Tensor) -> list[int]:
    """The slots as numbers. Addresses are computed from them, so all must be inside the slab."""
    found: list[int] = slots.tolist()
    assert all(0 <= slot < len(slab) for slot in found), (found, len(slab))
    return found


@Kernel
def _copy_slots_kernel(
    slab_ptr: tl.tensor,
    src_ptr: tl.tensor,
    dst_ptr: tl.tensor,
    slot_words: int,
    BLOCK: tl.constexpr,
) -> None:
    """One program copies one part of one slot, in words of 8 bytes."""
    pair = tl.program_id(0)
    src = tl.load(src_ptr + pair).to(tl.int64) * slot_words
    dst = tl.load(dst_ptr + pair).to(tl.int64) * slot_words
    # Slots are multiples of 64 bytes, so two words at a time may move as one.
    src = tl.multiple_of(src, 8)
    dst = tl.multiple_of(dst, 8)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < slot_words
    tl.store(slab_ptr + dst + offs, tl.load(slab_ptr + src + offs, mask=mask), mask=mask)


@Kernel
def _clear_slots_kernel(
    slab_ptr: tl.tensor, slots_ptr: tl.tensor, slot_words: int, BLOCK: tl.constexpr
) -> None:
    slot = tl.multiple_of(tl.load(slots_ptr + tl.program_id(0)).to(tl.int64) * slot_words, 8)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(slab_ptr + slot + offs, tl.zeros([BLOCK], tl.int64), mask=offs < slot_words)


def copy_slots_triton(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    words = _in_words(slab)
    grid = (len(src), cdiv(words.shape[1], BLOCK_WORDS))
    if len(src):
        _copy_slots_kernel[grid](words, src, dst, words.shape[1], BLOCK=BLOCK_WORDS, num_warps=8)


def clear_slots_triton(slab: Tensor, slots: Tensor) -> None:
    words = _in_words(slab)
    grid = (len(slots), cdiv(words.shape[1], BLOCK_WORDS))
    if len(slots):
        _clear_slots_kernel[grid](words, slots, words.shape[1], BLOCK=BLOCK_WORDS, num_warps=8)


def _in_words(slab: Tensor) -> Tensor:
    assert slab.shape[1] % 64 == 0, slab.shape
    return slab.view(torch.int64)


def copy_slots(slab: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copies slot `src[i]` to slot `dst[i]`; both int64 [pairs]."""
    _check_slab(slab, src)
    _check_slab(slab, dst)
    assert src.shape == dst.shape, (src.shape, dst.shape)
    if slab.is_cuda:
        copy_slots_triton(slab, src, dst)
    else:
        copy_slots_memcpy(slab, src, dst)


def clear_slots(slab: Tensor, slots: Tensor) -> None:
    """Fills the given slots, int64 [slots], with zero bytes."""
    _check_slab(slab, slots)
    if slab.is_cuda:
        clear_slots_triton(slab, slots)
    else:
        clear_slots_memset(slab, slots)


def _check_slab(slab: Tensor, slots: Tensor) -> None:
    assert slab.dtype == torch.uint8, slab.dtype
    assert slab.ndim == 2, slab.shape
    assert slab.is_contiguous(), (slab.shape, slab.stride())
    assert slots.dtype == torch.int64, slots.dtype
    assert slots.ndim == 1, slots.shape
    assert slots.device == slab.device, (slots.device, slab.device)
