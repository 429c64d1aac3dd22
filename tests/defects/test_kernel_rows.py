"""Row 46 of the catalogue: pointer arithmetic beyond 2³¹, and few heads of keys and values.

Slots are touched at the end of a sparse slab of 17 GB or more, of which only those pages exist.
In 32 bits the offset of its last slots would wrap to its first ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman_kernels.attention._paged_attention_triton import paged_attention_decode_triton
from ferryman_kernels.attention.paged_attention import paged_attention_decode
from ferryman_kernels.attention.pages import write_kv, write_kv_triton
from ferryman_kernels.recurrence._delta_chunk_scan_triton import delta_chunk_scan_triton
from ferryman_kernels.recurrence._ssd_chunk_scan_triton import chunk_scan_triton
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.delta_decode import delta_decode, delta_decode_triton
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import (
    selective_state_update,
    selective_state_update_triton,
)
from ferryman_kernels.slots import (
    clear_slots,
    clear_slots_triton,
    copy_slots,
    copy_slots_triton,
)

SLOT_BYTES = 1 << 16
WRAP = (1 << 32) // (SLOT_BYTES // 4)
MAP_NORESERVE = 0x4000
"""Linux's flag, which the module mmap does not name: a mapping that promises no memory."""

LOW, HIGH = (3, 5), (WRAP + 3, WRAP + 5)
"""Two slots, and those whose offsets in words of 4 bytes differ from them by 2³²."""


def far_slab(num_slots: int) -> Tensor:
    if torch.cuda.is_available():
        pytest.skip("kernels/test_on_cuda does this in device memory")
    mapping = mmap.mmap(-1, SLOT_BYTES * num_slots, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    return torch.frombuffer(mapping, dtype=torch.float32).view(num_slots, -1)


@pytest.fixture
def slab() -> Tensor:
    return far_slab(WRAP + 16)


def runs_alike(slab: Tensor, run: Callable[[tuple[int, int]], Tensor]) -> None:
    """The same call on low and on high slots, which must neither see nor touch each other."""
    generator = torch.Generator().manual_seed(46)
    content = torch.randn(2, slab.shape[1], generator=generator)
    slab[list(LOW)] = 7.0
    slab[list(HIGH)] = content
    far = run(HIGH)
    found = slab[list(HIGH)]
    assert bool((slab[list(LOW)] == 7.0).all()), "a low slot was written"
    slab[list(LOW)] = content
    near = run(LOW)
    torch.testing.assert_close(far, near, rtol=0, atol=0)
    torch.testing.assert_close(found, slab[list(LOW)], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("copy", "clear"),
    [
        pytest.param(copy_slots, clear_slots, id="cpu path"),
        pytest.param(copy_slots_triton, clear_slots_triton, id="triton"),
    ],
)
def test_row_46_whole_slots_are_copied_and_cleared_where_words_of_8_bytes_wrap(
    copy: Callable[..., None], clear: Callable[..., None]
) -> None:
    wide = far_slab(2 * WRAP + 16).view(torch.uint8)
    low, high = 3, 2 * WRAP + 3
    wide[low], wide[high] = 7, 8
    copy(wide, torch.tensor([high]), torch.tensor([high + 2]))
    assert bool((wide[high + 2] == 8).all())
    clear(wide, torch.tensor([high]))
    assert not wide[high].any()
    assert bool((wide[low] == 7).all())
    assert not wide[low + 2].any()


def pages_of(slab: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values [slots, kv_heads, 4, 16] in the middle of each slot."""
    size = kv_heads * 4 * 16
    key = slab[:, 64 : 64 + size].view(-1, kv_heads, 4, 16)
    return key, slab[:, 1024 : 1024 + size].view(-1, kv_heads, 4, 16)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("run", [write_kv, write_kv_triton], ids=["cpu path", "triton"])
def test_row_46_keys_are_written_to_far_pages(
    slab: Tensor, run: Callable[..., None], kv_heads: int
) -> None:
    heads = torch.ones(8, kv_heads, 16)
    rows, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)

    def write(slots: tuple[int, int]) -> Tensor:
        run(*pages_of(slab, kv_heads), heads, 2 * heads, torch.tensor([slots]), rows, positions)
        return heads

    runs_alike(slab, write)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "run", [paged_attention_decode, paged_attention_decode_triton], ids=["cpu path", "triton"]
)
def test_row_46_attention_reads_far_pages(
    slab: Tensor, run: Callable[..., Tensor], kv_heads: int
) -> None:
    """One head of keys for four of queries is as good as one for two."""
    q = torch.linspace(-1, 1, 4 * 16).view(1, 4, 16)

    def attend(slots: tuple[int, int]) -> Tensor:
        table = torch.tensor([slots])
        return run(q, *pages_of(slab, kv_heads), table, torch.tensor([6]), 0.25, 0)

    runs_alike(slab, attend)


@pytest.mark.parametrize(
    "run", [selective_state_update, selective_state_update_triton], ids=["cpu path", "triton"]
)
def test_row_46_states_advance_in_far_slots(slab: Tensor, run: Callable[..., Tensor]) -> None:
    states = slab[:, 64 : 64 + 2 * 8 * 16].view(-1, 2, 8, 16)
    x, dt, A = torch.ones(2, 2, 8), torch.full((2, 2), 0.5), torch.tensor([-1.0, -2.0])
    B, C, D = torch.ones(2, 1, 16), torch.full((2, 1, 16), 0.5), torch.ones(2)

    def update(slots: tuple[int, int]) -> Tensor:
        working = torch.tensor(slots)
        return run(states, x, dt, A, B, C, D, working, working)

    runs_alike(slab, update)


@pytest.mark.parametrize("run", [chunk_scan, chunk_scan_triton], ids=["cpu path", "triton"])
def test_row_46_the_scan_writes_states_and_snapshots_to_far_slots(
    slab: Tensor, run: Callable[..., Tensor]
) -> None:
    states = slab[:, 64 : 64 + 2 * 8 * 16].view(-1, 2, 8, 16)
    x, dt, A = torch.ones(20, 2, 8), torch.full((20, 2), 0.5), torch.tensor([-1.0, -2.0])
    B, C, D = torch.ones(20, 1, 16), torch.full((20, 1, 16), 0.5), torch.ones(2)

    def scan(slots: tuple[int, int]) -> Tensor:
        working, kept = slots
        snapshots = ((0, 16, kept),)
        return run(x, dt, A, B, C, D, states, ((0, 20),), torch.tensor([working]), snapshots, 16)

    runs_alike(slab, scan)


@pytest.mark.parametrize("run", [delta_decode, delta_decode_triton], ids=["cpu path", "triton"])
def test_row_46_the_delta_rule_steps_in_far_slots(slab: Tensor, run: Callable[..., Tensor]) -> None:
    states = slab[:, 64 : 64 + 2 * 8 * 16].view(-1, 2, 8, 16)
    q, v, rates = torch.full((2, 1, 8), 0.25), torch.ones(2, 2, 16), torch.full((2, 2), 0.5)

    def step(slots: tuple[int, int]) -> Tensor:
        working = torch.tensor(slots)
        return run(states, q, q, v, -rates, rates, working, working)

    runs_alike(slab, step)


@pytest.mark.parametrize(
    "run", [delta_chunk_scan, delta_chunk_scan_triton], ids=["cpu path", "triton"]
)
def test_row_46_the_delta_rule_scans_to_far_slots(slab: Tensor, run: Callable[..., Tensor]) -> None:
    states = slab[:, 64 : 64 + 2 * 8 * 16].view(-1, 2, 8, 16)
    q, v, rates = torch.full((12, 1, 8), 0.25), torch.ones(12, 2, 16), torch.full((12, 2), 0.5)

    def scan(slots: tuple[int, int]) -> Tensor:
        working, snapshot = slots
        where = ((0, 12),), torch.tensor([working]), ((0, 8, snapshot),)
        return run(q, q, v, -rates, rates, states, *where, 8)

    runs_alike(slab, scan)
