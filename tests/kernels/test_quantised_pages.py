"""Pages of e4m3 codes against every e4m3 number there is, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ferryman_kernels.attention._paged_attention_triton import (
    paged_attention_decode_triton,
    paged_attention_prefill_triton,
)
from ferryman_kernels.attention.quantised_pages import (
    coded,
    named_pages,
    opened_pages,
    write_coded_kv,
)

# Their tensors come in tuples, so the checker cannot count the arguments.
DECODE: Any = paged_attention_decode_triton
PREFILL: Any = paged_attention_prefill_triton
CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(torch.float8_e4m3fn).double()


def nearest(x: float) -> tuple[float, float]:
    """The least distance of an e4m3 number from x, and the number; of two the even code's."""
    distances = (NUMBERS - x).abs().nan_to_num(torch.inf)
    least = distances.min()
    codes = CODES[distances == least].tolist()
    even = [code for code in codes if code % 2 == 0] or codes
    return float(least), float(NUMBERS[even[0]])


@given(st.integers(-140, 120), st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4))
def test_a_row_has_the_least_scale_and_the_nearest_codes(power: int, numbers: list[float]) -> None:
    row = torch.tensor(numbers, dtype=torch.float64) * 2.0**power
    found = coded(row[None, None].float())
    row, scale = row.float().double(), float(found.scales)
    top = float(row.abs().max())
    if top == 0:
        assert scale == 1
    else:
        assert top / scale <= 448
        is_tiny = top < 2.0**-136  # its codes are zeros at any scale
        assert top / (scale / 2) > 448 or scale == 2.0**-126 or is_tiny
    for x, value in zip(row.tolist(), found.codes[0, 0].double().tolist(), strict=True):
        assert value == nearest(x / scale)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stored_values_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    rows = coded((torch.randn(50, 2, 16) * 3).to(dtype))
    assert rows.values(dtype).double().equal(rows.values(torch.float64))


def test_rows_without_numbers_stay_so() -> None:
    rows = torch.tensor([[[1.0, torch.nan]], [[torch.inf, 1.0]], [[0.0, 0.0]]])
    found = coded(rows).values(torch.float64)
    assert found[:2].isnan().any(-1).all()
    assert found[2].equal(torch.zeros(1, 2, dtype=torch.float64))


def pages_of(num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poisoned pages of keys and values, and their scales."""
    codes = [torch.full((num_slots, 2, 4, 16), 0xFF, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.full((num_slots, 2, 4), torch.nan) for _ in range(2)]
    keys, values = (each.view(torch.float8_e4m3fn) for each in codes)
    return keys, values, scales[0], scales[1]


def test_what_is_read_is_what_was_stored_whatever_the_page() -> None:
    keys, values = torch.randn(2, 7, 2, 16, dtype=torch.float64)
    table, rows = torch.tensor([[5, 2], [0, -1]]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    positions = torch.tensor([0, 1, 2, 3, 4, 0, -1])
    state = pages_of(6)
    write_coded_kv(*state, keys, values, table, rows, positions)
    for pages, scales, given_ in zip(state[:2], state[2:], (keys, values), strict=True):
        slots, places = named_pages(table)
        opened = opened_pages(pages, scales, slots, torch.float64)
        at = places[rows[:6], positions[:6] // 4]
        assert opened[at, :, positions[:6] % 4].equal(coded(given_[:6]).values(torch.float64))
        assert scales[[1, 3, 4]].isnan().all(), "no other page is written"
        assert scales[0, :, 1:].isnan().all(), "nor anything for a token that pads a batch"


def test_a_page_is_opened_once_whatever_names_it() -> None:
    """Rows share a prefix, and a short row stands beside a long one."""
    slots, places = named_pages(torch.tensor([[4, 2, 7], [4, -1, -1]]))
    assert sorted(slots.tolist()) == [0, 2, 4, 7], "slot 0 stands for what is not named"
    assert torch.where(places < 0, -1, slots[places]).tolist() == [[4, 2, 7], [4, -1, -1]]


SPANS = ((0, 21), (0, 12))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_that_read_codes_have_the_bits_of_opened_pages(
    dtype: torch.dtype, window: int, device: torch.device
) -> None:
    """A page of NaN beside them, as one that another request owns, changes nothing."""
    key_codes, value_codes, key_scales, value_scales = (each.to(device) for each in pages_of(9))
    codes, scales = (key_codes, value_codes), (key_scales, value_scales)
    keys, values = (torch.randn(2, 33, 2, 16) * 5).to(device, dtype)
    table = torch.tensor([[5, 2, 0, 7, 4, 8], [3, 1, 6, -1, -1, -1]], device=device)
    rows = torch.tensor([0] * 21 + [1] * 12, device=device)
    positions = torch.tensor([*range(21), *range(12)], device=device)
    write_coded_kv(*codes, *scales, keys, values, table, rows, positions)
    q = torch.randn(33, 4, 16).to(device, dtype)
    slots, places = named_pages(table)
    opened = (
        opened_pages(key_codes, key_scales, slots, dtype),
        opened_pages(value_codes, value_scales, slots, dtype),
    )
    seen = 0.3, window, None, 0.0
    found = PREFILL(q, *codes, table, SPANS, *seen, scales)
    assert found.equal(PREFILL(q, *opened, places, SPANS, *seen))
    assert found.isfinite().all()
    at = torch.tensor([20, 11, -1], device=device)
    table, places = table[[0, 1, 1]], places[[0, 1, 1]]
    found = DECODE(q[:3], *codes, table, at, *seen, scales)
    assert found.equal(DECODE(q[:3], *opened, places, at, *seen))
    assert found.isfinite().all()


def test_kernels_read_every_code_as_its_number(device: torch.device) -> None:
    """A single key has the weight 1: what is seen of it is its value."""
    codes = CODES.view(16, 1, 1, 16).expand(16, 1, 4, 16).contiguous().to(device)
    scales = torch.full((16, 1, 4), 0.25, device=device)
    keys = torch.zeros_like(codes)
    q = torch.ones(16, 1, 16, device=device)
    table, first = torch.arange(16, device=device)[:, None], torch.zeros(16, device=device).long()
    seen = 1.0, 0, None, 0.0
    found = DECODE(q, keys, codes, table, first, *seen, (scales, scales))
    found = found.flatten().cpu().double()
    spoilt = NUMBERS.isnan()
    assert found[~spoilt].equal(NUMBERS[~spoilt] / 4)
    assert found[spoilt].isnan().all()
